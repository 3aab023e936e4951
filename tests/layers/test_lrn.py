"""Local response normalisation against PyTorch and on tiles."""

import numpy as np
import pytest
from layer_runs import check_on_grids, make_factory, run_layer

import neondist as nd
from neondist.errors import ConfigError

SHAPES = [(5, 7), (5, 7, 6), (3, 4, 5, 3)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("depth", [1, 2, 5, 8])
def test_equals_torch(shape, depth):
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    options = {"alpha": 0.8, "beta": 0.6, "k": 1.5}  # large enough for every term to matter
    arrays = run_layer(make_factory("LRN", depth, **options), shape)
    xt = torch.tensor(np.moveaxis(arrays["x"], -1, 1).copy(), requires_grad=True)
    yt = torch.nn.LocalResponseNorm(depth, **options)(xt)
    yt.backward(torch.tensor(np.moveaxis(arrays["dy"], -1, 1).copy()))
    np.testing.assert_allclose(arrays["y"], np.moveaxis(yt.detach().numpy(), 1, -1), rtol=0, atol=1e-12)
    np.testing.assert_allclose(arrays["dx"], np.moveaxis(xt.grad.numpy(), 1, -1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_grid_matches_one_process_without_messages(shape):
    check_on_grids(make_factory("LRN", 3, alpha=0.5), shape)
    assert not any(
        any(plan.forward_elements_sent) for plan in nd.Convnet([nd.LRNLayer()]).plan(shape, nd.GridShape(1, 2, 3))
    )


def test_vectors_float32_and_empty_batches():
    layer = nd.LRNLayer()
    model = nd.Convnet([nd.GlobalAvgPoolingLayer(), layer])
    model.build((4, 4, 6), 3)
    for samples in (3, 0):
        y = model.fprop(np.ones((samples, 4, 4, 6), np.float32))
        dx = model.bprop(y)
        assert y.dtype == dx.dtype == np.float32
        assert (y.shape, dx.shape) == ((samples, 6), (samples, 4, 4, 6))
    assert layer.name == "lrn1"


@pytest.mark.parametrize("field", ["depth", "alpha", "beta", "k"])
@pytest.mark.parametrize("value", [-1, float("nan")])
def test_error_messages(field, value):
    with pytest.raises(ConfigError, match=f"{field}: expected an? .*got {value}"):
        nd.LRNLayer(**{field: value})
