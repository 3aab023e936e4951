"""Convolutions by compiled kernels and by matrix products match PyTorch's, in channels-last memory."""

from itertools import combinations, product

import pytest
import torch
import torch.nn.functional as F

from neondist.torch.exchange.channel import CHANNELS_LAST_BY_NDIM, memory_format_of
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


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients(case, channels_last):
    """With and without a bias, and for gradients of any of the inputs, such as a bias of frozen weights."""
    shape, weights, stride, padding, groups = CASES[case]
    n = len(shape) - 2
    x, w, b = (torch.randn(s, dtype=torch.float64) for s in (shape, weights, weights[:1]))
    x = x.to(memory_format=CHANNELS_LAST_BY_NDIM[n + 2]) if channels_last else x
    settings = (stride,) * n, (padding,) * n, (1,) * n, groups
    reference = {2: F.conv2d, 3: F.conv3d}[n]
    inputs, reference_inputs = ([tensor.clone().requires_grad_() for tensor in (x, w, b)] for _ in range(2))
    actual, expected = convolution.conv(*inputs, *settings), reference(*reference_inputs, *settings)
    if channels_last or case != "one cell":
        assert "_Convolution" in type(actual.grad_fn).__name__
        assert memory_format_of(actual) == CHANNELS_LAST_BY_NDIM[n + 2]
    dy = torch.randn_like(expected)
    actual.backward(dy)
    expected.backward(dy)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    for x_actual, x_expected in zip(inputs, reference_inputs, strict=True):
        torch.testing.assert_close(x_actual.grad, x_expected.grad, rtol=1e-11, atol=1e-11)
    for trained in (tensors for size in (1, 2) for tensors in combinations(range(3), size)):
        some = [tensor.clone().requires_grad_(at in trained) for at, tensor in enumerate((x, w, b))]
        gradients = torch.autograd.grad(convolution.conv(*some, *settings), [some[at] for at in trained], dy)
        for at, gradient in zip(trained, gradients, strict=True):
            torch.testing.assert_close(gradient, reference_inputs[at].grad, rtol=1e-11, atol=1e-11)
    without_bias = convolution.conv(x, inputs[1], None, *settings)
    torch.testing.assert_close(without_bias, reference(x, w, None, *settings), rtol=0, atol=1e-12)
    (weight_gradient,) = torch.autograd.grad(without_bias, inputs[1:2], dy)
    torch.testing.assert_close(weight_gradient, reference_inputs[1].grad, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("ndim", [2, 3])
@pytest.mark.parametrize(("cells", "dilation", "stride"), list(product((2, 3), (1, 2), (2, 3))))
def test_single_windows_in_bfloat16(ndim, cells, dilation, stride):
    """PyTorch 2.13's kernels for processors with AMX return wrong numbers with strides other than 1."""
    span, ones = (cells - 1) * dilation + 1, (1,) * (ndim - 1)
    settings = (*ones, stride), (*ones, 0), (*ones, dilation), 1
    reference = {2: F.conv2d, 3: F.conv3d}[ndim]
    for size in range(span, span + stride):
        shapes = (2, 4, *(3, 5)[3 - ndim :], size), (4, 4, *[3] * (ndim - 1), cells)
        inputs = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]
        reference_inputs = [x.detach().float().requires_grad_() for x in inputs]
        actual, expected = convolution.conv(*inputs, None, *settings), reference(*reference_inputs, None, *settings)
        dy = torch.randn(expected.shape).bfloat16()
        results = actual, *torch.autograd.grad(actual, inputs, dy)
        expected_results = expected, *torch.autograd.grad(expected, reference_inputs, dy.float())
        for x, y in zip(results, expected_results, strict=True):
            torch.testing.assert_close(x.float(), y, rtol=0.02, atol=0.02 * y.abs().max().item())


@pytest.mark.parametrize(
    ("shape", "weights", "dilation", "groups"),
    [
        ((1, 512, 4, 7), (512, 512, 3, 3), 1, 1),  # few cells
        ((1, 16, 40, 40), (16, 16, 3, 3), 2, 1),
        ((1, 16, 40, 40), (16, 8, 3, 3), 1, 2),
        ((1, 16, 40, 40), (4, 16, 3, 3), 1, 1),  # fewer outputs than vector lanes
        ((1, 16, 400), (16, 16, 3), 1, 1),
    ],
)
def test_unsupported_cases_use_pytorch(shape, weights, dilation, groups):
    n = len(shape) - 2
    settings = (1,) * n, (1,) * n, (dilation,) * n, groups
    y = convolution.conv(torch.randn(shape), torch.randn(weights, requires_grad=True), None, *settings)
    assert type(y.grad_fn).__name__ == "ConvolutionBackward0"
    with torch.autocast("cpu", torch.bfloat16):
        assert convolution.conv(torch.randn(shape), torch.randn(weights), None, *settings).dtype == torch.bfloat16
