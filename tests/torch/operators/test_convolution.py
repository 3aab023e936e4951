"""Convolutions by compiled kernels, and by products of matrices, give what PyTorch's give, in channels-last memory."""

import pytest
import torch
import torch.nn.functional as F

from neondist.torch.exchange.mesh_comm import CHANNELS_LAST, format_of
from neondist.torch.kernels import convolution

CASES = {
    "3 x 3": ((2, 16, 13, 12), (24, 16, 3, 3), 1, 1, 1),
    "5 x 5 with strides": ((1, 3, 40, 41), (16, 3, 5, 5), 2, 2, 1),
    "depthwise": ((2, 32, 12, 13), (32, 1, 5, 5), 1, 2, 32),
    "depthwise with strides": ((2, 32, 30, 30), (32, 1, 3, 3), 2, 1, 32),
    "a volume": ((1, 8, 8, 7, 9), (8, 8, 3, 3, 3), 1, 1, 1),
    "two cells": ((1, 16, 34, 34), (16, 16, 2, 2), 2, 0, 1),
    "one cell": ((2, 12, 9, 8), (24, 12, 1, 1), 1, 0, 1),
}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients(case, last):
    """Of any of the inputs, and without a bias."""
    shape, weights, stride, padding, groups = CASES[case]
    n = len(shape) - 2
    x, w, b = (torch.randn(s, dtype=torch.float64) for s in (shape, weights, weights[:1]))
    x = x.to(memory_format=CHANNELS_LAST[n + 2]) if last else x
    how = (stride,) * n, (padding,) * n, (1,) * n, groups
    pytorch = {2: F.conv2d, 3: F.conv3d}[n]
    here, there = ([each.clone().requires_grad_() for each in (x, w, b)] for _ in range(2))
    found, expected = convolution.conv(*here, *how), pytorch(*there, *how)
    if last or case != "one cell":
        assert "_Convolution" in type(found.grad_fn).__name__
        assert format_of(found) == CHANNELS_LAST[n + 2]
    dy = torch.randn_like(expected)
    found.backward(dy)
    expected.backward(dy)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for mine, theirs in zip(here, there, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-11, atol=1e-11)
    alone = convolution.conv(x, here[1], None, *how)
    torch.testing.assert_close(alone, pytorch(x, w, None, *how), rtol=0, atol=1e-12)
    (by_weight,) = torch.autograd.grad(alone, here[1:2], dy)
    torch.testing.assert_close(by_weight, there[1].grad, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("shape", "weights", "dilation", "groups"),
    [
        ((1, 512, 4, 7), (512, 512, 3, 3), 1, 1),  # few cells
        ((1, 16, 40, 40), (16, 16, 3, 3), 2, 1),
        ((1, 16, 40, 40), (16, 8, 3, 3), 1, 2),
        ((1, 16, 40, 40), (4, 16, 3, 3), 1, 1),  # outputs do not fill a vector
        ((1, 16, 400), (16, 16, 3), 1, 1),
    ],
)
def test_others_are_left_to_pytorch(shape, weights, dilation, groups):
    n = len(shape) - 2
    how = (1,) * n, (1,) * n, (dilation,) * n, groups
    y = convolution.conv(torch.randn(shape), torch.randn(weights, requires_grad=True), None, *how)
    assert type(y.grad_fn).__name__ == "ConvolutionBackward0"
    with torch.autocast("cpu", torch.bfloat16):
        assert convolution.conv(torch.randn(shape), torch.randn(weights), None, *how).dtype == torch.bfloat16
