"""A network applied block by block gives the numbers of the whole image, whatever the network and the blocks."""

import numpy as np
import pytest
from graphs.build import model as make
from graphs.draw import draw_case
from graphs.play import first_state

import neondist as nd
from neondist.errors import ConfigError, UserError
from neondist.plan.blocks import BlockPlan, find_obstacles, fit_blocks
from neondist.runtime.blocks import Blockwise


def in_blocks(model, x, size):
    """Return the output, put together from blocks, and how many kinds of them there are."""
    plan = BlockPlan(model.compiled.graph, size)
    run, y = Blockwise(plan, model.context), np.full((len(x), *model.output_shape), np.nan)
    for number in range(len(plan)):
        cells, image = plan.output(number).slices, plan.image(number).slices
        assert np.isnan(y[(slice(None), *cells)]).all()
        y[(slice(None), *cells)] = run.run(number, x[(slice(None), *image)])
    return y, len({plan.kind(number) for number in range(len(plan))}), len(plan)


def check(model, x, size):
    whole = model.fprop(x, training=False)
    found, kinds, blocks = in_blocks(model, x, size)
    np.testing.assert_allclose(found, whole, rtol=1e-12, atol=1e-12 * max(1, np.abs(whole).max(initial=0)))
    return kinds, blocks


@pytest.mark.parametrize("first", range(0, 45, 15))
@pytest.mark.long
def test_generated_networks(first):
    checked = 0
    for number in range(first, first + 15):
        case = draw_case(16, number).changed(scheme="halo", strips=None, memory=None, recompute=False, accumulate=1)
        case = case.changed(backend="numpy", dtype="float64")
        try:
            model = make(case, dist=False)
            model.build(case.shape, 2)
        except UserError:
            continue
        if any(find_obstacles(model.compiled.graph)):
            continue
        model.load_state(first_state(case)[0])
        rng = np.random.default_rng(number)
        x = rng.normal(size=(2, *case.shape))
        for _ in range(2):
            check(model, x, [int(rng.integers(1, n + 2)) for n in model.output_shape[:-1]])
        checked += 1
    assert checked


def unet(ndim=2, wide=2):
    """Two levels down and up again, by a deconvolution and by enlarging, with skips; running statistics."""

    def conv(channels):
        return [nd.ConvLayer(channels, 3, padding=1), nd.BatchNormLayer(), nd.ActivationLayer(nd.ReLU())]

    inner = [nd.MaxPoolingLayer(2), *conv(2 * wide), nd.UpsampleLayer(2, "bilinear"), nd.ConvLayer(wide, 1)]
    middle = [nd.MaxPoolingLayer(3, 2, 1), nd.Concat([[], inner]), nd.DeconvLayer(wide, 4, 2, 1)]
    layers = [*conv(wide), nd.Concat([middle, []]), *conv(wide), nd.ConvLayer(3, 1)]
    return nd.Convnet(layers, seed=1, dtype="float64", backend="numpy")


@pytest.mark.parametrize(
    ("shape", "size", "alike"),
    [
        ((96, 64, 1), (8, 8), True),
        ((64, 48, 1), (7, 13), False),
        ((200, 4, 1), (8, 4), False),
        ((16, 12, 8, 2), (4, 12, 4), False),
        ((96, 1), (12,), False),
        ((12, 12, 2), (100, 1), False),
    ],
)
@pytest.mark.long
def test_a_network_that_goes_down_and_up(shape, size, alike):
    model = unet(len(shape) - 1)
    model.build(shape, 2)
    state = {name: array + 0.1 for name, array in model.state().items()}
    model.load_state(state)
    found, blocks = check(model, np.random.default_rng(0).normal(size=(2, *shape)), size)
    assert found <= blocks
    assert not alike or found < blocks / 3


@pytest.mark.parametrize(
    ("shape", "size", "shared", "alike"),
    [
        ((64, 25, 2), (8, 5), True, True),
        ((19, 23, 1), (7, 4), (3, 5), False),
        ((47, 2), (6,), 4, False),
        ((9, 7, 8, 1), (4, 7, 3), 2, False),
    ],
)
@pytest.mark.long
def test_contrast_normalisation_and_shared_filters(shape, size, shared, alike):
    layers = [
        nd.LCNLayer(5, min_deviation=0.2),
        nd.LocalFilteringLayer(3, 3, padding=1, shared=shared),
        nd.Sum([[nd.LCNLayer(3, min_deviation=0.3, halo="wide", window="uniform")], []]),
        nd.ConvLayer(2, 2),
        nd.LCNLayer(3, min_deviation=0.1, padding_mode="reflect"),
    ]
    model = nd.Convnet(layers, seed=1, dtype="float64", backend="numpy")
    model.build(shape, 2)
    kinds, blocks = check(model, np.random.default_rng(0).normal(size=(2, *shape)), size)
    assert kinds < blocks if alike else kinds == blocks


def test_what_sees_the_whole_image_is_named():
    for layers, name in (
        ([nd.ConvLayer(2, 3), nd.GroupNormLayer(2)], ("group_norm1", "sums over the whole image")),
        ([nd.ConvLayer(2, 3), nd.FCLayer(3)], ("fc1", "needs the whole image to compute a vector")),
        ([nd.ConvLayer(2, 3, padding=1, padding_mode="wrap")], ("conv1", "its image wraps around")),
        ([nd.LCNLayer(3, min_deviation="mean")], ("lcn1", "sums over the whole image")),
        ([nd.LCNLayer(11, padding_mode="reflect")], ("lcn1", "its two stages exchange means")),
        (
            [nd.LocalFilteringLayer(2, 3)],
            ("local_filtering1", "each tile stores only the weights of its own outputs"),
        ),
    ):
        model = nd.Convnet(layers)
        assert list(find_obstacles(model.plan((9, 9, 1)).graph)) == [name]


def test_blocks_shrink_until_they_fit():
    graph = unet().plan((500, 400, 1)).graph
    whole = fit_blocks(graph, (10_000, 10_000), 1 << 60, 8)
    assert (len(whole), whole.size) == (1, (500, 400))
    large = fit_blocks(graph, (256, 256), 1 << 60, 8)
    assert large.size == (256, 256)
    before = large.largest
    for numbers in (before - 1, before // 20, before // 100):
        plan = fit_blocks(graph, (256, 256), numbers, 8)
        assert plan.largest <= numbers < before
        assert all(n % 4 == 0 for n in plan.size)
    assert fit_blocks(graph, (300, 45), 1 << 60, 8).size == (256, 44)
    with pytest.raises(ConfigError, match=r"even a block of 4 x 4 takes .*; layer '\w+'"):
        fit_blocks(graph, (256, 256), 10, 8)
