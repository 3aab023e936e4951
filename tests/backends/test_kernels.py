"""Kernels compared with PyTorch in float64."""

import itertools

import numpy as np
import pytest
from availability import KERNEL_VARIANTS, make_backend
from device import HostCalls, select_device

from neondist.backends.cupy import CupyKernels
from neondist.backends.cupy_torch import CupyTorchKernels
from neondist.backends.windows import split_into_blocks

torch = pytest.importorskip("torch", reason="PyTorch is the reference")
RNG = np.random.default_rng(0)


DEVICES = {"device": CupyKernels, "device by torch": CupyTorchKernels}


@pytest.fixture(params=[*KERNEL_VARIANTS, *DEVICES])
def backend(request):
    name = request.param
    return HostCalls(select_device(DEVICES[name])) if name in DEVICES else make_backend(name).kernels


def channels_first(x):
    return torch.tensor(np.moveaxis(x, -1, 1).copy())


def channels_last(t):
    return np.moveaxis(t.detach().numpy(), 1, -1)


@pytest.mark.parametrize("kernel", [(3, 3), (1, 2), (2, 4)])
@pytest.mark.parametrize("stride", [(1, 1), (2, 3)])
@pytest.mark.long
def test_convolution(backend, kernel, stride):
    for dilation, groups, inner, outer in itertools.product([(1, 1), (2, 1)], [1, 2, 4], [4, 8], [4, 8]):
        compare_convolution(backend, (11, 13), kernel, stride, dilation, groups, inner, outer)
    compare_convolution(backend, (11, 13), kernel, stride, (1, 2), 1, 17, 16)
    compare_convolution(backend, (11, 13), kernel, stride, (1, 1), 1, 1, 3)
    compare_convolution(backend, kernel, kernel, stride, (1, 1), 1, 1, 1)


@pytest.mark.parametrize("groups", [1, 2])
def test_convolution_of_series_and_volumes(backend, groups):
    for inner, outer in (4, 6), (32, 16):
        compare_convolution(backend, (17,), (4,), (2,), (3,), groups, inner, outer)
        compare_convolution(backend, (6, 7, 5), (2, 3, 1), (1, 2, 1), (2, 1, 1), groups, inner, outer)


