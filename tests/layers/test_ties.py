"""Max pooling ties across tile boundaries: the gradient goes to the same cell as on one process."""

import numpy as np
import pytest
from availability import KERNEL_VARIANTS, make_backend

import neondist as nd
from neondist.comm import loopback


@pytest.mark.parametrize("backend", KERNEL_VARIANTS)
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(2, 1, 0), (3, 2, 1), (5, 1, 2)])
@pytest.mark.long
def test_ties_across_tile_boundaries(backend, kernel, stride, padding):
    x = np.random.default_rng(0).integers(0, 2, (2, 11, 9, 3)).astype(np.float64)  # ties in nearly every window

    def compute_gradient(model, grid=None):
        model.build(x.shape[1:], len(x), grid)
        y = model.gather(model.fprop(model.scatter(x)))
        # distinct values, so that a misplaced gradient is detected
        dy = np.arange(1.0, 1.0 + y.size).reshape(y.shape)
        return model.gather_input(model.bprop(model.scatter_output(dy)))

    options = {"backend": make_backend(backend), "dtype": "float64"}
    expected = compute_gradient(nd.Convnet([nd.MaxPoolingLayer(kernel, stride, padding)], **options))

    def run_on_tiles(comm):
        layer = nd.MaxPoolingLayerDist(kernel, stride, padding)
        return compute_gradient(nd.ConvnetDist([layer], **options), nd.ProcessGrid(comm))

    for ranks in (2, 4, 6):
        for actual in loopback.run(ranks, run_on_tiles):
            np.testing.assert_array_equal(actual, expected)
