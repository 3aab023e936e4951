"""Steps whose passes are graphs of a device: the same numbers as ordinary steps; see helpers/device_graph.py."""

import warnings
from contextlib import closing

import numpy as np
import pytest
from device import Device
from device_graph import CapturingKernels

import neondist as nd
from neondist.backends.cupy import CupyKernels
from neondist.observer import Observer
from neondist.runtime.replay import KEPT, WARM

SHAPE, BATCH = (9, 8, 3), 3
COST = nd.CrossEntropy(class_weights=[1, 2, 1, 0.5])


def small(*more):
    return [nd.ConvLayer(4, 3, padding=1), nd.BatchNormLayer(), nd.ActivationLayer(nd.ReLU()), *more, nd.FCLayer(4)]


def everything():
    return [
        nd.ConvLayer(4, 3, padding=1, padding_mode="reflect"),
        nd.BatchNormLayer(),
        nd.ActivationLayer(nd.ReLU()),
        nd.MaxPoolingLayer(3, 2, padding=1),
        nd.Sum([[nd.ConvLayer(4, 3, padding=1, groups=2, activation=nd.Tanh())], []]),
        nd.InstanceNormLayer(affine=True),
        nd.LocalFilteringLayer(4, 3, padding=1),
        nd.UpsampleLayer(2, mode="bilinear"),
        nd.DeconvLayer(4, 2, stride=2),
        nd.GroupNormLayer(2),
        nd.LCNLayer(3),
        nd.Concat([[nd.AvgPoolingLayer(2)], [nd.MaxPoolingLayer(2)]]),
        nd.LRNLayer(3),
        nd.L2PoolingLayer(2),
        nd.FCLayer(5, activation=nd.Logistic()),
        nd.FCLayer(4),
    ]


def built(table, layers, kind=nd.Convnet, **more):
    device = Device(table=table)
    how = {"optimizer": nd.Adam(0.01), "cost": COST, "seed": 1} | more
    model = kind(layers, backend=device.backend, dtype="float64", **how)
    model.build(SHAPE, BATCH, nd.ProcessGrid.serial())
    return model, device


def compared(layers, count=WARM + 4, sizes=(BATCH,), before=lambda model, step: None, **more):
    """Run steps of other images, labels and rates with and without graphs, which must be the same to the last bit.

    Returns the launches of each step, without and with, and the model with them.
    """
    results, launches = [], []
    for table in (CupyKernels, CapturingKernels):
        (model, device), rng, losses = built(table, layers(), **more), np.random.default_rng(0), []
        launches.append([])
        for step in range(count):
            size = sizes[step % len(sizes)]
            x, labels = rng.normal(size=(size, *SHAPE)), rng.integers(0, 4, size)
            before(model, step)
            started, waited = device.launches, device.synchronisations
            model.learning_rate_scale = 1 / (1 + step)
            losses.append(model.train_batch(x * (np.inf if model.nonfinite == "skip" and step == 4 else 1), labels))
            launches[-1].append(device.launches - started)
            assert device.synchronisations - waited <= (1 if np.isfinite(losses[-1]) else 50)
        results.append(model.state() | model.optimizer_state() | {"losses": np.array(losses)})
    for name, values in results[0].items():
        np.testing.assert_array_equal(results[1][name], values, err_msg=name)
    return *launches, model


def test_replayed_steps_are_ordinary_ones():
    ordinary, replayed, _ = compared(everything)
    assert replayed[:WARM] == ordinary[:WARM]
    assert max(replayed[WARM + 1 :]) < min(ordinary) / 4


SGD = nd.SGD(0.1, momentum=0.9, weight_decay=0.01, clip_norm=0.5)


@pytest.mark.parametrize(
    "more", [{"optimizer": SGD, "cost": nd.MSE()}, {"sync": "bucketed"}], ids=lambda more: " and ".join(more)
)
def test_whatever_the_cost_and_the_update(more):
    ordinary, replayed, _ = compared(small, **more)
    assert replayed[-1] < ordinary[-1]


def test_what_is_set_between_steps_counts_in_the_next():
    def before(model, step):
        if step >= WARM + 2:
            model.leaves[1].momentum = 0.5

    ordinary, replayed, _ = compared(small, WARM + 6, before=before)
    assert replayed[-1] == replayed[WARM + 1] < replayed[WARM + 2] == ordinary[WARM + 2]


