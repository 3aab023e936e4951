"""Models on a device whose arrays never become NumPy's by themselves; see helpers/device.py."""

import numpy as np
import pytest
from device import ON_GPU, Device, device_under_test
from turns import some

import neondist as nd
from neondist.arrays.namespace import namespace, to_host
from neondist.backends import Backend, Kernels
from neondist.backends.cupy import CupyKernels
from neondist.backends.cupy_torch import CupyTorchKernels
from neondist.comm import loopback
from neondist.costs import Cost
from neondist.halo import scheme_names
from neondist.layers import Activation, Layer
from neondist.optim import Optimizer
from neondist.registry import registered

CLOSE = {"rtol": 1e-6, "atol": 1e-6} if ON_GPU else {"rtol": 1e-12, "atol": 1e-12}
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


class Ids(Activation):
    """Whole numbers from 0 to 8."""

    def fprop(self, z):
        return namespace(z).minimum(namespace(z).floor(z * z * 2), 8.0)

    def bprop(self, y, dy):
        return dy * 0.0


def names(base):
    return sorted(
        name for name, cls in registered(base).items() if cls.__module__.startswith("neondist.") and "Dist" not in name
    )


def network(name, dist=""):
    layer = LAYERS[name](getattr(nd, name + dist))
    before = [getattr(nd, "ActivationLayer" + dist)(Ids())] if name == "EmbeddingLayer" else []
    return [*before, layer, getattr(nd, "FCLayer" + dist)(CLASSES)]


def run(layers, device=None, cost=None, optimizer=None, targets="labels", steps=2, grid=None, **more):
    """Return what a model gives, computes and learns, on the host, and how often each step waited for the device."""
    backend = device.backend if device else Backend("reference", Kernels())
    kind = nd.ConvnetDist if layers[0].distributed else nd.Convnet
    made = {"seed": 3, "backend": backend, "dtype": "float64"} | more
    model = kind(layers, cost=cost, optimizer=optimizer or nd.SGD(0.1, momentum=0.9), **made)
    model.build(SHAPE, BATCH, grid or nd.ProcessGrid.serial())
    rng = np.random.default_rng(0)
    whole, dy = rng.normal(size=(BATCH, *SHAPE)), model.scatter_output(rng.normal(size=(BATCH, *model.output_shape)))
    labels = rng.integers(0, model.output_shape[-1], (BATCH, *model.output_shape[:-1]))
    given = labels if targets == "labels" else np.eye(model.output_shape[-1])[labels]
    x = model.input.scatter(whole) if grid else whole
    found = {"y": model.gather(model.fprop(x, batch_size=BATCH)), "dx": model.gather_input(model.bprop(dy))}
    found["inference"] = model.gather(model.fprop(x, training=False, batch_size=BATCH))
    found = {name: to_host(array) for name, array in found.items()}
    found |= {f"gradient {name}": array for name, array in model.gradients().items()}
    waited = []
    for step in range(steps):
        before = device.synchronisations if device else 0
        found[f"loss {step}"] = np.array(model.train_batch(x, given, BATCH))
        waited.append(device.synchronisations - before if device else 0)
    return found | model.state() | model.optimizer_state(), waited


def check(make, waits=1, table=CupyKernels, **more):
    expected, _ = run(make(), **more)
    found, waited = run(make(), device_under_test(table), **more)
    if more.get("dtype") == "float32":  # sums are rounded otherwise
        close = {"rtol": 1e-4, "atol": 1e-4}
    else:  # an adaptive rule divides a gradient that is nothing but rounding by itself
        close = {"rtol": 1e-6, "atol": 1e-6} if "optimizer" in more else CLOSE
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert isinstance(found[name], np.ndarray), name
        assert found[name].dtype == values.dtype, name
        np.testing.assert_allclose(found[name], values, **close, err_msg=name)
    assert max(waited) <= waits


def test_no_class_is_forgotten():
    """A new layer or optimiser needs a line above."""
    assert sorted(LAYERS) == names(Layer)
    assert sorted({type(one).__name__ for one in OPTIMIZERS.values()}) == names(Optimizer)


