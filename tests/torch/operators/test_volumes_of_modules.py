"""3-D convolutions by oneDNN against F.conv3d, and their use in distributed modules."""

import os
from math import prod

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile
from zoo import ZOO
from zoo_reference import compute_loss, flatten_tensors

import neondist.torch as ndt
from neondist import ProcessGrid
from neondist.backends.windows import output_extent
from neondist.comm import loopback
from neondist.torch.kernels import volumes

ALL_MODELS = "NEONDIST_ZOO" in os.environ
THREE = st.tuples(*[st.integers(1, 3)] * 3)


def compare(convolution, reference, x, weight, bias):
    """Compare results and gradients with a float64 reference."""
    inputs = [a.clone().requires_grad_() for a in (x, weight, bias)]
    reference_inputs = [a.double().requires_grad_() for a in (x, weight, bias)]
    y, exact = convolution(*inputs), reference(*reference_inputs)
    dy = torch.randn_like(y)
    y.backward(dy)
    exact.backward(dy.double())
    for a, b in zip(
        (y, *(tensor.grad for tensor in inputs)), (exact, *(tensor.grad for tensor in reference_inputs)), strict=True
    ):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=2e-4)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), kernel=THREE, stride=THREE, dilation=THREE, c=st.integers(1, 3), o=st.integers(1, 3))
def test_results_and_gradients(data, kernel, stride, dilation, c, o):
    padding = tuple(data.draw(st.integers(0, k // 2 * d)) for k, d in zip(kernel, dilation, strict=True))
    extent_bounds = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    extents = [data.draw(st.integers(n, n + 8)) for n in extent_bounds]
    x, weight, bias = torch.randn(1, c, *extents), torch.randn(o, c, *kernel), torch.randn(o)
    arguments = stride, padding, dilation
    compare(
        lambda x, w, b: volumes._OneDnnConvolution.apply(x, w, b, *arguments),
        lambda x, w, b: F.conv3d(x, w, b, *arguments),
        x, weight, bias,
    )  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(data=st.data(), kernel=THREE, stride=THREE, c=st.integers(1, 3), o=st.integers(1, 3))
def test_transposed_results_and_gradients(data, kernel, stride, c, o):
    padding = tuple(data.draw(st.integers(0, (k - 1) // 2)) for k in kernel)
    extras = tuple(data.draw(st.integers(0, s - 1)) for s in stride)
    x, weight, bias = torch.randn(1, c, 5, 4, 3), torch.randn(c, o, *kernel), torch.randn(o)
    compare(
        lambda x, w, b: volumes._TransposedConvolution.apply(x, w, b, stride, padding, extras, (1, 1, 1)),
        lambda x, w, b: F.conv_transpose3d(x, w, b, stride, padding, extras),
        x, weight, bias,
    )  # fmt: skip


def test_unsupported_cases_use_pytorch():
    ones, zeros = (1, 1, 1), (0, 0, 0)
    x, weight = torch.randn(1, 4, 8, 8, 8), torch.randn(4, 4, 3, 3, 3)
    assert volumes._avoids_onednn(x, weight, 1)
    assert not volumes._avoids_onednn(x, weight, 2)
    assert not volumes._avoids_onednn(x.double(), weight.double(), 1)
    assert not volumes._avoids_onednn(torch.randn(2, 4, 8, 8, 8), weight, 1)
    assert not volumes._avoids_onednn(torch.randn(1, 400, 8, 8, 8), weight, 1)
    for image, kernel in ((x, weight[..., :1, :1, :1]), (x, weight[:, :2]), (x[..., :4, :4], weight)):
        groups = 4 // kernel.shape[1]
        target = F.conv3d(image, kernel, None, ones, zeros, ones, groups)
        assert torch.equal(volumes.conv3d(image, kernel, None, ones, zeros, ones, groups), target)
    for image, kernel in ((x, weight), (x.repeat(1, 1, 2, 1, 1), weight[..., :2, :2, :2])):
        target = F.conv_transpose3d(image, kernel, None, 2)
        actual = volumes.conv_transpose3d(image, kernel, None, (2, 2, 2), zeros, zeros, 1, ones)
        assert torch.equal(actual, target)


def list_slow_convolutions(module, shape):
    """Return the convolutions that PyTorch's slow kernels compute in a step on one of two ranks."""

    def body(world):
        with ProcessGrid(world) as grid:
            model = ndt.distribute(module, shape, grid)
            tile = model.scatter(torch.randn(shape))
            targets = [model.scatter_target(torch.randn(output_shape)) for output_shape in model.output_shapes]

            def step():
                model.loss(compute_loss, flatten_tensors(model(tile)), targets).backward()

            if grid.rank:
                return step()
            with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
                step()
            operators = "aten::slow_conv3d_forward", "aten::slow_conv_transpose3d"
            return [
                (event.name, *event.input_shapes[:2], event.concrete_inputs)
                for event in recorded.events()
                if event.name in operators
            ]

    return loopback.run(2, body)[0]


@pytest.mark.parametrize(
    "name", ["small", *(entry.name for entry in ZOO if len(entry.example_shape) == 5 and ALL_MODELS)]
)
def test_slow_kernels_are_avoided(name):
    """PyTorch's slow kernels are kept for 1 x 1 x 1 kernels, very few outputs and windows that do not overlap."""
    module = torch.nn.Sequential(
        torch.nn.Conv3d(1, 4, 3, padding=1),
        torch.nn.Conv3d(4, 4, 3, stride=2),
        torch.nn.ConvTranspose3d(4, 2, 3, stride=2),
        torch.nn.Conv3d(2, 1, 1),
    )
    shape = (1, 1, 34, 34, 22)
    if name != "small":
        entry = next(entry for entry in ZOO if entry.name == name)
        module, shape = entry.build(), (1, *entry.example_shape[1:])
    slow = list_slow_convolutions(module, shape)
    assert slow or name != "small"
    for operator, (_, _, *extents), (_, _, *kernel), (_, _, _, _, stride, padding, *_) in slow:
        padded = [n + 2 * p for n, p in zip(extents, padding, strict=True)]
        few = prod(output_extent(padded, kernel, stride, (1, 1, 1))) < volumes._MIN_OUTPUTS
        if operator == "aten::slow_conv_transpose3d":
            few = prod(extents) < volumes._MIN_TRANSPOSED_INPUTS or all(
                k <= s for k, s in zip(kernel, stride, strict=True)
            )
        assert few or prod(kernel) == 1
