"""Block-wise inference against inference on full images, for networks and blocks of any kind."""

import numpy as np
import pytest
from graphs.build import build_model
from graphs.draw import draw_case
from graphs.execution import draw_state

import neondist as nd
from neondist.errors import ConfigError, UserError
from neondist.plan.blocks import BlockPlan, find_blockwise_obstacles, fit_blocks
from neondist.runtime.blocks import BlockwiseExecutor


def run_in_blocks(model, x, size):
    """Return the output assembled from blocks, the number of kinds of blocks, and the number of blocks."""
    plan = BlockPlan(model.compiled.graph, size)
    blockwise, y = BlockwiseExecutor(plan, model.context), np.full((len(x), *model.output_shape), np.nan)
    for number in range(len(plan)):
        cells, image = plan.output_box(number).slices, plan.input_box(number).slices
        assert np.isnan(y[(slice(None), *cells)]).all()
        y[(slice(None), *cells)] = blockwise.run(number, x[(slice(None), *image)])
    return y, len({plan.position_independent_key(number) for number in range(len(plan))}), len(plan)


def check_blocks(model, x, size):
    expected = model.fprop(x, training=False)
    actual, kinds, blocks = run_in_blocks(model, x, size)
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12 * max(1, np.abs(expected).max(initial=0)))
    return kinds, blocks


@pytest.mark.parametrize("first", range(0, 45, 15))
@pytest.mark.long
def test_blocks_match_full_images_for_generated_networks(first):
    checked = 0
    for number in range(first, first + 15):
        case = draw_case(16, number).replace(scheme="halo", strips=None, memory=None, recompute=False, accumulate=1)
        case = case.replace(backend="numpy", dtype="float64")
        try:
            model = build_model(case, dist=False)
            model.build(case.shape, 2)
        except UserError:
            continue
        if any(find_blockwise_obstacles(model.compiled.graph)):
            continue
        model.load_state(draw_state(case)[0])
        rng = np.random.default_rng(number)
        x = rng.normal(size=(2, *case.shape))
        for _ in range(2):
            check_blocks(model, x, [int(rng.integers(1, n + 2)) for n in model.output_shape[:-1]])
        checked += 1
    assert checked


def make_unet(ndim=2, width=2):
    """U-Net of two levels with batch norm, upsampled by a deconvolution and by interpolation."""

    def conv(channels):
        return [nd.ConvLayer(channels, 3, padding=1), nd.BatchNormLayer(), nd.ActivationLayer(nd.ReLU())]

    inner = [nd.MaxPoolingLayer(2), *conv(2 * width), nd.UpsampleLayer(2, "bilinear"), nd.ConvLayer(width, 1)]
    middle = [nd.MaxPoolingLayer(3, 2, 1), nd.Concat([[], inner]), nd.DeconvLayer(width, 4, 2, 1)]
    layers = [*conv(width), nd.Concat([middle, []]), *conv(width), nd.ConvLayer(3, 1)]
    return nd.Convnet(layers, seed=1, dtype="float64", backend="numpy")


@pytest.mark.parametrize(
    ("shape", "size", "few_kinds"),
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
def test_blocks_match_full_images_for_a_unet(shape, size, few_kinds):
    model = make_unet(len(shape) - 1)
    model.build(shape, 2)
    state = {name: array + 0.1 for name, array in model.state().items()}
    model.load_state(state)
    kinds, blocks = check_blocks(model, np.random.default_rng(0).normal(size=(2, *shape)), size)
    assert kinds <= blocks
    assert not few_kinds or kinds < blocks / 3


@pytest.mark.parametrize(
    ("shape", "size", "shared", "few_kinds"),
    [
        ((64, 25, 2), (8, 5), True, True),
        ((19, 23, 1), (7, 4), (3, 5), False),
        ((47, 2), (6,), 4, False),
        ((9, 7, 8, 1), (4, 7, 3), 2, False),
    ],
)
@pytest.mark.long
def test_contrast_normalisation_and_shared_filters(shape, size, shared, few_kinds):
    layers = [
        nd.LCNLayer(5, min_deviation=0.2),
        nd.LocalFilteringLayer(3, 3, padding=1, shared=shared),
        nd.Sum([[nd.LCNLayer(3, min_deviation=0.3, halo="wide", window="uniform")], []]),
        nd.ConvLayer(2, 2),
        nd.LCNLayer(3, min_deviation=0.1, padding_mode="reflect"),
    ]
    model = nd.Convnet(layers, seed=1, dtype="float64", backend="numpy")
    model.build(shape, 2)
    kinds, blocks = check_blocks(model, np.random.default_rng(0).normal(size=(2, *shape)), size)
    assert kinds < blocks if few_kinds else kinds == blocks


def test_obstacles_are_reported():
    for layers, expected in (
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
        assert list(find_blockwise_obstacles(model.plan((9, 9, 1)).graph)) == [expected]


def test_blocks_shrink_until_they_fit():
    graph = make_unet().plan((500, 400, 1)).graph
    single = fit_blocks(graph, (10_000, 10_000), 1 << 60, 8)
    assert (len(single), single.size) == (1, (500, 400))
    large = fit_blocks(graph, (256, 256), 1 << 60, 8)
    assert large.size == (256, 256)
    largest = large.max_block_memory
    for capacity in (largest - 1, largest // 20, largest // 100):
        plan = fit_blocks(graph, (256, 256), capacity, 8)
        assert plan.max_block_memory <= capacity < largest
        assert all(n % 4 == 0 for n in plan.size)
    assert fit_blocks(graph, (300, 45), 1 << 60, 8).size == (256, 44)
    with pytest.raises(ConfigError, match=r"even a block of 4 x 4 takes .*; layer '\w+' takes the most"):
        fit_blocks(graph, (256, 256), 10, 8)
