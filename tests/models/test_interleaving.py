"""Passes interleave: each has its own state, and gives what it would have given alone."""

import gc

import numpy as np
import pytest
from present import NAMES

import neondist as nd
from neondist.comm import loopback
from neondist.errors import PassError

SHAPE = (9, 7, 3)


def layers(kind=""):
    """Every layer, the names of whose classes end in `kind`."""

    def of(name, *args, **kwargs):
        return getattr(nd, f"{name}Layer{kind}")(*args, **kwargs)

    tanh = nd.Tanh()
    return [
        of("Conv", 4, 3, padding=1, activation=nd.ReLU()),
        nd.Sum([[of("BatchNorm"), of("Conv", 4, 3, padding="same", activation=tanh)], [], of("LCN", 3)]),
        of("MaxPooling", 3, 1, padding=1),
        nd.Concat(
            [[of("GroupNorm", 2), of("Dropout", 0.3)], of("LRN", 3, alpha=0.5), [of("L2Pooling", 3, 1, padding=1)]]
        ),
        of("Deconv", 4, 3, padding=1, activation=tanh),
        of("Upsample", 2),
        of("AvgPooling", 2),
        of("LCN", 3, min_deviation="mean"),
        of("Pad", 1),
        of("Crop", 1),
        of("Conv", 4, 3, scheme=nd.schemes.Halo(backward="gather"), padding=1),
        of("LocalFiltering", 4, 3, activation=nd.Logistic()),
        of("Activation", tanh),
        nd.Sum([[of("InstanceNorm")], []]),
        nd.Concat([[of("GlobalAvgPooling")], [of("FC", 5, activation=tanh), of("FC", 6, activation=tanh)]]),
        of("BatchNorm"),
        of("FC", 4),
    ]


def built(kind="", grid=None, backend="numpy", batch=4, **more):
    model = (nd.ConvnetDist if kind else nd.Convnet)(layers(kind), dtype="float64", seed=3, backend=backend, **more)
    model.build(SHAPE, batch, grid)
    return model


def arrays(model, seed):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(4, *SHAPE)), rng.normal(size=(4, *model.output_shape))


def separately(model, seeds):
    """Outputs, input gradients and gradients of one pass after the other."""
    found = {}
    for seed in seeds:
        x, dy = arrays(model, seed)
        run = model.forward(model.scatter(x))
        y, dx = model.gather(run.output), model.gather_input(run.backward(model.scatter_output(dy)))
        found[seed] = model.gradients() | {"y": y, "dx": dx}
    return found


def interleaved(model, seeds, order):
    """The same, forward passes first, backward in another order."""
    runs, found = {seed: model.forward(model.scatter(arrays(model, seed)[0])) for seed in seeds}, {}
    for seed in order:
        dx = model.gather_input(runs[seed].backward(model.scatter_output(arrays(model, seed)[1])))
        found[seed] = model.gradients() | {"y": model.gather(runs[seed].output), "dx": dx}
    return found


@pytest.mark.parametrize(
    ("ranks", "backend"), [*((ranks, NAMES[0]) for ranks in (1, 6)), *((4, name) for name in NAMES[1:])]
)
@pytest.mark.long
def test_in_either_order(ranks, backend):
    expected = separately(built(backend=backend), (0, 1, 2))

    def job(comm):
        return [interleaved(built("Dist", nd.ProcessGrid(comm), backend), (0, 1, 2), order) for order in ORDERS]

    for found in loopback.run(ranks, job)[-1]:
        for seed, arrays_ in expected.items():
            for name, array in arrays_.items():
                np.testing.assert_allclose(found[seed][name], array, rtol=0, atol=1e-12 * max(1, np.abs(array).max()))


ORDERS = ((0, 1, 2), (2, 1, 0), (1, 2, 0))


def test_a_pass_leaves_no_trace_on_a_layer():
    model = built()
    before = {layer.name: dict(vars(layer)) for layer in model.leaves}
    run = model.forward(arrays(model, 0)[0])
    run.backward(arrays(model, 0)[1])
    for layer in model.leaves:
        assert vars(layer).keys() == before[layer.name].keys()
        assert all(value is before[layer.name][name] for name, value in vars(layer).items())


def test_memory_is_given_back_and_used_again():
    model = built()
    x, dy = arrays(model, 0)
    for _ in range(3):
        runs = [model.forward(x) for _ in range(3)]
        runs[1].backward(dy)
        del runs
    assert model.executor.blocks.count == 3
    kept = model.forward(x)
    model.train_batch(x, np.zeros(4, int))
    assert model.executor.blocks.count == 3
    kept.close()
    gc.collect()
    assert len(model.executor.blocks.free) == 3


def test_a_way_back_after_the_weights_have_changed_is_refused():
    model = built()
    x, dy = arrays(model, 0)
    run = model.forward(x)
    model.train_batch(x, np.zeros(4, int))
    with pytest.raises(PassError, match="the weights have changed"):
        run.backward(dy)
    run = model.forward(x)
    run.close()
    with pytest.raises(PassError, match="it was closed"):
        run.backward(dy)
