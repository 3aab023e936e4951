"""Activations fused with the preceding layer: unchanged results, and no memory of their own."""

import numpy as np
import pytest

import neondist as nd
from neondist.comm import loopback
from neondist.errors import PassOrderError
from neondist.halo import Phase
from neondist.observer import Observer
from neondist.runtime.debug.guard import GuardedLayerTask


class UnfusedReLU(nd.ReLU):
    """ReLU that overrides a method, and so is not fused."""

    def fprop(self, z):
        return np.maximum(z, 0)


class UnfusedLogistic(nd.Logistic):
    def fprop(self, z):
        return super().fprop(z)


def make_layers(relu, dist=""):
    def make_layer(name, *args, **kwargs):
        return getattr(nd, f"{name}Layer{dist}")(*args, **kwargs)

    def make_conv(bias=False):  # before a norm, the gradient of a bias is only rounding errors
        return make_layer("Conv", 4, 3, padding=1, bias=bias)

    def make_activation():
        return make_layer("Activation", relu())

    block = nd.Sum(
        [[make_conv(), make_layer("BatchNorm"), make_activation(), make_conv(), make_layer("BatchNorm")], []]
    )
    second_block = nd.Sum([[make_conv(bias=True), make_activation(), make_conv()], [make_layer("GroupNorm", 2)], []])
    norm = [make_layer("InstanceNorm", affine=True), make_activation()]
    last = [
        make_layer("BatchNorm"),
        make_layer("Activation", nd.Tanh()),
        make_conv(),
        make_layer("Activation", UnfusedLogistic() if relu is UnfusedReLU else nd.Logistic()),
    ]
    tail = [make_layer("GlobalAvgPooling"), make_layer("BatchNorm"), make_activation(), make_layer("FC", 3)]
    start = [make_layer("BatchNorm"), make_activation(), make_layer("Conv", 4, 3, stride=2, padding=1, bias=False)]
    return [
        *start,
        *norm,
        block,
        make_activation(),
        second_block,
        make_activation(),
        nd.Concat([[], [make_layer("MaxPooling", 1)]]),
        make_activation(),
        make_layer("Conv", 4, 3, padding=1, activation=relu()),
        make_layer("MaxPooling", 3, 1, 1),
        nd.Sum([[make_conv(bias=True)], []]),
        make_activation(),
        make_layer("MaxPooling", (2, 1), 1),
        make_layer("Crop", 1),
        make_conv(),
        make_layer("BatchNorm"),
        make_activation(),
        *last,
        *tail,
    ]


def build_model(relu, dist="", grid=None, **options):
    model = (nd.ConvnetDist if dist else nd.Convnet)(
        make_layers(relu, dist), seed=3, dtype="float64", cost=nd.CrossEntropy(), optimizer=nd.SGD(0.1), **options
    )
    model.build((15, 13, 3), 4, grid)
    return model


def run_passes(model):
    """Return outputs, gradients and trained weights as global arrays."""
    rng = np.random.default_rng(5)
    x, dy = rng.normal(0.2, 1, size=(4, 15, 13, 3)), rng.normal(size=(4, 3))
    run = model.forward(model.scatter(x))
    arrays = {"y": model.gather(run.output)}
    arrays["dx"] = model.gather_input(run.backward(model.scatter_output(dy)))
    arrays |= {f"gradient {name}": array for name, array in model.gradients().items()}
    for step in range(2):
        arrays[f"loss {step}"] = np.array(model.train_batch(model.scatter(x), np.arange(4) % 3))
    arrays["inference"] = model.gather(model.fprop(model.scatter(x), training=False))
    return arrays | {f"state {name}": array for name, array in model.state().items()}


def compute_difference(actual, expected):
    """Return the largest absolute difference, since gradients cancelled by a norm are only rounding errors."""
    assert actual.keys() == expected.keys()
    return max(np.abs(actual[name] - expected[name]).max() for name in expected)


