"""Models on a device whose arrays are never converted to NumPy implicitly; see helpers/device.py."""

import numpy as np
import pytest
from case_selection import select_cases
from device import ON_GPU, Device, select_device

import neondist as nd
from neondist.arrays.namespace import namespace, to_host
from neondist.backends import Backend, Kernels
from neondist.backends.cupy import CupyKernels
from neondist.backends.cupy_torch import CupyTorchKernels
from neondist.comm import loopback
from neondist.costs import Cost
from neondist.halo import schemes_by_name
from neondist.layers import Activation, Layer
from neondist.optim import Optimizer
from neondist.registry import registered_classes

TOLERANCES = {"rtol": 1e-6, "atol": 1e-6} if ON_GPU else {"rtol": 1e-12, "atol": 1e-12}
SHAPE, BATCH, CLASSES = (7, 8, 4), 3, 5
LAYERS = {
    "ActivationLayer": lambda cls: cls(nd.Tanh()),
    "AvgPoolingLayer": lambda cls: cls(3, 2, padding=1, count_include_pad=False),
    "BatchNormLayer": lambda cls: cls(),
    "ConvLayer": lambda cls: cls(4, 3, padding=1, groups=2, activation=nd.Logistic(), padding_mode="reflect"),
    "CropLayer": lambda cls: cls(1),
    "DeconvLayer": lambda cls: cls(4, 3, stride=2, padding=1),
    "DropoutLayer": lambda cls: cls(0.3),
    "EmbeddingLayer": lambda cls: cls(9, 2),
    "FCLayer": lambda cls: cls(6, activation=nd.ReLU()),
    "GlobalAvgPoolingLayer": lambda cls: cls(),
    "GroupNormLayer": lambda cls: cls(2),
    "InstanceNormLayer": lambda cls: cls(affine=True),
    "L2PoolingLayer": lambda cls: cls(2),
    "LCNLayer": lambda cls: cls(3, min_deviation="mean"),
    "LRNLayer": lambda cls: cls(3),
    "LocalFilteringLayer": lambda cls: cls(4, 3, padding=1, shared=2),
    "MaxPoolingLayer": lambda cls: cls(3, 2, padding=1),
    "PadLayer": lambda cls: cls(1, mode="wrap"),
    "UpsampleLayer": lambda cls: cls(2, mode="bilinear"),
}
OPTIMIZERS = {
    "SGD": nd.SGD(0.1),
    "momentum": nd.SGD(0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "Adam": nd.Adam(0.01, weight_decay=0.01),
    "AdamW": nd.AdamW(0.01, decay_all=False, clip_norm=0.1, ema=0.9),
    "LAMB": nd.LAMB(0.01, decay_all=False),
    "RMSprop": nd.RMSprop(0.01, centered=True, momentum=0.5),
}


class IndexActivation(Activation):
    """Integers from 0 to 8, as indices of an embedding."""

    def fprop(self, z):
        return namespace(z).minimum(namespace(z).floor(z * z * 2), 8.0)

    def bprop(self, y, dy):
        return dy * 0.0


def list_names(base):
    return sorted(
        name
        for name, cls in registered_classes(base).items()
        if cls.__module__.startswith("neondist.") and "Dist" not in name
    )


def make_layers(name, dist=""):
    layer = LAYERS[name](getattr(nd, name + dist))
    preceding = [getattr(nd, "ActivationLayer" + dist)(IndexActivation())] if name == "EmbeddingLayer" else []
    return [*preceding, layer, getattr(nd, "FCLayer" + dist)(CLASSES)]


def run_model(layers, device=None, cost=None, optimizer=None, targets="labels", steps=2, grid=None, **options):
    """Return outputs, gradients and state of a model on the host, and the synchronisations of each step."""
    backend = device.backend if device else Backend("reference", Kernels())
    model_class = nd.ConvnetDist if layers[0].distributed else nd.Convnet
    settings = {"seed": 3, "backend": backend, "dtype": "float64"} | options
    model = model_class(layers, cost=cost, optimizer=optimizer or nd.SGD(0.1, momentum=0.9), **settings)
    model.build(SHAPE, BATCH, grid or nd.ProcessGrid.serial())
    rng = np.random.default_rng(0)
    images, dy = rng.normal(size=(BATCH, *SHAPE)), model.scatter_output(rng.normal(size=(BATCH, *model.output_shape)))
    labels = rng.integers(0, model.output_shape[-1], (BATCH, *model.output_shape[:-1]))
    target_batch = labels if targets == "labels" else np.eye(model.output_shape[-1])[labels]
    x = model.input.scatter(images) if grid else images
    results = {"y": model.gather(model.fprop(x, batch_size=BATCH)), "dx": model.gather_input(model.bprop(dy))}
    results["inference"] = model.gather(model.fprop(x, training=False, batch_size=BATCH))
    results = {name: to_host(array) for name, array in results.items()}
    results |= {f"gradient {name}": array for name, array in model.gradients().items()}
    synchronisations = []
    for step in range(steps):
        count_before = device.synchronisations if device else 0
        results[f"loss {step}"] = np.array(model.train_batch(x, target_batch, BATCH))
        synchronisations.append(device.synchronisations - count_before if device else 0)
    return results | model.state() | model.optimizer_state(), synchronisations


def check_device(build, limit=1, kernels_class=CupyKernels, **options):
    expected, _ = run_model(build(), **options)
    results, synchronisations = run_model(build(), select_device(kernels_class), **options)
    if options.get("dtype") == "float32":  # sums are rounded differently
        tolerances = {"rtol": 1e-4, "atol": 1e-4}
    else:  # adaptive rules normalise gradients that consist of rounding errors
        tolerances = {"rtol": 1e-6, "atol": 1e-6} if "optimizer" in options else TOLERANCES
    assert results.keys() == expected.keys()
    for name, values in expected.items():
        assert isinstance(results[name], np.ndarray), name
        assert results[name].dtype == values.dtype, name
        np.testing.assert_allclose(results[name], values, **tolerances, err_msg=name)
    assert max(synchronisations) <= limit


def test_all_classes_are_covered():
    """Check the tables above, to which new layers and optimisers must be added."""
    assert sorted(LAYERS) == list_names(Layer)
    assert sorted({type(optimizer).__name__ for optimizer in OPTIMIZERS.values()}) == list_names(Optimizer)


@pytest.mark.parametrize("name", list_names(Layer))
def test_layers(name):
    limit = 5 if name == "EmbeddingLayer" else 1  # indices are copied to the host where used and where exchanged
    check_device(lambda: make_layers(name), limit)
    check_device(lambda: make_layers(name, "Dist"), limit)


BUILTIN_SCHEMES = sorted(name for name, cls in schemes_by_name().items() if cls.__module__.startswith("neondist."))
SCHEMES = [("halo", "bucketed"), *((name, "allreduce") for name in BUILTIN_SCHEMES)]


@pytest.mark.parametrize(("scheme", "sync"), select_cases(SCHEMES))
@pytest.mark.long
def test_schemes_on_ranks(scheme, sync):
    """Run all schemes, with MPI messages copied through the host."""
    limited = scheme in ("auto", "deep_halo", "overlap_tile")  # not supported by all layers
    chain = "Conv Conv MaxPooling FC FC" if limited else "Conv BatchNorm LocalFiltering MaxPooling LCN Upsample FC FC"

    def run_rank(comm, device):
        layers = [LAYERS[f"{name}Layer"](getattr(nd, f"{name}LayerDist")) for name in chain.split()]
        grid = nd.ProcessGrid(comm, replicas=2, rows=2)
        return run_model(layers, device, grid=grid, scheme=scheme, sync=sync)[0]

    runs = (loopback.run(4, lambda comm, device=device: run_rank(comm, device)) for device in (None, select_device()))
    for expected, results in zip(*runs, strict=True):
        for name, values in expected.items():
            np.testing.assert_allclose(results[name], values, **TOLERANCES, err_msg=name)


@pytest.mark.parametrize("name", list_names(Activation))
def test_activations(name):
    check_device(lambda: [nd.ConvLayer(4, 3, activation=getattr(nd, name)()), nd.FCLayer(3)])


def make_all_layers():
    """Return a chain of all layers, with branches."""
    images = [name for name in LAYERS if name not in ("EmbeddingLayer", "FCLayer", "GlobalAvgPoolingLayer")]
    chain = [LAYERS[name](getattr(nd, name)) for name in images]
    branches = (
        nd.Sum([[nd.ConvLayer(4, 3, padding=1)], []]),
        nd.Concat([[nd.MaxPoolingLayer(2)], [nd.AvgPoolingLayer(2)]]),
    )
    return [*chain, *branches, nd.GlobalAvgPoolingLayer(), nd.FCLayer(CLASSES)]


VARIANTS = {}, {"accumulate": 2}, {"sync": "bucketed"}, {"recompute": True}, {"dtype": "float32"}


# adaptive rules would make full steps of gradients that consist of rounding errors
CASES = [(rule, VARIANTS[(3 * number + k) % 5]) for number, rule in enumerate(OPTIMIZERS) for k in range(2)]
CASES = [(rule, options) for rule, options in CASES if rule in ("SGD", "momentum") or "dtype" not in options]


@pytest.mark.parametrize(("rule", "options"), CASES, ids=str)
@pytest.mark.long
def test_training_synchronises_once_per_step(rule, options):
    check_device(make_all_layers, optimizer=OPTIMIZERS[rule], **options)


def test_training_in_strips():
    """Train in strips with a global pooling layer, which needs only sums of each strip and has no view."""
    layers = [nd.ConvLayer(4, 3, padding=1), nd.MaxPoolingLayer(2), nd.GlobalAvgPoolingLayer(), nd.FCLayer(CLASSES)]
    check_device(lambda: layers, memory="1GiB", strips=1)


def test_training_with_torch_kernels():
    pytest.importorskip("torch")
    check_device(make_all_layers, kernels_class=CupyTorchKernels)


@pytest.mark.parametrize("kernels_class", [CupyKernels, CupyTorchKernels])
@pytest.mark.parametrize(("precision", "rounding"), [("bfloat16", 2**-8), ("float16", 2**-11)])
def test_16_bit_products(precision, rounding, kernels_class):
    pytest.importorskip("torch")
    options = {"dtype": "float32", "precision": precision}
    layers = [
        nd.ConvLayer(4, 3, padding=1, groups=2),
        nd.DeconvLayer(4, 3, stride=2, activation=nd.Tanh()),
        nd.FCLayer(CLASSES),
    ]
    expected, _ = run_model(layers, backend="numpy", **options)
    results, synchronisations = run_model(layers, select_device(kernels_class), **options)
    for name, values in expected.items():
        error = np.abs(np.asarray(results[name], "f8") - values).max(initial=0)
        assert error <= 4 * rounding * np.abs(values).max(initial=0), name
    assert max(synchronisations) <= 1


@pytest.mark.parametrize("targets", ["labels", "dense"])
@pytest.mark.parametrize("cost", list_names(Cost))
def test_costs(cost, targets):
    check_device(lambda: make_layers("ConvLayer")[:1], cost=getattr(nd, cost)(), targets=targets)


def test_skipped_step():
    """Detect and locate non-finite values as on the host."""
    outcomes = []
    for backend in (Backend("reference", Kernels()), select_device().backend):
        model = nd.Convnet([nd.ConvLayer(2, 3), nd.BatchNormLayer(), nd.FCLayer(3)], backend=backend, dtype="float64")
        model.build(SHAPE, BATCH)
        model.nonfinite = "skip"
        initial_state = model.state()
        model.leaves[0].params["weights"] = np.full((3, 3, 4, 2), np.inf)
        assert np.isnan(model.train_batch(np.ones((BATCH, *SHAPE)), np.zeros(BATCH, int)))
        model.load_state(initial_state)
        assert np.isfinite(model.train_batch(np.ones((BATCH, *SHAPE)), np.zeros(BATCH, int)))
        outcomes.append(
            (model.nonfinite_monitor.nonfinite_value, {name: array.sum() for name, array in model.state().items()})
        )
    assert outcomes[0][0] == outcomes[1][0]
    assert outcomes[0][1] == pytest.approx(outcomes[1][1], rel=TOLERANCES["rtol"], abs=TOLERANCES["atol"])


def test_pretraining():
    """Pretrain a stage of GB with pooling and orthonormal filters."""
    results, synchronisations = [], 0
    for device in (None, select_device()):
        layers = [nd.LocalFilteringLayer(2, 3), nd.L2PoolingLayer(2, 1), nd.FCLayer(3)]
        model = nd.GB(layers, seed=1, backend=device.backend if device else "numpy", dtype="float64", orthonormal=True)
        model.build(SHAPE, BATCH)
        x, stage = np.random.default_rng(0).normal(size=(BATCH, *SHAPE)), model.stages[0]
        stage.begin_epoch(0)
        count_before = device.synchronisations if device else 0
        losses = [stage.train_batch(x) for _ in range(3)]
        synchronisations = device.synchronisations - count_before if device else 0
        results.append(model.state() | {"losses": np.array(losses)})
    for name, values in results[0].items():
        np.testing.assert_allclose(results[1][name], values, **TOLERANCES, err_msg=name)
    assert synchronisations == (0 if ON_GPU else 3)  # synchronisations are not counted on a GPU


class HostFunctionLayer(nd.ActivationLayer):
    """Layer that calls a NumPy function on device arrays."""

    def backward(self, ctx, dy):
        return np.multiply(dy, 1)


class DataDependentLayer(nd.ActivationLayer):
    """Layer whose gradient depends on a value, which requires a synchronisation."""

    def backward(self, ctx, dy):
        return dy * (float(dy.sum()) > 0)


def test_strict_device_detects_mistakes():
    with pytest.raises(TypeError):
        run_model([nd.LocalFilteringLayer(2, 1), HostFunctionLayer(nd.Tanh()), nd.FCLayer(3)], Device())
    layers = [nd.LocalFilteringLayer(2, 1), DataDependentLayer(nd.Tanh()), nd.FCLayer(3)]
    assert run_model(layers, Device())[1] == [2, 2]


def test_device_rejects_host_arrays():
    device = Device()
    device_array, host_array = device.xp.ones((2, 3)), np.ones((2, 3))
    operations = [
        lambda: np.asarray(device_array),
        lambda: np.tanh(device_array),
        lambda: np.concatenate([device_array]),
        lambda: device_array + host_array,
        lambda: host_array * device_array,
        lambda: device_array[:, host_array[0] > 0],
        lambda: device_array.__setitem__(0, host_array[0]),
        lambda: device.xp.maximum(device_array, host_array),
        lambda: device.xp.sqrt(device_array, where=device_array > 0),
        lambda: device_array.max(initial=0),
    ]
    for operation in operations:
        with pytest.raises(TypeError):
            operation()
    assert device.synchronisations == 0
    assert float(device_array.sum()) == 6
    assert device_array[device_array > 0].shape == (6,)
    assert device.synchronisations == 2
