"""Convolutions of each channel by itself as they are compiled, against NumPy's."""

import numpy as np
import pytest

from neondist.backends import Kernels
from neondist.backends.cells import compiled
from neondist.backends.host import HostKernels
from neondist.backends.windows import clear_sides

pytestmark = pytest.mark.skipif(
    not hasattr(compiled(), "depthwise"), reason="neondist was installed without a C compiler for x86-64"
)
WINDOWS = {
    "3x3": ((3, 3), (1, 1), (1, 1)),
    "stride": ((3, 3), (2, 2), (1, 1)),
    "uneven": ((2, 5), (3, 1), (1, 2)),
    "volume": ((3, 2, 3), (1, 2, 2), (2, 1, 1)),
}


def arrays(window, channels, dtype):
    """Return x, as the middle of a larger array, the weights, a bias and dy."""
    rng, (kernel, stride, dilation) = np.random.default_rng(0), WINDOWS[window]
    extent = (8, 13, 11)[: len(kernel)]
    out = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(extent, kernel, stride, dilation, strict=True)]
    shapes = (2, *(n + 2 for n in extent), channels), (*kernel, 1, channels), (channels,), (2, *out, channels)
    x, *others = (rng.normal(size=shape).astype(dtype) for shape in shapes)
    return x[(slice(None), *(slice(1, -1),) * len(kernel))], *others


@pytest.mark.parametrize(("dtype", "channels", "error"), [("f8", 4, 1e-12), ("f8", 7, 1e-12), ("f4", 20, 1e-4)])
@pytest.mark.parametrize("window", WINDOWS)
def test_depthwise(window, dtype, channels, error):
    (kernel, stride, dilation), compiled_, plain = WINDOWS[window], HostKernels(), Kernels()
    x, w, bias, dy = arrays(window, channels, dtype)
    how, extent, crop = (stride, dilation, channels), x.shape[1:-1], [(1, 2)] * len(kernel)
    assert compiled_.is_depthwise(x, w.shape, channels)
    for method, given in (
        ("conv_forward", (x, w, *how, bias)),
        ("conv_backward_weights", (x, dy, kernel, *how)),
        ("conv_backward_input", (dy, w, extent, *how, crop)),
    ):
        found, expected = (getattr(kernels, method)(*given) for kernels in (compiled_, plain))
        np.testing.assert_allclose(found, expected, rtol=error, atol=error, err_msg=method)


@pytest.mark.parametrize("clears", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_depthwise_back_in_strips(window, clears):
    (kernel, stride, dilation), strips, plain = WINDOWS[window], HostKernels(), Kernels()
    strips.strip = 100
    x, w, _, dy = arrays(window, 8, "f8")
    sides = [(1, 2)] * len(kernel)
    clear_sides(x, sides)
    how = stride, dilation, 8, lambda part: dy[part], sides, True, clears
    into, expected = x.copy(), np.empty_like(x)
    found = strips.conv_back_into(into, into, dy, w, *how)
    wanted = plain.conv_back_into(expected, x, dy, w, *how)
    inner = (slice(None), *(slice(a, -b) for a, b in sides))
    for one, other in ((into[inner], expected[inner]), *zip(found, wanted, strict=True)):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)