@pytest.fixture(scope="module")
def unfused_results():
    model = build_model(UnfusedReLU)
    assert not any(section.graph.fused_activations for section in model.executor.sections)
    return run_passes(model)


def test_fused_steps():
    model = build_model(nd.ReLU)
    (section,) = model.executor.sections
    graph = section.graph
    hosts = [
        type(graph.steps[host].layer or graph.steps[host].join).__name__.removesuffix("Layer")
        for host in graph.fused_activations.values()
    ]
    norms = ["BatchNorm", "InstanceNorm", "BatchNorm", "Sum", "Conv", "Sum", "Sum", "BatchNorm"]
    assert hosts == [*norms, "Conv"]  # the last one is the logistic function; tanh is not fused with norms
    plan = section.plan
    for index, host in graph.fused_activations.items():
        assert graph.steps[host].output_value not in plan.value_ranges
        assert index not in plan.gradient_ranges  # not even of sums, which reuse the gradient of the next step
    cleared = [
        type(graph.steps[host].layer or graph.steps[host].join).__name__ for host in graph.deferred_relu_gradients
    ]
    assert cleared == ["ConvLayer", "ActivationLayer", "ConvLayer", "Sum"]  # by convolutions, then by poolings


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"recompute": True}, {"strips": 3}], ids=str)
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "not compiled"])
@pytest.mark.parametrize("backend", ["numpy", "torch"])
@pytest.mark.long
def test_fusion_keeps_results(unfused_results, options, backend, compiled, monkeypatch):
    if backend == "torch":
        pytest.importorskip("torch")
    if not compiled:
        monkeypatch.setattr("neondist.backends.cells.load_compiled_kernels", lambda: None)
    model = build_model(nd.ReLU, backend=backend, **options)
    assert compute_difference(run_passes(model), unfused_results) < 1e-10


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (2, 2), (4, 1), (6, 1)])
@pytest.mark.long
def test_fusion_on_grids(unfused_results, ranks, replicas):
    def job(comm):
        return run_passes(build_model(nd.ReLU, "Dist", nd.ProcessGrid(comm, replicas=replicas)))

    for actual in loopback.run(ranks, job):
        assert compute_difference(actual, unfused_results) < 1e-10


def test_fusion_under_guard(unfused_results):
    """No array is overwritten while it is still read."""
    model = build_model(nd.ReLU, "Dist", nd.ProcessGrid.serial())
    model.executor = model.executor.with_layer_tasks(GuardedLayerTask)
    assert compute_difference(run_passes(model), unfused_results) < 1e-10


def test_passes_ending_between_layer_and_activation():
    """A pass that ends at the norm gives the output of the norm."""
    fused, unfused = build_model(nd.ReLU), build_model(UnfusedReLU)
    x = np.random.default_rng(0).normal(size=(4, 15, 13, 3))
    for nodes in range(1, len(fused.layers) + 1):
        with (
            fused.executor.forward_pass(x, Phase(training=False), nodes) as fused_run,
            unfused.executor.forward_pass(x, Phase(training=False), nodes) as unfused_run,
        ):
            np.testing.assert_allclose(fused_run.output, unfused_run.output, rtol=0, atol=1e-12)
            gradients = [
                model.executor.backward(run, run.output.copy())
                for model, run in ((fused, fused_run), (unfused, unfused_run))
            ]
            np.testing.assert_allclose(*gradients, rtol=0, atol=1e-10)
    run = fused.executor.forward(x, Phase(training=True))
    with pytest.raises(PassOrderError, match="between a layer and its activation"):
        fused.executor.backward(run, np.ones((4, 3)), first_node=1)


def test_observers_see_both_layers():
    names = []

    class OutputRecorder(Observer):
        def on_value(self, layer, name, array):
            if name == "output":
                names.append(layer.name)

    model = build_model(nd.ReLU)
    with model.grid.observers.add_temporarily(OutputRecorder()):
        model.fprop(np.ones((4, 15, 13, 3)))
    assert names == [layer.name for layer in model.leaves]
