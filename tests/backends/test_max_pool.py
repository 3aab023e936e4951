"""Compiled max pooling compared with NumPy and PyTorch."""

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neondist.backends import Kernels
from neondist.backends import cells as cells_module

pytestmark = pytest.mark.skipif(
    cells_module.load_compiled_kernels() is None, reason="neondist was installed without a C compiler"
)
REFERENCE = Kernels()


def with_layout(array, layout):
    """Return the same values as a view of a larger array of NaN, or with a reversed axis."""
    if layout == "whole":
        return array
    strided = layout == "cells"
    buffer = np.full([n + 3 for n in array.shape[:-1]] + [array.shape[-1] + strided], np.nan, array.dtype)
    view = buffer[(*(slice(1, n + 1) for n in array.shape[:-1]), slice(0, array.shape[-1]))]
    if layout == "backwards":
        view = view[:, ::-1]
    view[...] = array
    return view


@st.composite
def cases(draw):
    ndim = draw(st.integers(1, 3))
    axes = st.lists(st.integers(1, 4), min_size=ndim, max_size=ndim)
    kernel, stride = draw(axes), draw(axes)
    extent = [draw(st.integers(0, 3 * k + 3)) for k in kernel]
    channels = draw(st.one_of(st.integers(0, 9), st.sampled_from([15, 16, 17, 24, 33, 520, 1100])))
    if channels > 100:
        extent = [min(n, 4) for n in extent]
    return (draw(st.integers(0, 3)), *extent, channels), tuple(kernel), tuple(stride)


LAYOUTS = st.sampled_from(["whole", "rows", "cells", "backwards"])