def compare_convolution(backend, extent, kernel, stride, dilation, groups, inner, outer):
    conv = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}[len(extent)]
    x = RNG.normal(size=(3, *extent, inner))
    w = RNG.normal(size=(*kernel, inner // groups, outer))
    xt = channels_first(x).requires_grad_()
    wt = torch.tensor(np.moveaxis(w, (-1, -2), (0, 1)).copy()).requires_grad_()
    bias = RNG.normal(size=outer)
    yt = conv(xt, wt, torch.tensor(bias), stride=stride, dilation=dilation, groups=groups)
    y = backend.conv_forward(x, w, stride, dilation, groups, bias)
    np.testing.assert_allclose(y, channels_last(yt), rtol=0, atol=1e-11)
    np.testing.assert_allclose(backend.conv_forward(x, w, stride, dilation, groups), y - bias, rtol=0, atol=1e-11)
    dy = RNG.normal(size=y.shape)
    yt.backward(channels_first(dy))
    dx = backend.conv_backward_input(dy, w, extent, stride, dilation, groups)
    dw = backend.conv_backward_weights(x, dy, kernel, stride, dilation, groups)
    np.testing.assert_allclose(dx, channels_last(xt.grad), rtol=0, atol=1e-11)
    np.testing.assert_allclose(dw, np.moveaxis(wt.grad.numpy(), (0, 1), (-1, -2)), rtol=0, atol=1e-10)
    assert all(array.flags.c_contiguous for array in (y, dx))


@pytest.mark.parametrize("block", [1, 300, 2000])
def test_blocks_of_rows_match_complete_kernels(monkeypatch, block):
    """Compute convolutions that exceed the cache a few rows at a time."""
    from neondist.backends.torch_conv import weight_gradient_by_gemm

    x, uncompiled = RNG.normal(size=(3, 11, 8, 4)), make_backend("not compiled").kernels
    options = (2, 1), (2, 1), 2
    w, local_weights = RNG.normal(size=(3, 2, 2, 6)), RNG.normal(size=(5, 7, 3, 2, 4, 6))

    def compute_all():
        y, z = uncompiled.conv_forward(x, w, *options), uncompiled.locally_connected_forward(x, local_weights, (2, 1))
        return [
            y,
            uncompiled.conv_backward_input(y, w, (11, 8), *options),
            uncompiled.conv_backward_weights(x, y, (3, 2), *options),
            weight_gradient_by_gemm(x, y, (3, 2), *options[:2]),
            z,
            uncompiled.locally_connected_backward_input(z, local_weights, (11, 8), (2, 1)),
            uncompiled.locally_connected_backward_weights(x, z, local_weights, (2, 1)),
        ]

    expected = compute_all()
    uncompiled.block_elements = uncompiled.unshared_block_elements = block
    monkeypatch.setattr("neondist.backends.torch_conv._BLOCK_ELEMENTS", block)
    for actual, reference in zip(compute_all(), expected, strict=True):
        np.testing.assert_allclose(actual, reference, rtol=0, atol=1e-11 * np.abs(reference).max())


@pytest.mark.parametrize(
    ("kernel", "stride"), [((2, 2), (2, 2)), ((3, 3), (2, 1)), ((3, 2), (2, 1)), ((2, 3), (3, 4)), ((7, 8), (1, 1))]
)
@pytest.mark.parametrize("channels", [1, 3, 8])
def test_pooling(backend, kernel, stride, channels):
    x = RNG.normal(size=(2, 9, 11, channels))
    xt = channels_first(x).requires_grad_()
    yt = torch.nn.functional.max_pool2d(xt, kernel, stride)
    y, positions = backend.max_pool(x, kernel, stride)
    np.testing.assert_array_equal(y, channels_last(yt))
    dy = RNG.normal(size=y.shape)
    yt.backward(channels_first(dy))
    dx = backend.max_pool_backward(dy, positions, (9, 11), kernel, stride)
    np.testing.assert_allclose(dx, channels_last(xt.grad), rtol=0, atol=1e-13)

    xt = channels_first(x).requires_grad_()
    yt = torch.nn.functional.avg_pool2d(xt, kernel, stride, divisor_override=1)
    yt.backward(channels_first(dy))
    np.testing.assert_allclose(backend.window_sum(x, kernel, stride), channels_last(yt), rtol=0, atol=1e-12)
    spread = backend.window_sum_adjoint(dy, (9, 11), kernel, stride)
    np.testing.assert_allclose(spread, channels_last(xt.grad), rtol=0, atol=1e-12)


@pytest.mark.parametrize("cells", [1, 8192, 8193, 20000])
def test_sums(backend, cells):
    """Accumulate sums in blocks."""
    x = RNG.normal(size=(2, cells, 3))
    np.testing.assert_allclose(backend.channel_sum(x), x.sum(axis=(0, 1)), rtol=0, atol=1e-9)
    np.testing.assert_allclose(backend.sample_sum(x), x.sum(axis=1), rtol=0, atol=1e-9)


@pytest.mark.parametrize("channels", [1, 8])
def test_pooling_selects_the_first_maximum(backend, channels):
    for first, row in (0, [[0.0, 0.0], [0.0, 0.0]]), (1, [[0.0, 5.0], [5.0, 5.0]]), (0, [[-np.inf] * 2] * 2):
        x = np.repeat(np.array(row).reshape(1, 2, 2, 1), channels, axis=-1)
        y, positions = backend.max_pool(x, (2, 2), (1, 1))
        dx = backend.max_pool_backward(np.ones_like(y), positions, (2, 2), (2, 2), (1, 1))
        assert (dx.reshape(4, channels).argmax(axis=0) == first).all()
        assert dx.sum() == channels


@pytest.mark.parametrize("channels", [1, 8])
def test_pooling_propagates_nan(backend, channels):
    for row in [1.0, np.nan], [np.nan, 1.0]:
        x = np.repeat(np.array(row).reshape(1, 1, 2, 1), channels, axis=-1)
        assert np.isnan(backend.max_pool(x, (1, 2), (1, 1))[0]).all()


@pytest.mark.parametrize("shape", [(0, 5, 5, 2), (2, 0, 5, 2), (2, 5, 0, 2), (2, 2, 5, 2), (0, 5, 5, 8), (2, 2, 5, 8)])
def test_extents_of_zero(backend, shape):
    extent = shape[1:-1]
    w = np.ones((3, 3, shape[-1], 4))
    y = backend.conv_forward(np.ones(shape), w, (1, 1), (1, 1), 1, np.ones(4))
    out_extent = tuple(max(0, n - 2) for n in extent)
    assert y.shape == (shape[0], *out_extent, 4)
    assert backend.conv_backward_input(y, w, extent, (1, 1), (1, 1), 1).shape == shape
    assert not backend.conv_backward_weights(np.ones(shape), y, (3, 3), (1, 1), (1, 1), 1).any()
    pooled, positions = backend.max_pool(np.ones(shape), (3, 3), (1, 1))
    assert backend.max_pool_backward(pooled, positions, extent, (3, 3), (1, 1)).shape == shape
    sums = backend.window_sum(np.ones(shape), (3, 3), (1, 1))
    assert backend.window_sum_adjoint(sums, extent, (3, 3), (1, 1)).shape == shape


@pytest.mark.parametrize("budget", [1, 7, 40, 1000])
def test_blocks_partition_the_output(budget):
    counts = np.zeros((5, 4), int)
    for block in split_into_blocks(5, (4, 9), 3, budget):
        counts[block] += 1
    assert (counts == 1).all()