@pytest.mark.parametrize("name", names(Layer))
def test_every_layer(name):
    waits = 5 if name == "EmbeddingLayer" else 1  # for ids that are used, and that travel
    check(lambda: network(name), waits)
    check(lambda: network(name, "Dist"), waits)


OURS = sorted(name for name, cls in scheme_names().items() if cls.__module__.startswith("neondist."))
SCHEMES = [("halo", "bucketed"), *((name, "allreduce") for name in OURS)]


@pytest.mark.parametrize(("scheme", "sync"), some(SCHEMES))
@pytest.mark.long
def test_on_ranks(scheme, sync):
    """What MPI takes goes through the host."""
    fused = scheme in ("auto", "deep_halo", "overlap_tile")  # which not all layers can do
    chain = "Conv Conv MaxPooling FC FC" if fused else "Conv BatchNorm LocalFiltering MaxPooling LCN Upsample FC FC"

    def job(comm, device):
        layers = [LAYERS[f"{name}Layer"](getattr(nd, f"{name}LayerDist")) for name in chain.split()]
        grid = nd.ProcessGrid(comm, replicas=2, rows=2)
        return run(layers, device, grid=grid, scheme=scheme, sync=sync)[0]

    every = (loopback.run(4, lambda comm, device=device: job(comm, device)) for device in (None, device_under_test()))
    for expected, found in zip(*every, strict=True):
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, **CLOSE, err_msg=name)


@pytest.mark.parametrize("name", names(Activation))
def test_every_activation(name):
    check(lambda: [nd.ConvLayer(4, 3, activation=getattr(nd, name)()), nd.FCLayer(3)])


def everything():
    """A chain of all layers, with branches."""
    images = [name for name in LAYERS if name not in ("EmbeddingLayer", "FCLayer", "GlobalAvgPoolingLayer")]
    chain = [LAYERS[name](getattr(nd, name)) for name in images]
    branches = (
        nd.Sum([[nd.ConvLayer(4, 3, padding=1)], []]),
        nd.Concat([[nd.MaxPoolingLayer(2)], [nd.AvgPoolingLayer(2)]]),
    )
    return [*chain, *branches, nd.GlobalAvgPoolingLayer(), nd.FCLayer(CLASSES)]


WAYS = {}, {"accumulate": 2}, {"sync": "bucketed"}, {"recompute": True}, {"dtype": "float32"}


# an adaptive rule would make whole steps of gradients that are nothing but rounding
TRAINED = [(rule, WAYS[(3 * at + k) % 5]) for at, rule in enumerate(OPTIMIZERS) for k in range(2)]
TRAINED = [(rule, more) for rule, more in TRAINED if rule in ("SGD", "momentum") or "dtype" not in more]


@pytest.mark.parametrize(("rule", "more"), TRAINED, ids=str)
@pytest.mark.long
def test_training_waits_once_a_step(rule, more):
    check(everything, optimizer=OPTIMIZERS[rule], **more)


def test_training_in_strips_of_the_image():
    """The last layer needs nothing but sums of a strip, and has no view."""
    layers = [nd.ConvLayer(4, 3, padding=1), nd.MaxPoolingLayer(2), nd.GlobalAvgPoolingLayer(), nd.FCLayer(CLASSES)]
    check(lambda: layers, memory="1GiB", strips=1)


def test_training_by_torch():
    pytest.importorskip("torch")
    check(everything, table=CupyTorchKernels)


@pytest.mark.parametrize("table", [CupyKernels, CupyTorchKernels])
@pytest.mark.parametrize(("precision", "rounding"), [("bfloat16", 2**-8), ("float16", 2**-11)])
def test_products_of_16_bits(precision, rounding, table):
    pytest.importorskip("torch")
    how = {"dtype": "float32", "precision": precision}
    layers = [
        nd.ConvLayer(4, 3, padding=1, groups=2),
        nd.DeconvLayer(4, 3, stride=2, activation=nd.Tanh()),
        nd.FCLayer(CLASSES),
    ]
    expected, _ = run(layers, backend="numpy", **how)
    found, waited = run(layers, device_under_test(table), **how)
    for name, values in expected.items():
        apart = np.abs(np.asarray(found[name], "f8") - values).max(initial=0)
        assert apart <= 4 * rounding * np.abs(values).max(initial=0), name
    assert max(waited) <= 1


