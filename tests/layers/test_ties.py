"""Equal maxima on both sides of a seam: the gradient goes to the same cell as in one process, for both backends."""

import numpy as np
import pytest
from present import KERNELS, backend_of

import neondist as nd
from neondist.comm import loopback


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(2, 1, 0), (3, 2, 1), (5, 1, 2)])
@pytest.mark.long
def test_ties_across_seams(backend, kernel, stride, padding):
    x = np.random.default_rng(0).integers(0, 2, (2, 11, 9, 3)).astype(np.float64)  # nearly every window has ties

    def gradient(model, grid=None):
        model.build(x.shape[1:], len(x), grid)
        y = model.gather(model.fprop(model.scatter(x)))
        # distinct weights: a gradient that lands on another cell is seen
        dy = np.arange(1.0, 1.0 + y.size).reshape(y.shape)
        return model.gather_input(model.bprop(model.scatter_output(dy)))

    made = {"backend": backend_of(backend), "dtype": "float64"}
    expected = gradient(nd.Convnet([nd.MaxPoolingLayer(kernel, stride, padding)], **made))

    def on_tiles(comm):
        layer = nd.MaxPoolingLayerDist(kernel, stride, padding)
        return gradient(nd.ConvnetDist([layer], **made), nd.ProcessGrid(comm))

    for ranks in (2, 4, 6):
        for found in loopback.run(ranks, on_tiles):
            np.testing.assert_array_equal(found, expected)
