"""Recomputation of normalisation outputs in the backward pass, with unchanged results."""

from itertools import count

import numpy as np
import pytest
from common_checks import max_relative_difference

import neondist as nd
from neondist.comm import loopback


class InputSavingNorm(nd.BatchNormLayer):
    """Batch norm that overrides a method, so that its output is kept."""

    def forward(self, ctx, view):
        return super().forward(ctx, view)


class InputSavingNormDist(nd.Dist, InputSavingNorm):
    pass


def build_model(norm_class, grid=None):
    counter = count()

    def make_norm():
        return norm_class(name=f"norm{next(counter)}")

    def make_conv(kernel, **options):
        return nd.ConvLayerDist(6, kernel, bias=False, **options)

    def make_relu():
        return nd.ActivationLayerDist(nd.ReLU())

    layers = [
        make_conv(3, padding=1),
        make_norm(),
        make_relu(),
        make_conv(5, padding=2, padding_mode="reflect"),
        make_norm(),
        make_relu(),
        make_conv(1),
        make_norm(),
        make_norm(),  # needs its own input in backward
        make_conv(3, stride=2, padding=1, padding_mode="wrap"),
        make_norm(),
        make_relu(),
        nd.Sum([[], [make_conv(3, padding=(1, 1))]]),
        make_norm(),
        nd.DeconvLayerDist(6, 3, stride=2, padding=1),
        make_norm(),
        nd.ActivationLayerDist(nd.Tanh()),  # not fused with the norm
        make_conv(3, padding=1),
        nd.GlobalAvgPoolingLayerDist(),
        nd.FCLayerDist(3),
    ]
    model = nd.ConvnetDist(layers, seed=3, dtype="float64", optimizer=nd.SGD(0.1))
    model.build((17, 12, 3), 4, grid)
    return model


def run_passes(model):
    rng = np.random.default_rng(5)
    x, dy = rng.normal(0.2, 1, size=(4, 17, 12, 3)), rng.normal(size=(4, 3))
    run, arrays = model.forward(model.scatter(x)), {}
    for repetition in range(2):  # backward may be repeated
        arrays[f"dx {repetition}"] = model.gather_input(run.backward(model.scatter_output(dy)))
        arrays |= {f"gradient {repetition} {name}": array for name, array in model.gradients().items()}
    arrays["loss"] = np.array([model.train_batch(model.scatter(x), np.arange(4) % 3)])
    return arrays | model.state()


def plan_live_ranges(model):
    (section,) = model.compiled.sections
    return [section.memory_plan(tile) for tile in range(model.grid.shape.tiles)]


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.long
def test_recomputation_keeps_results(ranks):
    def job(comm):
        recomputed, stored = (
            build_model(norm, nd.ProcessGrid(comm)) for norm in (nd.BatchNormLayerDist, InputSavingNormDist)
        )
        assert all(
            (sorted(plan.rebuilt_view_ranges), sorted(plan.border_ranges)) == ([3, 6, 8, 12, 15], [3, 12])
            for plan in plan_live_ranges(recomputed)
        )
        assert not any(plan.rebuilt_view_ranges for plan in plan_live_ranges(stored))
        assert recomputed.compiled.needed_bytes < 0.9 * stored.compiled.needed_bytes
        return max_relative_difference(run_passes(recomputed), run_passes(stored))

    assert max(loopback.run(ranks, job)) < 1e-11


def test_streaming_halves_the_memory_of_one_process():
    def make_plan(extent, grid=None, **options):
        layers = [nd.ConvLayer(16, 3, activation=nd.ReLU()), nd.ConvLayer(16, 3), nd.GlobalAvgPoolingLayer()]
        model = nd.Convnet([*layers, nd.FCLayer(10)], seed=0, **options)
        return model.plan((extent, extent, 3), grid, 1)

    large = make_plan(1024)
    assert large.stream is not None
    assert not large.is_streamed  # the image is read whole
    unstreamed = make_plan(1024, memory="64GiB")  # enough for everything
    assert unstreamed.stream is None
    assert large.needed_bytes <= unstreamed.needed_bytes / 2
    assert make_plan(256).stream is None
    assert make_plan(1024, nd.GridShape(1, 2, 1)).stream is None
    assert make_plan(1024, recompute=True).stream is None