@pytest.mark.parametrize("targets", ["labels", "dense"])
@pytest.mark.parametrize("cost", names(Cost))
def test_every_cost(cost, targets):
    check(lambda: network("ConvLayer")[:1], cost=getattr(nd, cost)(), targets=targets)


def test_a_step_that_is_skipped():
    """What is not finite is found, and told, as elsewhere; looking for the place may take its time."""
    told = []
    for backend in (Backend("reference", Kernels()), device_under_test().backend):
        model = nd.Convnet([nd.ConvLayer(2, 3), nd.BatchNormLayer(), nd.FCLayer(3)], backend=backend, dtype="float64")
        model.build(SHAPE, BATCH)
        model.nonfinite = "skip"
        before = model.state()
        model.leaves[0].params["weights"] = np.full((3, 3, 4, 2), np.inf)
        assert np.isnan(model.train_batch(np.ones((BATCH, *SHAPE)), np.zeros(BATCH, int)))
        model.load_state(before)
        assert np.isfinite(model.train_batch(np.ones((BATCH, *SHAPE)), np.zeros(BATCH, int)))
        told.append((model.nonfinite_monitor.where, {name: array.sum() for name, array in model.state().items()}))
    assert told[0][0] == told[1][0]
    assert told[0][1] == pytest.approx(told[1][1], rel=CLOSE["rtol"], abs=CLOSE["atol"])


def test_pretraining():
    """A stage of GB, with pooling, and orthonormal filters."""
    found, waited = [], 0
    for device in (None, device_under_test()):
        layers = [nd.LocalFilteringLayer(2, 3), nd.L2PoolingLayer(2, 1), nd.FCLayer(3)]
        model = nd.GB(layers, seed=1, backend=device.backend if device else "numpy", dtype="float64", orthonormal=True)
        model.build(SHAPE, BATCH)
        x, stage = np.random.default_rng(0).normal(size=(BATCH, *SHAPE)), model.stages[0]
        stage.begin_epoch(0)
        before = device.synchronisations if device else 0
        losses = [stage.train_batch(x) for _ in range(3)]
        waited = device.synchronisations - before if device else 0
        found.append(model.state() | {"losses": np.array(losses)})
    for name, values in found[0].items():
        np.testing.assert_allclose(found[1][name], values, **CLOSE, err_msg=name)
    assert waited == (0 if ON_GPU else 3)  # where nobody counts


class Forgetful(nd.ActivationLayer):
    """Calls NumPy."""

    def backward(self, ctx, dy):
        return np.multiply(dy, 1)


class Curious(nd.ActivationLayer):
    """Wants to know a number."""

    def backward(self, ctx, dy):
        return dy * (float(dy.sum()) > 0)


def test_mistakes_are_noticed():
    with pytest.raises(TypeError):
        run([nd.LocalFilteringLayer(2, 1), Forgetful(nd.Tanh()), nd.FCLayer(3)], Device())
    assert run([nd.LocalFilteringLayer(2, 1), Curious(nd.Tanh()), nd.FCLayer(3)], Device())[1] == [2, 2]


def test_the_device_is_strict():
    device = Device()
    there, here = device.xp.ones((2, 3)), np.ones((2, 3))
    refused = [
        lambda: np.asarray(there),
        lambda: np.tanh(there),
        lambda: np.concatenate([there]),
        lambda: there + here,
        lambda: here * there,
        lambda: there[:, here[0] > 0],
        lambda: there.__setitem__(0, here[0]),
        lambda: device.xp.maximum(there, here),
        lambda: device.xp.sqrt(there, where=there > 0),
        lambda: there.max(initial=0),
    ]
    for each in refused:
        with pytest.raises(TypeError):
            each()
    assert device.synchronisations == 0
    assert float(there.sum()) == 6
    assert there[there > 0].shape == (6,)
    assert device.synchronisations == 2
