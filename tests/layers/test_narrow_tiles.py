"""Gradients on narrow tiles, some of whose outputs read only padding."""

import numpy as np
import pytest
from availability import KERNEL_VARIANTS, make_backend

import neondist as nd
from neondist.comm import loopback


@pytest.mark.parametrize("backend", KERNEL_VARIANTS)
@pytest.mark.parametrize(("rows", "cols"), [(1, 7), (7, 1)])
@pytest.mark.parametrize(("padding", "stride"), [(6, 1), (((6, 0), (0, 6)), 2)])
@pytest.mark.long
def test_gradients_of_tiles_of_padding_only(backend, rows, cols, padding, stride):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 6, 5, 16))

    def run_layers(layer, model, grid=None):
        layers = [layer(16, 3, padding=1, name="a"), layer(16, 3, stride, padding=padding, name="b")]
        model = model(layers, dtype="float64", backend=make_backend(backend), seed=1)
        model.build(x.shape[1:], len(x), grid)
        y = model.gather(model.fprop(model.scatter(x)))
        dy = np.arange(1.0, 1.0 + y.size).reshape(y.shape)
        dx = model.gather_input(model.bprop(model.scatter_output(dy)))
        return model.gradients() | {"y": y, "dx": dx}

    def run_on_tiles(comm):
        grid = nd.ProcessGrid(comm, rows=rows, cols=cols)
        return run_layers(nd.ConvLayerDist, nd.ConvnetDist, grid)

    expected = run_layers(nd.ConvLayer, nd.Convnet)
    for name, actual in loopback.run(rows * cols, run_on_tiles)[0].items():
        np.testing.assert_allclose(actual, expected[name], rtol=1e-10, atol=1e-10 * np.abs(expected[name]).max())
