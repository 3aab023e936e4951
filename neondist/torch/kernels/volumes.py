"""3-D convolutions of one small sample by oneDNN; PyTorch would use its own kernel, which is up to ten times slower.

Measured with one thread, forward and backward: 8 channels of 32 x 64 x 64 cells take 79 ms instead of 821 ms, and 64
channels of 8 x 28 x 56 cells take 124 ms instead of 613 ms. In 2-D, PyTorch's own kernel is no slower than oneDNN where
PyTorch selects it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from ...backends.windows import output_extent, unreached_cells
from ..ir.graph import is_eager_cpu_float
from ..ir.once_differentiable import once_differentiable

Ints = Sequence[int]
_MAX_FALLBACK_SIZE = 20480  # channels * planes * rows, up to which PyTorch uses its own kernel
_MIN_OUTPUTS, _MIN_TRANSPOSED_INPUTS = 128, 1024  # measured: with fewer per channel, oneDNN is no faster
_NO_OUTPUT_PADDING = (0, 0, 0)


def conv3d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    groups: int,
) -> torch.Tensor:
    """Compute F.conv3d with the faster kernel."""
    if (
        prod(weight.shape[2:]) > 1
        and _avoids_onednn(x, weight, groups)
        and prod(output_extent(_padded_extent(x, padding), weight.shape[2:], stride, dilation)) >= _MIN_OUTPUTS
    ):
        y: torch.Tensor = _OneDnnConvolution.apply(x, weight, bias, tuple(stride), tuple(padding), tuple(dilation))
        return y
    return F.conv3d(x, weight, bias, stride, padding, dilation, groups)


def conv_transpose3d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Ints,
    padding: Ints,
    output_padding: Ints,
    groups: int,
    dilation: Ints,
) -> torch.Tensor:
    """Compute F.conv_transpose3d with the faster kernel: PyTorch's own where windows do not overlap."""
    has_overlap = any(k > s for k, s in zip(weight.shape[2:], stride, strict=True))
    if has_overlap and prod(x.shape[2:]) >= _MIN_TRANSPOSED_INPUTS and _avoids_onednn(x, weight, groups):
        options = tuple(stride), tuple(padding), tuple(output_padding), tuple(dilation)
        y: torch.Tensor = _TransposedConvolution.apply(x, weight, bias, *options)
        return y
    return F.conv_transpose3d(x, weight, bias, stride, padding, output_padding, groups, dilation)


def _avoids_onednn(x: torch.Tensor, weight: torch.Tensor, groups: int) -> bool:
    """Return whether PyTorch would use its own kernel although oneDNN supports the arguments."""
    return (
        x.dim() == 5
        and len(x) == groups == 1
        and x.shape[1] * x.shape[2] * x.shape[3] <= _MAX_FALLBACK_SIZE
        and x.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and is_eager_cpu_float(x, weight)
    )


def _padded_extent(x: torch.Tensor, padding: Ints) -> list[int]:
    return [n + 2 * p for n, p in zip(x.shape[2:], padding, strict=True)]


class _OneDnnConvolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any, stride: Ints, padding: Ints, dilation: Ints
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.options = stride, padding, dilation
        return torch.mkldnn_convolution(x, weight, bias, padding, stride, dilation, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x, weight), (stride, padding, dilation), needs_grad = ctx.saved_tensors, ctx.options, ctx.needs_input_grad
        dy, dx, dw = dy.contiguous(), None, None
        if needs_grad[0]:
            unseen_cells = unreached_cells(_padded_extent(x, padding), weight.shape[2:], stride, dilation)
            dx = _transposed_convolution(dy, weight, None, stride, padding, unseen_cells, dilation)
        if needs_grad[1]:
            dw = _weight_gradient(x, dy, weight, stride, padding, dilation)
        return dx, dw, dy.sum((0, 2, 3, 4)) if needs_grad[2] else None, None, None, None


class _TransposedConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any, *options: Ints) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.options = options
        return _transposed_convolution(x, weight, bias, *options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x, weight), (stride, padding, _, dilation), needs_grad = ctx.saved_tensors, ctx.options, ctx.needs_input_grad
        dy, dx, dw = dy.contiguous(), None, None
        if needs_grad[0]:
            dx = torch.mkldnn_convolution(dy, weight, None, padding, stride, dilation, 1)
        if needs_grad[1]:
            dw = _weight_gradient(dy, x, weight, stride, padding, dilation)
        return dx, dw, dy.sum((0, 2, 3, 4)) if needs_grad[2] else None, None, None, None, None


def _transposed_convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: Any, stride: Ints, padding: Ints, output_padding: Ints, dilation: Ints
) -> torch.Tensor:
    run = torch.ops.mkldnn._convolution_transpose_pointwise
    y: torch.Tensor = run(x, weight, bias, padding, output_padding, stride, dilation, 1, "none", [], "")
    return y


def _weight_gradient(
    x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor, stride: Ints, padding: Ints, dilation: Ints
) -> torch.Tensor:
    """Return the gradient of the weights; the sample is split in two, since PyTorch uses oneDNN for two samples."""
    extents = dy.shape[2:]
    axis = next((at for at, n in enumerate(extents) if n % 2 == 0), extents.index(max(extents)))
    dim, n, step = axis + 2, extents[axis], stride[axis]
    half_extent = -(-n // 2)
    pads = [0] * 6
    pads[4 - 2 * axis : 6 - 2 * axis] = [padding[axis]] * 2
    x, window_span = F.pad(x, pads), (half_extent - 1) * step + dilation[axis] * (weight.shape[dim] - 1) + 1
    xs = torch.cat([x.narrow(dim, at, window_span) for at in (0, (n - half_extent) * step)])
    dys = torch.cat([dy.narrow(dim, at, half_extent) for at in (0, n - half_extent)])
    if n % 2:  # the plane in both halves is counted in the first half
        dys[1:].narrow(dim, 0, 1).zero_()
    padding = [0 if at == axis else p for at, p in enumerate(padding)]
    _, gradient, _ = torch.ops.aten.convolution_backward(
        dys, xs, weight, None, stride, padding, dilation, False, _NO_OUTPUT_PADDING, 1, [False, True, False]
    )
    return gradient
