"""Compiled pointwise kernels and reductions compared with NumPy in float64."""

import numpy as np
import pytest

from neondist.backends import Kernels, Normalisation, get_backend
from neondist.backends import cells as cells_module

pytestmark = pytest.mark.skipif(
    cells_module.load_compiled_kernels() is None, reason="neondist was installed without a C compiler"
)
SHAPES = [
    (3, 5, 7, 4),
    (2, 40, 41, 16),
    (1, 6, 3, 5, 300),
    (2, 9000, 1),
    (4, 130),
    (3, 1, 1, 2),
    (2, 0, 4),
    (0, 3, 3, 2),
]
REFERENCE = Kernels()


def with_layout(array, layout):
    """Return the same values with another memory layout."""
    if layout == "whole" or array.ndim < 3:
        return array
    buffer = np.full([n + 3 for n in array.shape], np.nan, array.dtype)
    middle = tuple(slice(1, n + 1) for n in array.shape[1:-1])
    view = buffer[(slice(0, len(array)), *middle, slice(0, array.shape[-1]))]  # a gap between cells
    if layout == "rows":
        buffer = np.full([*(n + 3 for n in array.shape[:-1]), array.shape[-1]], np.nan, array.dtype)
        view = buffer[(slice(1, len(array) + 1), *middle)]
    elif layout == "backwards":
        view = view[:, ::-1]
    view[...] = array
    return view


@pytest.mark.parametrize("layout", ["whole", "rows", "cells", "backwards"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.long
def test_kernels_match_the_reference(kernels, shape, dtype, layout):
    rng = np.random.default_rng(0)
    x, dy = (rng.normal(1, 2, shape).astype(dtype) for _ in range(2))
    x64, dy64 = x.astype("float64"), dy.astype("float64")
    x, dy, y = (with_layout(array, layout) for array in (x, dy, np.zeros_like(x)))
    tolerances = {"rtol": 1e-12, "atol": 1e-11} if dtype == "float64" else {"rtol": 1e-5, "atol": 2e-3}
    expected = np.empty(shape)

    def check(actual, desired):
        assert actual.dtype == x.dtype
        np.testing.assert_allclose(actual, desired, **tolerances)

    kernels.relu(x, y)
    check(y, np.maximum(x64, 0))
    check(kernels.relu_backward(x, dy), dy64 * (x64 > 0))
    kernels.add([x, dy], y, fused_relu=True)
    check(y, np.maximum(x64 + dy64, 0))
    kernels.add([x, dy, x], y)
    check(y, x64 + dy64 + x64)
    check(kernels.channel_sum(x), x64.sum(axis=tuple(range(x.ndim - 1))))
    if x.ndim > 2:
        check(kernels.sample_sum(x), x64.sum(axis=tuple(range(1, x.ndim - 1))))
    for by_sample in (False, True):
        actual, desired = kernels.moments(x, by_sample), REFERENCE.moments(x64, by_sample)
        for actual_item, desired_item in zip(actual, desired, strict=True):
            check(actual_item, desired_item)
        groups = len(x) if by_sample else 1
        parameters = [rng.normal(1, 1, (groups, shape[-1])).astype(dtype) for _ in range(6)]
        for clip in (False, True):
            normalisation, normalisation64 = (
                Normalisation(*parameters[:3], clip),
                Normalisation(*(values.astype("float64") for values in parameters[:3]), clip),
            )
            kernels.normalise(x, normalisation, y)
            REFERENCE.normalise(x64, normalisation64, expected)
            check(y, expected)
            sums = zip(
                kernels.normalise_backward_sums(x, dy, normalisation),
                REFERENCE.normalise_backward_sums(x64, dy64, normalisation64),
                strict=True,
            )
            for actual_item, desired_item in sums:
                check(actual_item, desired_item)
            kernels.normalise_backward(x, dy, normalisation, parameters[3:], y)
            REFERENCE.normalise_backward(x64, dy64, normalisation64, parameters[3:], expected)
            check(y, expected)


def test_supported_arrays(kernels):
    """Run compiled kernels on strided rows and cells, but leave other dtypes and strided channels to NumPy."""
    x = np.ones((2, 5, 6, 4), np.float32)
    assert kernels._try_compiled_kernel("clip", with_layout(x, "rows"), with_layout(x, "cells"))
    assert not kernels._try_compiled_kernel("clip", x.astype("float16"), x.astype("float16"))
    assert not kernels._try_compiled_kernel("clip", x.swapaxes(1, 3), x.swapaxes(1, 3).copy())
    assert not kernels._try_compiled_kernel("clip", x, x.astype("float64"))
    assert not kernels._try_compiled_kernel("clip", x, x[:1])
    assert not kernels._try_compiled_kernel("normalise", x, x, group_values=np.ones((3, 1, 5)))
    assert not kernels._try_compiled_kernel("normalise", x, x, group_values=np.ones((3, 3, 4)))
    kernels.relu(x.astype("float16"), half := np.empty(x.shape, "float16"))
    assert (half == 1).all()
    with pytest.raises(ValueError, match="kernel 'clap' is unknown"):
        kernels._try_compiled_kernel("clap", x, x)


@pytest.mark.parametrize("by_sample", [False, True])
@pytest.mark.parametrize("case", ["large mean", "drift", "outlier"])
def test_moments_do_not_cancel(kernels, case, by_sample):
    """MomentsSpec of float32 values with a mean of 1e5 deviations, and with an exceptional first cell."""
    rng = np.random.default_rng(0)
    x = rng.normal(0, 1, (2, 300, 70, 3))
    x += {"large mean": 1e5, "outlier": 10}.get(case, np.linspace(-1e5, 1e5, 300)[:, None, None])
    if case == "outlier":
        x[:, 0, 0] = 1e6
    x = x.astype("float32")
    mean, squares = kernels.moments(x, by_sample)
    expected_mean, expected_squares = REFERENCE.moments(x.astype("float64"), by_sample)
    np.testing.assert_allclose(mean, expected_mean, rtol=1e-6, atol=1e-3)
    np.testing.assert_allclose(squares, expected_squares, rtol=1e-4)


def test_relu_propagates_nan(kernels):
    x = np.array([[np.nan, -1, np.inf, 2]], np.float32)
    kernels.relu(x, y := np.empty_like(x))
    np.testing.assert_array_equal(y, [[np.nan, 0, np.inf, 2]])


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_backends_use_compiled_kernels(name):
    if name == "torch":
        pytest.importorskip("torch")
    backend = get_backend(name)
    assert backend.kernels.compiled is not None
    backend.close()
