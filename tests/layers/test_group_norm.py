"""Group and instance normalisation against PyTorch, and over tiles."""

from itertools import product

import numpy as np
import pytest
from norm_runs import check_grids, in_turn, layer, passes
from turns import some

import neondist as nd
from neondist.comm import loopback
from neondist.errors import ConfigError, ShapeError

SHAPES = [(11, 4), (5, 7, 4), (2, 3, 4), (3, 4, 5, 4)]
LAYERS = {
    "one group": layer("GroupNorm", 1),
    "groups": layer("GroupNorm", 2, eps=0.1),
    "a channel each": layer("GroupNorm", 4),
    "no parameters": layer("GroupNorm", 2, affine=False),
    "instances": layer("InstanceNorm"),
    "instances, affine": layer("InstanceNorm", eps=0.01, affine=True),
}
GROUPS = {"one group": 1, "groups": 2, "no parameters": 2}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", LAYERS)
def test_equals_torch(shape, name):
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    found = passes(LAYERS[name], shape)
    xt = torch.tensor(np.moveaxis(found["x"], -1, 1).copy(), requires_grad=True)
    params = {k.split("/")[1]: torch.tensor(v, requires_grad=True) for k, v in found.items() if "param" in k}
    gamma, beta = params.get("gamma"), params.get("beta")
    eps = LAYERS[name](False).eps
    if "instances" in name:
        yt = torch.nn.functional.instance_norm(xt, weight=gamma, bias=beta, eps=eps)
    else:
        yt = torch.nn.functional.group_norm(xt, GROUPS.get(name, 4), gamma, beta, eps)
    yt.backward(torch.tensor(np.moveaxis(found["dy"], -1, 1).copy()))
    np.testing.assert_allclose(found["y"], np.moveaxis(yt.detach().numpy(), 1, -1), rtol=0, atol=1e-10)
    np.testing.assert_allclose(found["dx"], np.moveaxis(xt.grad.numpy(), 1, -1), rtol=0, atol=1e-10)
    assert bool(params) == ("no" not in name and name != "instances")
    for key, tensor in params.items():
        grad = next(v for k, v in found.items() if k.startswith("grad") and k.endswith(key))
        np.testing.assert_allclose(grad, tensor.grad.numpy(), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("shape", "name"), some(product(SHAPES, LAYERS)), ids=str)
@pytest.mark.long
def test_every_grid_computes_what_one_process_does(shape, name):
    check_grids(LAYERS[name], shape, in_turn(SHAPES.index(shape) + list(LAYERS).index(name)))


def vectors(dist, grid=None):
    def make(name, *args):
        return layer(name, *args)(dist)

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
def test_vectors(ranks, replicas):
    """A vector is whole on every tile's rank, and must be counted once."""
    expected = vectors(False)
    for found in loopback.run(ranks, lambda comm: vectors(True, nd.ProcessGrid(comm, replicas=replicas))):
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-12, err_msg=name)


def test_vectors_equal_torch():
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    model = nd.Convnet([nd.GlobalAvgPoolingLayer(), nd.GroupNormLayer(2)], dtype="float64")
    model.build((1, 1, 6), 3)
    x = np.random.default_rng(0).normal(size=(3, 1, 1, 6))
    expected = torch.nn.functional.group_norm(torch.tensor(x[:, 0, 0]), 2).numpy()
    np.testing.assert_allclose(model.fprop(x), expected, rtol=0, atol=1e-12)


def test_evaluation_is_training():
    model = nd.Convnet([nd.GroupNormLayer(2)], dtype="float64")
    model.build((5, 4, 4), 2)
    x = np.random.default_rng(0).normal(size=(2, 5, 4, 4))
    np.testing.assert_array_equal(model.fprop(x, training=True), model.fprop(x, training=False))


def test_far_from_zero_nothing_cancels():
    model = nd.Convnet([nd.InstanceNormLayer(eps=1e-12)], dtype="float32")
    model.build((64, 64, 1), 1)
    x = np.random.default_rng(0).normal(4000.0, 1.0, size=(1, 64, 64, 1)).astype(np.float32)
    assert abs(np.var(model.fprop(x), dtype=np.float64) - 1) < 1e-3


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
def test_float32_and_no_samples(make):
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
    "half a group": (lambda: nd.GroupNormLayer(1.5), ConfigError, "groups: expected an integer of at least 1, got 1.5"),
    "eps": (lambda: nd.GroupNormLayer(2, eps=0.0), ConfigError, "eps: expected a number above 0, got 0.0"),
    "eps of instances": (
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


@pytest.mark.parametrize("case", MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_are_explained(case):
    make, kind, words = case
    with pytest.raises(kind, match=words):
        make()
