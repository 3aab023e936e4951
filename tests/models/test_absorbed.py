"""An activation that goes with the layer before it changes no number, and takes no memory of its own."""

import numpy as np
import pytest

import neondist as nd
from neondist.comm import loopback
from neondist.errors import PassError
from neondist.halo import Phase
from neondist.observer import Observer
from neondist.runtime.debug.guard import GuardedTask


class Alone(nd.ReLU):
    """The same numbers; but what a class says of a method holds for no other."""

    def fprop(self, z):
        return np.maximum(z, 0)


class AloneToo(nd.Logistic):
    def fprop(self, z):
        return super().fprop(z)


def layers(relu, dist=""):
    def make(name, *args, **kwargs):
        return getattr(nd, f"{name}Layer{dist}")(*args, **kwargs)

    def conv(bias=False):  # before a norm the gradient of a bias is rounding errors
        return make("Conv", 4, 3, padding=1, bias=bias)

    def act():
        return make("Activation", relu())

    block = nd.Sum([[conv(), make("BatchNorm"), act(), conv(), make("BatchNorm")], []])
    again = nd.Sum([[conv(bias=True), act(), conv()], [make("GroupNorm", 2)], []])
    norm = [make("InstanceNorm", affine=True), act()]
    last = [
        make("BatchNorm"),
        make("Activation", nd.Tanh()),
        conv(),
        make("Activation", AloneToo() if relu is Alone else nd.Logistic()),
    ]
    tail = [make("GlobalAvgPooling"), make("BatchNorm"), act(), make("FC", 3)]
    start = [make("BatchNorm"), act(), make("Conv", 4, 3, stride=2, padding=1, bias=False)]
    return [*start, *norm, block, act(), again, act(), nd.Concat([[], [make("MaxPooling", 1)]]), act(),
            make("Conv", 4, 3, padding=1, activation=relu()), make("MaxPooling", 3, 1, 1),
            nd.Sum([[conv(bias=True)], []]), act(), make("MaxPooling", (2, 1), 1), make("Crop", 1), conv(),
            make("BatchNorm"), act(), *last, *tail]  # fmt: skip


def built(relu, dist="", grid=None, **more):
    model = (nd.ConvnetDist if dist else nd.Convnet)(
        layers(relu, dist), seed=3, dtype="float64", cost=nd.CrossEntropy(), optimizer=nd.SGD(0.1), **more
    )
    model.build((15, 13, 3), 4, grid)
    return model


def steps(model):
    """Return outputs, gradients and trained weights, as whole arrays."""
    rng = np.random.default_rng(5)
    x, dy = rng.normal(0.2, 1, size=(4, 15, 13, 3)), rng.normal(size=(4, 3))
    run = model.forward(model.scatter(x))
    found = {"y": model.gather(run.output)}
    found["dx"] = model.gather_input(run.backward(model.scatter_output(dy)))
    found |= {f"gradient {name}": array for name, array in model.gradients().items()}
    for step in range(2):
        found[f"loss {step}"] = np.array(model.train_batch(model.scatter(x), np.arange(4) % 3))
    found["inference"] = model.gather(model.fprop(model.scatter(x), training=False))
    return found | {f"state {name}": array for name, array in model.state().items()}


def worst(found, expected):
    """The largest difference: some gradients are nothing but rounding errors, of what a norm behind takes out again."""
    assert found.keys() == expected.keys()
    return max(np.abs(found[name] - expected[name]).max() for name in expected)


@pytest.fixture(scope="module")
def apart():
    model = built(Alone)
    assert not any(section.graph.absorbed for section in model.executor.sections)
    return steps(model)


def test_what_goes_together():
    model = built(nd.ReLU)
    (section,) = model.executor.sections
    graph = section.graph
    found = [
        type(graph.steps[by].layer or graph.steps[by].join).__name__.removesuffix("Layer")
        for by in graph.absorbed.values()
    ]
    norms = ["BatchNorm", "InstanceNorm", "BatchNorm", "Sum", "Conv", "Sum", "Sum", "BatchNorm"]
    assert found == [*norms, "Conv"]  # the convolution's at the end is logistic; norms have tanh behind them
    plan = section.plan
    for at, by in graph.absorbed.items():
        assert graph.steps[by].output not in plan.values
        assert at not in plan.gradients  # not even a sum's: it is written over that of what comes behind
    cleared = [type(graph.steps[by].layer or graph.steps[by].join).__name__ for by in graph.cleared]
    assert cleared == ["ConvLayer", "ActivationLayer", "ConvLayer", "Sum"]  # by convolutions, then by poolings


@pytest.mark.parametrize("more", [{}, {"accumulate": 2}, {"recompute": True}, {"strips": 3}], ids=str)
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "not compiled"])
@pytest.mark.parametrize("backend", ["numpy", "torch"])
@pytest.mark.long
def test_the_same_numbers(apart, more, backend, compiled, monkeypatch):
    if backend == "torch":
        pytest.importorskip("torch")
    if not compiled:
        monkeypatch.setattr("neondist.backends.cells.compiled", lambda: None)
    model = built(nd.ReLU, backend=backend, **more)
    assert worst(steps(model), apart) < 1e-10


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (2, 2), (4, 1), (6, 1)])
@pytest.mark.long
def test_on_grids(apart, ranks, replicas):
    def job(comm):
        return steps(built(nd.ReLU, "Dist", nd.ProcessGrid(comm, replicas=replicas)))

    for found in loopback.run(ranks, job):
        assert worst(found, apart) < 1e-10


def test_under_guard(apart):
    """Nobody writes where others still read."""
    model = built(nd.ReLU, "Dist", nd.ProcessGrid.serial())
    model.executor = model.executor.with_tasks(GuardedTask)
    assert worst(steps(model), apart) < 1e-10


def test_passes_that_end_between():
    """A pass through the norm alone gives what that gives."""
    model, alone = built(nd.ReLU), built(Alone)
    x = np.random.default_rng(0).normal(size=(4, 15, 13, 3))
    for nodes in range(1, len(model.layers) + 1):
        with (
            model.executor.passing(x, Phase(training=False), nodes) as one,
            alone.executor.passing(x, Phase(training=False), nodes) as other,
        ):
            np.testing.assert_allclose(one.output, other.output, rtol=0, atol=1e-12)
            found = [each.executor.backward(run, run.output.copy()) for each, run in ((model, one), (alone, other))]
            np.testing.assert_allclose(*found, rtol=0, atol=1e-10)
    run = model.executor.forward(x, Phase(training=True))
    with pytest.raises(PassError, match="between a layer and its activation"):
        model.executor.backward(run, np.ones((4, 3)), first=1)


def test_observers_see_both():
    seen = []

    class Watcher(Observer):
        def value(self, layer, name, array):
            if name == "output":
                seen.append(layer.name)

    model = built(nd.ReLU)
    with model.grid.observers.watched_by(Watcher()):
        model.fprop(np.ones((4, 15, 13, 3)))
    assert seen == [layer.name for layer in model.leaves]
