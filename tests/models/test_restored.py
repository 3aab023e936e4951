"""Outputs of normalisations are recomputed in the backward pass instead of being kept, which changes no number."""

from itertools import count

import numpy as np
import pytest
from support import worst

import neondist as nd
from neondist.comm import loopback


class Keeping(nd.BatchNormLayer):
    """The same numbers; but what a class says of a method holds for no other, so that what it gives is kept."""

    def forward(self, ctx, view):
        return super().forward(ctx, view)


class KeepingDist(nd.Dist, Keeping):
    pass


def built(kind, grid=None):
    number = count()

    def norm():
        return kind(name=f"norm{next(number)}")

    def conv(kernel, **more):
        return nd.ConvLayerDist(6, kernel, bias=False, **more)

    def relu():
        return nd.ActivationLayerDist(nd.ReLU())

    layers = [
        conv(3, padding=1),
        norm(),
        relu(),
        conv(5, padding=2, padding_mode="reflect"),
        norm(),
        relu(),
        conv(1),
        norm(),
        norm(),  # which needs its input again itself
        conv(3, stride=2, padding=1, padding_mode="wrap"),
        norm(),
        relu(),
        nd.Sum([[], [conv(3, padding=(1, 1))]]),
        norm(),
        nd.DeconvLayerDist(6, 3, stride=2, padding=1),
        norm(),
        nd.ActivationLayerDist(nd.Tanh()),  # goes with no norm
        conv(3, padding=1),
        nd.GlobalAvgPoolingLayerDist(),
        nd.FCLayerDist(3),
    ]
    model = nd.ConvnetDist(layers, seed=3, dtype="float64", optimizer=nd.SGD(0.1))
    model.build((17, 12, 3), 4, grid)
    return model


def numbers(model):
    rng = np.random.default_rng(5)
    x, dy = rng.normal(0.2, 1, size=(4, 17, 12, 3)), rng.normal(size=(4, 3))
    run, found = model.forward(model.scatter(x)), {}
    for time in range(2):  # a pass may be gone back through again
        found[f"dx {time}"] = model.gather_input(run.backward(model.scatter_output(dy)))
        found |= {f"gradient {time} {name}": array for name, array in model.gradients().items()}
    found["loss"] = np.array([model.train_batch(model.scatter(x), np.arange(4) % 3)])
    return found | model.state()


def planned(model):
    (section,) = model.compiled.sections
    return [section.live_ranges(tile) for tile in range(model.grid.shape.tiles)]


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.long
def test_numbers_are_those_of_what_is_kept(ranks):
    def job(comm):
        again, kept = (built(norm, nd.ProcessGrid(comm)) for norm in (nd.BatchNormLayerDist, KeepingDist))
        assert all(
            (sorted(plan.restored), sorted(plan.borders)) == ([3, 6, 8, 12, 15], [3, 12]) for plan in planned(again)
        )
        assert not any(plan.restored for plan in planned(kept))
        assert again.compiled.needed < 0.9 * kept.compiled.needed
        return worst(numbers(again), numbers(kept))

    assert max(loopback.run(ranks, job)) < 1e-11


def test_half_of_the_memory_of_one_process_for_little_work():
    def streams(extent, grid=None, **more):
        layers = [nd.ConvLayer(16, 3, activation=nd.ReLU()), nd.ConvLayer(16, 3), nd.GlobalAvgPoolingLayer()]
        model = nd.Convnet([*layers, nd.FCLayer(10)], seed=0, **more)
        return model.plan((extent, extent, 3), grid, 1)

    large = streams(1024)
    assert large.stream is not None
    assert not large.streams  # the image is read whole
    whole = streams(1024, memory="64GiB")  # which is enough for all of it
    assert whole.stream is None
    assert large.needed <= whole.needed / 2
    assert streams(256).stream is None
    assert streams(1024, nd.GridShape(1, 2, 1)).stream is None
    assert streams(1024, recompute=True).stream is None
