"""Compiled depthwise convolutions compared with the reference."""

import numpy as np
import pytest

from neondist.backends import Kernels
from neondist.backends.cells import load_compiled_kernels
from neondist.backends.host import HostKernels
from neondist.backends.windows import zero_borders

pytestmark = pytest.mark.skipif(
    not hasattr(load_compiled_kernels(), "depthwise"), reason="neondist was installed without a C compiler for x86-64"
)
WINDOWS = {
    "3x3": ((3, 3), (1, 1), (1, 1)),
    "stride": ((3, 3), (2, 2), (1, 1)),
    "uneven": ((2, 5), (3, 1), (1, 2)),
    "volume": ((3, 2, 3), (1, 2, 2), (2, 1, 1)),
}


def draw_operands(window, channels, dtype):
    """Return x as a view of a larger array, weights, bias and dy."""
    rng, (kernel, stride, dilation) = np.random.default_rng(0), WINDOWS[window]
    extent = (8, 13, 11)[: len(kernel)]
    out_extent = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(extent, kernel, stride, dilation, strict=True)]
    shapes = (2, *(n + 2 for n in extent), channels), (*kernel, 1, channels), (channels,), (2, *out_extent, channels)
    x, *operands = (rng.normal(size=shape).astype(dtype) for shape in shapes)
    return x[(slice(None), *(slice(1, -1),) * len(kernel))], *operands


@pytest.mark.parametrize(("dtype", "channels", "error"), [("f8", 4, 1e-12), ("f8", 7, 1e-12), ("f4", 20, 1e-4)])
@pytest.mark.parametrize("window", WINDOWS)
def test_depthwise(window, dtype, channels, error):
    (kernel, stride, dilation), host, reference = WINDOWS[window], HostKernels(), Kernels()
    x, w, bias, dy = draw_operands(window, channels, dtype)
    options, extent, crop = (stride, dilation, channels), x.shape[1:-1], [(1, 2)] * len(kernel)
    assert host.uses_depthwise_kernel(x, w.shape, channels)
    for method, arguments in (
        ("conv_forward", (x, w, *options, bias)),
        ("conv_backward_weights", (x, dy, kernel, *options)),
        ("conv_backward_input", (dy, w, extent, *options, crop)),
    ):
        actual, expected = (getattr(kernels, method)(*arguments) for kernels in (host, reference))
        np.testing.assert_allclose(actual, expected, rtol=error, atol=error, err_msg=method)


@pytest.mark.parametrize("clears", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_depthwise_backward_in_strips(window, clears):
    (kernel, stride, dilation), host, reference = WINDOWS[window], HostKernels(), Kernels()
    host.strip_elements = 100
    x, w, _, dy = draw_operands(window, 8, "f8")
    sides = [(1, 2)] * len(kernel)
    zero_borders(x, sides)
    arguments = stride, dilation, 8, lambda part: dy[part], sides, True, clears
    in_place, expected = x.copy(), np.empty_like(x)
    gradients = host.conv_backward_into(in_place, in_place, dy, w, *arguments)
    expected_gradients = reference.conv_backward_into(expected, x, dy, w, *arguments)
    inner = (slice(None), *(slice(a, -b) for a, b in sides))
    for actual, desired in ((in_place[inner], expected[inner]), *zip(gradients, expected_gradients, strict=True)):
        np.testing.assert_allclose(actual, desired, rtol=1e-12, atol=1e-12)
