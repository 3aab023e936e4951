"""Convolutions by the fastest available kernels: compiled ones, matrix products, or PyTorch's.

With one thread, compiled kernels (`CompiledConvolution`) are up to twice as fast as oneDNN's for 3 x 3 windows, and ten
times as fast as PyTorch's for volumes with few channels and for gradients of depthwise weights. Compiled kernels take
and return channels-last memory, which later operators preserve.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ...backends.compiled_conv import CompiledConvolution
from ...backends.gomp import gomp_parallel_address
from ...backends.rows import VECTOR_BYTES
from ...backends.windows import output_extent
from ..exchange.channel import CHANNELS_LAST_BY_NDIM, memory_format_of
from ..ir.graph import is_eager_cpu_float
from ..ir.once_differentiable import once_differentiable
from . import volumes, winograd

Ints = Sequence[int]
_FALLBACK_BY_NDIM: dict[int, Any] = {1: F.conv1d, 2: winograd.conv2d_with_winograd, 3: volumes.conv3d}
_MIN_OUTPUTS = 256  # least number of outputs for a gain
_MAX_WEIGHTS_PER_OUTPUT = 1000  # most weights per output, since weights are reordered in each call
_MAX_DEPTHWISE_WINDOW = 512  # most cells of a depthwise window


def conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    groups: int,
) -> torch.Tensor:
    """Return the convolution, as F.conv1d, F.conv2d and F.conv3d do."""
    options = tuple(stride), tuple(padding), tuple(dilation), groups
    if _should_use_compiled(x, weight, *options) or _is_matrix_product(x, weight, *options):
        y: torch.Tensor = _Convolution.apply(x, weight, bias, *options)
        return y
    # with channels last, oneDNN is slower and copies weights
    if memory_format_of(x) != torch.contiguous_format and _is_supported(x, weight):
        x = x.contiguous()
    result: torch.Tensor = _FALLBACK_BY_NDIM[weight.dim() - 2](x, weight, bias, *options)
    return result


def _should_use_compiled(
    x: torch.Tensor, weight: torch.Tensor, stride: Ints, padding: Ints, dilation: Ints, groups: int
) -> bool:
    """Return whether compiled kernels are available for a convolution, and were measured to be faster."""
    outer, inner, *kernel = weight.shape
    if not _is_supported(x, weight) or prod(kernel) == 1:
        return False
    padded = [n + 2 * p for n, p in zip(x.shape[2:], padding, strict=True)]
    compiled, cells = _compiled_kernels(), len(x) * prod(output_extent(padded, kernel, stride, dilation))
    if cells < _MIN_OUTPUTS or weight.numel() > _MAX_WEIGHTS_PER_OUTPUT * cells or outer * x.itemsize < VECTOR_BYTES:
        return False
    if groups > 1:
        return (
            hasattr(compiled, "depthwise") and inner == 1 and groups == outer and prod(kernel) <= _MAX_DEPTHWISE_WINDOW
        )
    return hasattr(compiled, "weights") and max(dilation) == 1 < inner


def _is_matrix_product(
    x: torch.Tensor, weight: torch.Tensor, stride: Ints, padding: Ints, dilation: Ints, groups: int
) -> bool:
    """Return whether the convolution is a product of two matrices: windows of one cell over channels-last memory."""
    pointwise = prod(weight.shape[2:]) == groups == max(stride) == 1 and not any(padding)
    return pointwise and _is_supported(x, weight) and memory_format_of(x) == CHANNELS_LAST_BY_NDIM.get(x.dim())


def _is_supported(x: torch.Tensor, weight: torch.Tensor) -> bool:
    has_batch = x.dim() == weight.dim() and x.dim() in CHANNELS_LAST_BY_NDIM
    return has_batch and x.numel() > 0 and is_eager_cpu_float(x, weight)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any, stride: Ints, padding: Ints,
        dilation: Ints, groups: int,
    ) -> torch.Tensor:  # fmt: skip
        cells = x.movedim(1, -1)
        if any(padding):
            cells = F.pad(cells, [0, 0, *(p for pad in reversed(padding) for p in (pad, pad))])
        cells = cells.contiguous()
        ctx.save_for_backward(cells, weight)
        ctx.options = stride, padding, dilation, groups
        out = output_extent(cells.shape[1:-1], weight.shape[2:], stride, dilation)
        y = torch.empty((len(x), weight.shape[0], *out), dtype=x.dtype, memory_format=CHANNELS_LAST_BY_NDIM[x.dim()])
        results = y.movedim(1, -1)
        if prod(weight.shape[2:]) == 1:
            factors, into = (_as_matrix(cells), weight.flatten(1).t()), _as_matrix(results)
            torch.mm(*factors, out=into) if bias is None else torch.addmm(bias, *factors, out=into)
        else:
            bias_array = None if bias is None else bias.detach().contiguous().numpy()
            args = stride, dilation, groups, bias_array, _copy_without_activation
            _kernels(torch.get_num_threads()).conv_into(results.numpy(), cells.numpy(), _channels_last(weight), *args)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        (cells, weight), (stride, padding, dilation, groups) = ctx.saved_tensors, ctx.options
        needed = ctx.needs_input_grad[:3]
        slopes = gradients[0].movedim(1, -1).contiguous()
        dx = torch.empty_like(cells) if needed[0] else None
        if prod(weight.shape[2:]) == 1:
            if dx is not None:
                torch.mm(_as_matrix(slopes), weight.flatten(1), out=_as_matrix(dx))
            by_weight = (_as_matrix(slopes).t() @ _as_matrix(cells)).view(weight.shape) if needed[1] else None
            by_bias = _as_matrix(slopes).sum(0) if needed[2] else None
        else:
            dy, into = slopes.numpy(), None if dx is None else dx.numpy()
            sides = tuple((p, p) for p in padding)
            computed = _kernels(torch.get_num_threads()).conv_backward_into(
                into, cells.numpy(), dy, _channels_last(weight), stride, dilation, groups,
                lambda index: np.ascontiguousarray(dy[index]), sides, needed[1], False, all(needed[1:]),
            )  # fmt: skip
            by_weight, by_bias = (
                torch.from_numpy(dv) if present else None for dv, present in zip(computed, needed[1:], strict=True)
            )
            if by_weight is not None:
                by_weight = by_weight.movedim((-1, -2), (0, 1))
            elif by_bias is not None:  # the kernel computes bias gradients only together with weight gradients
                by_bias = _as_matrix(slopes).sum(0)
        if dx is not None:
            for axis, (pad, n) in enumerate(zip(padding, cells.shape[1:-1], strict=True), start=1):
                dx = dx.narrow(axis, pad, n - 2 * pad)
            dx = dx.movedim(-1, 1)
        return dx, by_weight, by_bias, None, None, None, None


def _copy_without_activation(z: np.ndarray, y: np.ndarray) -> None:
    if z is not y:
        y[...] = z


def _as_matrix(cells: torch.Tensor) -> torch.Tensor:
    """Return channels-last cells as a matrix with one row per cell."""
    return cells.view(-1, cells.shape[-1])


def _channels_last(weight: torch.Tensor) -> np.ndarray:
    """Return weights as (*kernel, inner, outer)."""
    return weight.detach().movedim((0, 1), (-1, -2)).contiguous().numpy()


@cache
def _compiled_kernels() -> Any:
    """Return the compiled kernels, or None if they are not installed or not available for this CPU."""
    return _kernels(1).compiled if "AVX" in torch.backends.cpu.get_cpu_capability() else None


@cache
def _kernels(threads: int) -> CompiledConvolution:
    kernels = CompiledConvolution()
    if threads > 1 and kernels.compiled is not None:
        kernels.threads, kernels.gomp_address = threads, gomp_parallel_address()
    return kernels