def check_pooling(kernels, x, kernel, stride, layouts=("whole",) * 4):
    out_extent = tuple(max(0, (n - k) // s + 1) for n, k, s in zip(x.shape[1:-1], kernel, stride, strict=True))
    expected, expected_positions = REFERENCE.max_pool(x, kernel, stride)
    shape = (len(x), *out_extent, x.shape[-1])
    y, dy = (with_layout(np.full(shape, 7, x.dtype), layout) for layout in layouts[:2])
    buffer = y.base
    nan_count = None if buffer is None else np.isnan(buffer).sum()
    positions = kernels.max_pool_into(y, with_layout(x, layouts[2]), kernel, stride)
    assert positions.dtype == np.uint8
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(positions, expected_positions)
    assert nan_count is None or np.isnan(buffer).sum() == nan_count
    dy[...] = np.random.default_rng(1).integers(-9, 9, shape)
    dx = with_layout(np.full(x.shape, 7, x.dtype), layouts[3])
    kernels.max_pool_backward_into(dx, dy, positions, kernel, stride)
    np.testing.assert_array_equal(
        dx, REFERENCE.max_pool_backward(dy, expected_positions, x.shape[1:-1], kernel, stride)
    )
    if dx.base is not None:
        assert np.isnan(dx.base).sum() == dx.base.size - dx.size
    for kernels_ in (kernels, REFERENCE):  # outputs that are not positive have no gradient
        clipped_positions = kernels_.max_pool_into(y, x, kernel, stride, fused_relu=True)
        cleared = np.full(x.shape, 7, x.dtype)
        kernels_.max_pool_backward_into(cleared, dy, clipped_positions, kernel, stride)
        clipped_dy = dy * (expected > 0)
        np.testing.assert_array_equal(
            cleared, REFERENCE.max_pool_backward(clipped_dy, expected_positions, x.shape[1:-1], kernel, stride)
        )


@given(cases(), st.tuples(*(LAYOUTS,) * 4), st.sampled_from(["float32", "float64"]), st.booleans())
@settings(max_examples=120, deadline=None)
def test_pooling_matches_the_reference(kernels, case, layouts, dtype, ties):
    """Vary kernels and strides independently, with windows that may hold padding only."""
    shape, kernel, stride = case
    rng = np.random.default_rng(prod(shape) + len(shape))
    x = rng.choice([-np.inf, 0, -0.0, 1, np.inf], shape) if ties else rng.normal(size=shape)
    check_pooling(kernels, x.astype(dtype), kernel, stride, layouts)


@pytest.mark.parametrize(
    "shape", [(3, 40, 41, 16), (2, 9, 70, 130), (1, 12, 13, 14, 30), (2, 30000, 2), (5, 90, 3, 70)]
)
@pytest.mark.parametrize(("k", "s"), [(2, 2), (3, 2), (3, 1), (2, 3), (4, 4)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.long
def test_arrays_large_enough_for_threads(kernels, shape, k, s, dtype):
    axes = len(shape) - 2
    check_pooling(kernels, np.random.default_rng(0).normal(size=shape).astype(dtype), (k,) * axes, (s,) * axes)


def test_windows_of_256_cells(kernels):
    x = np.sort(np.random.default_rng(0).normal(size=(1, 20 * 19, 1)), axis=1).reshape(1, 20, 19, 1)
    check_pooling(kernels, x, (16, 16), (1, 1))
    check_pooling(kernels, x, (19, 13), (2, 3))
    assert not kernels._try_max_pool(False, x, x[:, :4, :3], np.empty((1, 4, 3, 1), "uint8"), (17, 17), (1, 1))


@pytest.mark.parametrize("channels", [1, 8, 19, 64])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_nan_is_selected_as_in_pytorch(kernels, channels, dtype):
    """Propagate the gradient to the last NaN of a window."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x = rng.choice([np.nan, -np.inf, 1, 2], (2, 9, 11, channels), p=[0.3, 0.3, 0.2, 0.2]).astype(dtype)
    for kernel, stride in [((2, 2), (2, 2)), ((3, 4), (2, 1))]:
        tensor = torch.from_numpy(x).movedim(-1, 1).clone().requires_grad_()
        pooled = torch.nn.functional.max_pool2d(tensor, kernel, stride)
        y = np.empty(pooled.movedim(1, -1).shape, dtype)
        dy, dx = rng.integers(-9, 9, y.shape).astype(dtype), np.empty_like(x)
        positions = kernels.max_pool_into(y, x, kernel, stride)
        np.testing.assert_array_equal(y, pooled.detach().movedim(1, -1).numpy())
        kernels.max_pool_backward_into(dx, dy, positions, kernel, stride)
        pooled.backward(torch.from_numpy(dy).movedim(-1, 1))
        np.testing.assert_array_equal(dx, tensor.grad.movedim(1, -1).numpy())


def test_unsupported_arrays_use_the_fallback(kernels):
    """Use the fallback for other dtypes, and copy strided channels in the backward pass."""
    x = np.random.default_rng(0).normal(size=(2, 6, 6, 4))
    half, y = x.astype("float16"), np.empty((2, 3, 3, 4), "float16")
    positions = kernels.max_pool_into(y, half, (2, 2), (2, 2))
    dx = np.full_like(half, 7)
    kernels.max_pool_backward_into(dx, np.ones_like(y), positions, (2, 2), (2, 2))
    assert dx.sum() == y.size
    y = np.empty((2, 3, 3, 4))
    positions = kernels.max_pool_into(y, x, (2, 2), (2, 2))
    strided = np.empty((2, 4, 6, 6)).transpose(0, 2, 3, 1)
    kernels.max_pool_backward_into(strided, y[::-1, ..., ::-1], positions, (2, 2), (2, 2))
    contiguous = np.empty_like(x)
    kernels.max_pool_backward_into(contiguous, y[::-1, ..., ::-1].copy(), positions, (2, 2), (2, 2))
    np.testing.assert_array_equal(strided, contiguous)
    for mismatched in x.astype("float32"), x[:, :2], x[..., :3]:
        assert not kernels._try_max_pool(False, x, mismatched, np.empty(mismatched.shape, "uint8"), (2, 2), (2, 2))
    assert not kernels._try_max_pool(False, x, y, positions, (2,), (2,))
    assert not kernels._try_max_pool(False, x, y, positions, (2, 2), (2, 0))
