"""Group and instance normalisation against PyTorch and on tiles."""

from itertools import product

import numpy as np
import pytest
from case_selection import select_cases
from layer_runs import check_on_grids, make_factory, rotate_grids, run_layer

import neondist as nd
from neondist.comm import loopback
from neondist.errors import ConfigError, ShapeError

SHAPES = [(11, 4), (5, 7, 4), (2, 3, 4), (3, 4, 5, 4)]
LAYER_FACTORIES = {
    "one group": make_factory("GroupNorm", 1),
    "groups": make_factory("GroupNorm", 2, eps=0.1),
    "one channel per group": make_factory("GroupNorm", 4),
    "no parameters": make_factory("GroupNorm", 2, affine=False),
    "instances": make_factory("InstanceNorm"),
    "instances, affine": make_factory("InstanceNorm", eps=0.01, affine=True),
}
GROUP_COUNTS = {"one group": 1, "groups": 2, "no parameters": 2}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", LAYER_FACTORIES)
def test_equals_torch(shape, name):
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    arrays = run_layer(LAYER_FACTORIES[name], shape)
    xt = torch.tensor(np.moveaxis(arrays["x"], -1, 1).copy(), requires_grad=True)
    parameters = {k.split("/")[1]: torch.tensor(v, requires_grad=True) for k, v in arrays.items() if "param" in k}
    gamma, beta = parameters.get("gamma"), parameters.get("beta")
    eps = LAYER_FACTORIES[name](False).eps
    if "instances" in name:
        yt = torch.nn.functional.instance_norm(xt, weight=gamma, bias=beta, eps=eps)
    else:
        yt = torch.nn.functional.group_norm(xt, GROUP_COUNTS.get(name, 4), gamma, beta, eps)
    yt.backward(torch.tensor(np.moveaxis(arrays["dy"], -1, 1).copy()))
    np.testing.assert_allclose(arrays["y"], np.moveaxis(yt.detach().numpy(), 1, -1), rtol=0, atol=1e-10)
    np.testing.assert_allclose(arrays["dx"], np.moveaxis(xt.grad.numpy(), 1, -1), rtol=0, atol=1e-10)
    assert bool(parameters) == ("no" not in name and name != "instances")
    for key, tensor in parameters.items():
        grad = next(v for k, v in arrays.items() if k.startswith("grad") and k.endswith(key))
        np.testing.assert_allclose(grad, tensor.grad.numpy(), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("shape", "name"), select_cases(product(SHAPES, LAYER_FACTORIES)), ids=str)
@pytest.mark.long
def test_every_grid_matches_one_process(shape, name):
    check_on_grids(LAYER_FACTORIES[name], shape, rotate_grids(SHAPES.index(shape) + list(LAYER_FACTORIES).index(name)))


def run_on_vectors(dist, grid=None):
    def make(name, *args):
        return make_factory(name, *args)(dist)

    model = (nd.ConvnetDist if dist else nd.Convnet)(
        [make("FC", 6), make("GroupNorm", 3), make("FC", 4)], seed=2, dtype="float64"
    )
    model.build((3, 5, 2), 4, grid)
    rng = np.random.default_rng(1)
    x, dy = rng.normal(size=(4, 3, 5, 2)), rng.normal(size=(4, 4))
    y = model.gather(model.fprop(model.scatter(x)))
    dx = model.gather_input(model.bprop(model.scatter_output(dy)))
    return {"y": y, "dx": dx, **model.gradients()}


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (4, 2), (6, 1)])
def test_vectors_on_grids(ranks, replicas):
    """A vector is replicated across tiles and must be counted once."""
    expected = run_on_vectors(False)
    for actual in loopback.run(ranks, lambda comm: run_on_vectors(True, nd.ProcessGrid(comm, replicas=replicas))):
        for name, array in expected.items():
            np.testing.assert_allclose(actual[name], array, rtol=0, atol=1e-12, err_msg=name)


def test_vectors_equal_torch():
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    model = nd.Convnet([nd.GlobalAvgPoolingLayer(), nd.GroupNormLayer(2)], dtype="float64")
    model.build((1, 1, 6), 3)
    x = np.random.default_rng(0).normal(size=(3, 1, 1, 6))
    expected = torch.nn.functional.group_norm(torch.tensor(x[:, 0, 0]), 2).numpy()
    np.testing.assert_allclose(model.fprop(x), expected, rtol=0, atol=1e-12)


def test_evaluation_equals_training():
    model = nd.Convnet([nd.GroupNormLayer(2)], dtype="float64")
    model.build((5, 4, 4), 2)
    x = np.random.default_rng(0).normal(size=(2, 5, 4, 4))
    np.testing.assert_array_equal(model.fprop(x, training=True), model.fprop(x, training=False))


def test_no_cancellation_far_from_zero():
    model = nd.Convnet([nd.InstanceNormLayer(eps=1e-12)], dtype="float32")
    model.build((64, 64, 1), 1)
    x = np.random.default_rng(0).normal(4000.0, 1.0, size=(1, 64, 64, 1)).astype(np.float32)
    assert abs(np.var(model.fprop(x), dtype=np.float64) - 1) < 1e-3


@pytest.mark.parametrize("make", LAYER_FACTORIES.values(), ids=LAYER_FACTORIES.keys())
def test_float32_and_empty_batches(make):
    model = nd.Convnet([make(False)])
    model.build((6, 5, 4), 2)
    for samples in (2, 0):
        y = model.fprop(np.ones((samples, 6, 5, 4), np.float32))
        dx = model.bprop(y)
        assert y.dtype == dx.dtype == np.float32
        assert y.shape == dx.shape == (samples, 6, 5, 4)
        assert not np.isnan(dx).any()


MISTAKES = {
    "groups": (lambda: nd.GroupNormLayer(0), ConfigError, "groups: expected an integer of at least 1, got 0"),
    "fractional groups": (
        lambda: nd.GroupNormLayer(1.5),
        ConfigError,
        "groups: expected an integer of at least 1, got 1.5",
    ),
    "eps": (lambda: nd.GroupNormLayer(2, eps=0.0), ConfigError, "eps: expected a number above 0, got 0.0"),
    "instance norm eps": (
        lambda: nd.InstanceNormLayer(eps=-1.0),
        ConfigError,
        "eps: expected a number above 0, got -1.0",
    ),
    "channels": (
        lambda: nd.Convnet([nd.GroupNormLayer(4)]).build((5, 5, 6), 1),
        ConfigError,
        "layer 0 'group_norm1'.*groups 4 must divide the input's 6 channels",
    ),
    "vector": (
        lambda: nd.Convnet([nd.GlobalAvgPoolingLayer(), nd.InstanceNormLayer()]).build((5, 5, 1), 1),
        ShapeError,
        "layer 1 'instance_norm1'.*needs an image",
    ),
}


@pytest.mark.parametrize(("make", "error", "message"), MISTAKES.values(), ids=MISTAKES)
def test_error_messages(make, error, message):
    with pytest.raises(error, match=message):
        make()
