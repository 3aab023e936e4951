"""Separable filters and sample sums compared with direct sums, and adjoint tests."""

import numpy as np
import pytest
from availability import make_backend
from hypothesis import given
from hypothesis import strategies as st

from neondist.backends import get_backend

NUMPY_KERNELS = get_backend("numpy").kernels
KERNEL_TABLES = [make_backend(name).kernels for name in ("numpy", "not compiled")]


@st.composite
def cases(draw):
    ndim = draw(st.integers(1, 3))
    extent = tuple(draw(st.integers(0, 6)) for _ in range(ndim))
    kernel = tuple(draw(st.integers(1, 4)) for _ in range(ndim))
    return extent, kernel, draw(st.integers(0, 2)), draw(st.integers(1, 3))


@pytest.mark.parametrize("kernels", KERNEL_TABLES, ids=["numpy", "not compiled"])
@given(cases())
def test_separable_filter(kernels, case):
    extent, kernel, samples, channels = case
    rng = np.random.default_rng(0)
    x, taps = rng.normal(size=(samples, *extent, channels)), [list(rng.normal(size=k)) for k in kernel]
    y = kernels.separable_filter(x, taps)
    assert y.shape == (samples, *(max(0, n - k + 1) for n, k in zip(extent, kernel, strict=True)), channels)
    for position in np.ndindex(*y.shape[1:-1]):
        window = x[(slice(None), *(slice(a, a + k) for a, k in zip(position, kernel, strict=True)))]
        for weights in taps:
            window = np.tensordot(window, weights, (1, 0))
        np.testing.assert_allclose(y[(slice(None), *position)], window, rtol=0, atol=1e-12)
    dy = rng.normal(size=y.shape)
    dx = kernels.separable_filter_adjoint(dy, extent, taps)
    assert dx.shape == x.shape
    assert abs(np.sum(y * dy) - np.sum(x * dx)) < 1e-11


def test_separable_filter_keeps_input_and_dtype():
    x = np.ones((1, 4, 4, 1), np.float32)
    y = NUMPY_KERNELS.separable_filter(x, [[1.0], [1.0]])
    y += 1
    assert (x == 1).all()
    assert y.dtype == NUMPY_KERNELS.separable_filter_adjoint(y, (4, 4), [[1.0], [1.0]]).dtype == np.float32


@pytest.mark.parametrize("shape", [(3, 4, 5, 2), (0, 4, 2), (3, 0, 2), (2, 3), (2, 2, 1, 3, 4)])
def test_sample_sum(shape):
    x = np.random.default_rng(0).normal(size=shape)
    expected = x.sum(axis=tuple(range(1, x.ndim - 1)))
    np.testing.assert_allclose(NUMPY_KERNELS.sample_sum(x), expected, rtol=0, atol=1e-12)
