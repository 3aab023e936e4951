"""3-D convolutions by oneDNN give what F.conv3d gives, and a distributed module has no slower ones."""

import os
from math import prod

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile
from zoo import ZOO
from zoo_reference import loss_of, tensors_of

import neondist.torch as ndt
from neondist import ProcessGrid
from neondist.backends.windows import out_extent
from neondist.comm import loopback
from neondist.torch.kernels import volumes

EVERY = "NEONDIST_ZOO" in os.environ
THREE = st.tuples(*[st.integers(1, 3)] * 3)


def same(run, expected, x, weight, bias):
    """Compare results and gradients with those of float64."""
    here = [a.clone().requires_grad_() for a in (x, weight, bias)]
    there = [a.double().requires_grad_() for a in (x, weight, bias)]
    y, exact = run(*here), expected(*there)
    dy = torch.randn_like(y)
    y.backward(dy)
    exact.backward(dy.double())
    for a, b in zip((y, *(one.grad for one in here)), (exact, *(one.grad for one in there)), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=2e-4)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), kernel=THREE, stride=THREE, dilation=THREE, c=st.integers(1, 3), o=st.integers(1, 3))
def test_results_and_gradients(data, kernel, stride, dilation, c, o):
    padding = tuple(data.draw(st.integers(0, k // 2 * d)) for k, d in zip(kernel, dilation, strict=True))
    least = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    extents = [data.draw(st.integers(n, n + 8)) for n in least]
    x, weight, bias = torch.randn(1, c, *extents), torch.randn(o, c, *kernel), torch.randn(o)
    how = stride, padding, dilation
    same(
        lambda x, w, b: volumes._Convolution.apply(x, w, b, *how), lambda x, w, b: F.conv3d(x, w, b, *how),
        x, weight, bias,
    )  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(data=st.data(), kernel=THREE, stride=THREE, c=st.integers(1, 3), o=st.integers(1, 3))
def test_transposed_results_and_gradients(data, kernel, stride, c, o):
    padding = tuple(data.draw(st.integers(0, (k - 1) // 2)) for k in kernel)
    extras = tuple(data.draw(st.integers(0, s - 1)) for s in stride)
    x, weight, bias = torch.randn(1, c, 5, 4, 3), torch.randn(c, o, *kernel), torch.randn(o)
    same(
        lambda x, w, b: volumes._Transposed.apply(x, w, b, stride, padding, extras, (1, 1, 1)),
        lambda x, w, b: F.conv_transpose3d(x, w, b, stride, padding, extras),
        x, weight, bias,
    )  # fmt: skip


def test_others_are_left_to_pytorch():
    one, none = (1, 1, 1), (0, 0, 0)
    x, weight = torch.randn(1, 4, 8, 8, 8), torch.randn(4, 4, 3, 3, 3)
    assert volumes._falls_back(x, weight, 1)
    assert not volumes._falls_back(x, weight, 2)
    assert not volumes._falls_back(x.double(), weight.double(), 1)
    assert not volumes._falls_back(torch.randn(2, 4, 8, 8, 8), weight, 1)
    assert not volumes._falls_back(torch.randn(1, 400, 8, 8, 8), weight, 1)
    for image, kernel in ((x, weight[..., :1, :1, :1]), (x, weight[:, :2]), (x[..., :4, :4], weight)):
        groups = 4 // kernel.shape[1]
        expected = F.conv3d(image, kernel, None, one, none, one, groups)
        assert torch.equal(volumes.conv3d(image, kernel, None, one, none, one, groups), expected)
    for image, kernel in ((x, weight), (x.repeat(1, 1, 2, 1, 1), weight[..., :2, :2, :2])):
        expected = F.conv_transpose3d(image, kernel, None, 2)
        found = volumes.conv_transpose3d(image, kernel, None, (2, 2, 2), none, none, 1, one)
        assert torch.equal(found, expected)


def slow_convolutions(module, shape):
    """Return the convolutions of a step on one of two ranks that PyTorch's own kernels compute: outputs and kernel."""

    def body(world):
        with ProcessGrid(world) as grid:
            model = ndt.distribute(module, shape, grid)
            tile = model.scatter(torch.randn(shape))
            targets = [model.scatter_target(torch.randn(one)) for one in model.output_shapes]

            def step():
                model.loss(loss_of, tensors_of(model(tile)), targets).backward()

            if grid.rank:
                return step()
            with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
                step()
            inner = "aten::slow_conv3d_forward", "aten::slow_conv_transpose3d"
            return [
                (one.name, *one.input_shapes[:2], one.concrete_inputs) for one in recorded.events() if one.name in inner
            ]

    return loopback.run(2, body)[0]


@pytest.mark.parametrize("name", ["small", *(entry.name for entry in ZOO if len(entry.example_shape) == 5 and EVERY)])
def test_no_slower_kernel_is_run_where_a_faster_one_exists(name):
    """PyTorch's own are left for single cells, next to no outputs, and windows that lie side by side."""
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
    slow = slow_convolutions(module, shape)
    assert slow or name != "small"
    for operator, (_, _, *extents), (_, _, *kernel), (_, _, _, _, stride, padding, *_) in slow:
        seen = [n + 2 * p for n, p in zip(extents, padding, strict=True)]
        few = prod(out_extent(seen, kernel, stride, (1, 1, 1))) < volumes._CELLS
        if operator == "aten::slow_conv_transpose3d":
            few = prod(extents) < volumes._TRANSPOSED_CELLS or all(k <= s for k, s in zip(kernel, stride, strict=True))
        assert few or prod(kernel) == 1