def test_smaller_batches_have_graphs_of_their_own():
    _, replayed, model = compared(small, 3 * (WARM + 2), sizes=(3, 2, 1))
    assert model.executor.replays.usable
    assert max(replayed[-3:]) < min(replayed[:3])
    *_, model = compared(small, 12, sizes=(1, 2, 3, 4, 5, 6))  # too many to keep
    assert len(model.executor.replays._graphs) == KEPT


class AtStep(nd.ActivationLayer):
    """A layer of a user's."""

    def forward(self, ctx, view):
        return view * (1 + ctx.step)

    def backward(self, ctx, dy):
        return dy * (1 + ctx.step)


ORDINARY = {
    "dropout": (lambda: small(nd.DropoutLayer(0.3)), {}),
    "a user's layer": (lambda: small(AtStep(nd.Tanh())), {}),
    "micro-batches": (small, {"accumulate": 2}),
    "recomputation": (lambda: [*small()[:2], *small()], {"recompute": True}),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_steps_that_differ_are_ordinary(name):
    layers, more = ORDINARY[name]
    with warnings.catch_warnings(action="error"):
        ordinary, replayed, _ = compared(layers, **more)
    assert replayed == ordinary


def test_steps_that_cannot_be_captured_are_ordinary():
    """An embedding asks for the ids that are there; it is said once."""
    ids = [nd.ConvLayer(1, 3, weights_init=nd.Constant(0.0)), nd.EmbeddingLayer(3, 2), nd.FCLayer(4)]
    model, device = built(CapturingKernels, ids)
    x, labels = np.zeros((BATCH, *SHAPE)), np.zeros(BATCH, int)
    with pytest.warns(UserWarning, match="no CUDA graphs, steps may be slower: RuntimeError: .*D2H") as said:
        losses = [model.train_batch(x, labels) for _ in range(2 * WARM + 2)]
    assert len(said) == 1
    assert losses[-1] < losses[WARM] < losses[0]
    assert device.capturing is None


def test_a_step_that_is_skipped_leaves_nothing():
    """Running statistics are put back, and the place is looked for by an ordinary pass."""

    def skips(model, step):
        model.nonfinite = "skip"

    *_, model = compared(small, before=skips)
    assert model.nonfinite_monitor.where == "the images"
    assert model.executor.replays.usable


def test_passes_of_users_and_observers_are_left_alone():
    """A pass that somebody keeps has the memory that graphs would use; who looks at values wants to see them."""
    kept = []

    def before(model, step):
        if step == WARM + 2:
            run = model.forward(np.ones((BATCH, *SHAPE)))
            kept.append((run, run.backward(model.scatter_output(np.ones((BATCH, 4))))))
        elif step == WARM + 3:
            kept.pop()[0].close()

    ordinary, replayed, _ = compared(small, before=before)
    assert replayed[WARM + 2] == ordinary[WARM + 2]
    assert replayed[WARM + 3] < ordinary[WARM + 3]

    seen = []

    class Watch(Observer):
        def value(self, layer, name, array):
            seen.append(name)

    model, _ = built(CapturingKernels, small())
    for step in range(WARM + 3):
        with model.grid.observers.watched_by(Watch()):
            model.train_batch(np.ones((BATCH, *SHAPE)), np.zeros(BATCH, int))
        assert seen.count("cost") == step + 1


def test_a_head_alone_and_then_all():
    """What is trained changes from epoch to epoch, and so do the graphs."""

    def layers():
        return [nd.LocalFilteringLayer(2, 3), nd.L2PoolingLayer(2, 1), nd.FCLayer(4)]

    def before(model, step):
        model.begin_epoch(step // (WARM + 2))

    ordinary, replayed, _ = compared(layers, 2 * (WARM + 2), before=before, kind=nd.GB, num_initial_epochs=1)
    assert replayed[WARM + 1] < ordinary[WARM + 1]
    assert replayed[-1] < ordinary[-1]


def test_a_graph_keeps_the_tables_of_its_launches():
    """Tables that are shared may be forgotten by others."""
    device = Device(table=CapturingKernels)
    kernels, x = device.backend.kernels, device.xp.ones((2, 3, 4))
    with closing(kernels):
        expected = kernels.channel_sum(x)
        found, graph = kernels.capture(lambda: kernels.channel_sum(x))
        assert len(graph.kept) == 1
        kernels._tables.cache_clear()
        x[...] = 2.0
        graph.replay()
        np.testing.assert_array_equal(device.xp.asnumpy(found), 2 * device.xp.asnumpy(expected))
        with pytest.raises(RuntimeError, match="H2D"):
            kernels.capture(lambda: kernels.channel_sum(x))
        kernels.channel_sum(x)
        assert kernels._captured_tables == []
