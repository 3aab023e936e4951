"""Winograd convolution against F.conv2d."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from neondist.torch.kernels import winograd

PAIR = st.tuples(st.integers(1, 3), st.integers(1, 3))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), n=st.integers(1, 2), c=st.integers(1, 3), o=st.integers(1, 3), dilation=PAIR)
def test_results_and_gradients(data, n, c, o, dilation):
    padding = tuple(data.draw(st.integers(0, 2 * d)) for d in dilation)
    extents = [data.draw(st.integers(max(1, 2 * d + 1 - 2 * p), 17)) for p, d in zip(padding, dilation, strict=True)]
    x, weight = torch.randn(n, c, *extents, dtype=torch.float64), torch.randn(o, c, 3, 3, dtype=torch.float64)
    inputs, reference_inputs = ([a.clone().requires_grad_() for a in (x, weight)] for _ in range(2))
    expected = F.conv2d(*reference_inputs, None, 1, padding, dilation)
    actual = winograd._WinogradConvolution.apply(*inputs, padding, dilation)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    dy = torch.randn_like(expected)
    actual.backward(dy)
    expected.backward(dy)
    for a, b in zip(inputs, reference_inputs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("extents", "channels"), [((8, 8), 3), ((9, 8), 3), ((7, 5), 3), ((7, 4), 1)])
def test_results_may_be_written_in_place(extents, channels, monkeypatch):
    """As by the addition of the bias, and by a ReLU."""
    for name, least in (("_MIN_CHANNELS", 1), ("_MIN_TILES", 1), ("_MAX_COVERED_PER_OUTPUT", 9)):
        monkeypatch.setattr(winograd, name, least)
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in ((1, 2, *extents), (channels, 2, 3, 3), (channels,))]
    results = []
    for convolve in (winograd.conv2d_with_winograd, F.conv2d):
        own = [a.clone().requires_grad_() for a in inputs]
        y = convolve(*own, (1, 1), (1, 1), (1, 1), 1).relu_()
        results.append([y, *torch.autograd.grad(y.sum(), own)])
    torch.testing.assert_close(*results, rtol=0, atol=1e-11)


def test_slabs(monkeypatch):
    monkeypatch.setattr(winograd, "_MAX_BATCH_BYTES", 1)  # a row of tiles at a time
    x = torch.randn(1, 2, 5, 4, dtype=torch.float64).requires_grad_()
    weight = torch.randn(2, 2, 3, 3, dtype=torch.float64).requires_grad_()
    run = lambda x, weight: winograd._WinogradConvolution.apply(x, weight, (1, 1), (1, 1))  # noqa: E731
    assert torch.autograd.gradcheck(run, (x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_channels_use_winograd(dtype):
    """As precise as direct sums, for views with any strides, without writing to their memory."""
    storage = torch.randn(2, 140, 36, 40, dtype=dtype)
    x, weight, bias = (
        storage[:, 3:131, 2:],
        torch.randn(130, 128, 3, 3, dtype=dtype) / 34,
        torch.randn(130, dtype=dtype),
    )
    original = storage.clone()
    arguments = (1, 1), (1, 2), (1, 2), 1
    assert winograd._is_winograd_faster(x, weight, *arguments)
    exact = F.conv2d(x.double(), weight.double(), bias.double(), *arguments)
    error = (winograd.conv2d_with_winograd(x, weight, bias, *arguments) - exact).abs().max()
    assert error < (1e-5 if dtype == torch.float32 else 1e-13)
    assert torch.equal(storage, original)


def test_unsupported_cases_use_pytorch():
    x, weight = torch.randn(1, 128, 46, 46), torch.randn(128, 128, 3, 3)
    arguments = (1, 1), (1, 1), (1, 1), 1
    assert winograd._is_winograd_faster(x, weight, *arguments)
    strided = (2, 2), (1, 1), (1, 1), 1
    grouped = (1, 1), (1, 1), (1, 1), 2
    wide = (1, 1), (3, 3), (1, 1), 1
    for unsupported in (strided, grouped, wide):
        kernel = weight[:, : 128 // unsupported[3]]
        assert not winograd._is_winograd_faster(x, kernel, *unsupported)
        assert torch.equal(
            winograd.conv2d_with_winograd(x, kernel, None, *unsupported), F.conv2d(x, kernel, None, *unsupported)
        )
    assert not winograd._is_winograd_faster(x.bfloat16(), weight.bfloat16(), *arguments)
    assert not winograd._is_winograd_faster(x[:, :64], weight[:, :64], *arguments)
    with torch.autocast("cpu", torch.bfloat16):
        assert not winograd._is_winograd_faster(x, weight, *arguments)
        assert winograd.conv2d_with_winograd(x, weight, None, *arguments).dtype == torch.bfloat16


def test_large_dilations_with_few_outputs_use_pytorch():
    """Tiles at dilation 36 have at least 72 x 72 outputs, thousands more than a DeepLab's small feature map."""
    weight = torch.randn(128, 128, 3, 3)
    for outputs, dilation, faster in ((3, 36, False), (49, 36, False), (72, 36, True), (46, 12, True), (49, 12, False)):
        x = torch.randn(1, 128, outputs + 2 * dilation, outputs + 2 * dilation)
        assert winograd._is_winograd_faster(x, weight, (1, 1), (0, 0), (dilation, dilation), 1) is faster, (
            outputs,
            dilation,
        )


def test_many_channels_need_fewer_outputs():
    for channels, extents, faster in ((512, (24, 32), True), (512, (16, 32), False), (500, (24, 32), False)):
        x, weight = torch.randn(1, channels, *extents), torch.randn(512, channels, 3, 3)
        assert winograd._is_winograd_faster(x, weight, (1, 1), (1, 1), (1, 1), 1) is faster, (channels, extents)
