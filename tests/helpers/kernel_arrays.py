"""Random operands of compiled kernels, and comparisons of their results."""

import numpy as np


def draw_padded(rng, shape, dtype):
    """Return random values in the middle of a larger array of NaN."""
    buffer = np.full([n + 3 for n in shape], np.nan, dtype)
    view = buffer[tuple(slice(1, n + 1) for n in shape)]
    view[...] = rng.normal(size=shape)
    return view


def assert_close(actual, expected, dtype, kernel_size=3):
    """Compare with the tolerance of a dtype, which for float32 is larger for windows of 5 x 5."""
    tolerance = {np.float64: 1e-13, np.float32: 5e-5 if kernel_size == 5 else 2e-5}[dtype]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * max(1, np.abs(expected).max(initial=0)))
