"""Convolutions by the fastest available method: compiled kernels, matrix products, or PyTorch's kernels.

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
_MIN_OUTPUTS = 256  # minimum number of outputs for a speed-up
_MAX_WEIGHTS_PER_OUTPUT = 1000  # limited, since weights are reordered in each call
_MAX_DEPTHWISE_WINDOW = 512  # maximum number of cells of a depthwise window


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
    x, strides = _drop_strides_of_single_windows(x, weight, stride, padding, dilation)
    # with channels last, oneDNN is slower and copies weights
    if memory_format_of(x) != torch.contiguous_format and _is_supported(x, weight):
        x = x.contiguous()
    result: torch.Tensor = _FALLBACK_BY_NDIM[weight.dim() - 2](x, weight, bias, strides, *options[1:])
    return result


def _drop_strides_of_single_windows(
    x: torch.Tensor, weight: torch.Tensor, stride: Ints, padding: Ints, dilation: Ints
) -> tuple[torch.Tensor, Ints]:
    """Return the cells of the windows and strides that are 1 along axes with one window, where they have no effect.

    With such strides, PyTorch 2.13's 16-bit kernels for processors with AMX return wrong numbers.
    """
    strides = list(stride)
    for axis, (cells, pad, step) in enumerate(zip(weight.shape[2:], padding, dilation, strict=True)):
        dim, span = axis - len(strides), (cells - 1) * step + 1
        if pad == 0 and span <= x.shape[dim] < span + strides[axis]:
            x, strides[axis] = x.narrow(dim, 0, span), 1
    return x, tuple(strides)


def _should_use_compiled(
    x: torch.Tensor, weight: torch.Tensor, stride: Ints, padding: Ints, dilation: Ints, groups: int
) -> bool:
    """Return whether compiled kernels are available for a convolution, and were measured to be faster."""
    c_out, c_in, *kernel = weight.shape
    if not _is_supported(x, weight) or prod(kernel) == 1:
        return False
    padded_extents = [n + 2 * p for n, p in zip(x.shape[2:], padding, strict=True)]
    kernels, n_out = _compiled_kernels(), len(x) * prod(output_extent(padded_extents, kernel, stride, dilation))
    if n_out < _MIN_OUTPUTS or weight.numel() > _MAX_WEIGHTS_PER_OUTPUT * n_out or c_out * x.itemsize < VECTOR_BYTES:
        return False
    if groups > 1:
        return hasattr(kernels, "depthwise") and c_in == 1 and groups == c_out and prod(kernel) <= _MAX_DEPTHWISE_WINDOW
    return hasattr(kernels, "weights") and max(dilation) == 1 < c_in


def _is_matrix_product(
    x: torch.Tensor, weight: torch.Tensor, stride: Ints, padding: Ints, dilation: Ints, groups: int
) -> bool:
    """Return whether the convolution is a product of two matrices: windows of one cell over channels-last memory."""
    is_pointwise = prod(weight.shape[2:]) == groups == max(stride) == 1 and not any(padding)
    return is_pointwise and _is_supported(x, weight) and memory_format_of(x) == CHANNELS_LAST_BY_NDIM.get(x.dim())


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
        shape = output_extent(cells.shape[1:-1], weight.shape[2:], stride, dilation)
        y = torch.empty((len(x), weight.shape[0], *shape), dtype=x.dtype, memory_format=CHANNELS_LAST_BY_NDIM[x.dim()])
        results = y.movedim(1, -1)
        if prod(weight.shape[2:]) == 1:
            operands, result_matrix = (_as_matrix(cells), weight.flatten(1).t()), _as_matrix(results)
            torch.mm(*operands, out=result_matrix) if bias is None else torch.addmm(bias, *operands, out=result_matrix)
        else:
            bias_array = None if bias is None else bias.detach().contiguous().numpy()
            args = stride, dilation, groups, bias_array, _copy_without_activation
            _kernels(torch.get_num_threads()).conv_into(results.numpy(), cells.numpy(), _channels_last(weight), *args)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        (cells, weight), (stride, padding, dilation, groups) = ctx.saved_tensors, ctx.options
        needs_grad = ctx.needs_input_grad[:3]
        dy_cells = gradients[0].movedim(1, -1).contiguous()
        dx = torch.empty_like(cells) if needs_grad[0] else None
        if prod(weight.shape[2:]) == 1:
            if dx is not None:
                torch.mm(_as_matrix(dy_cells), weight.flatten(1), out=_as_matrix(dx))
            weight_grad = (_as_matrix(dy_cells).t() @ _as_matrix(cells)).view(weight.shape) if needs_grad[1] else None
            bias_grad = _as_matrix(dy_cells).sum(0) if needs_grad[2] else None
        else:
            dy, dx_array = dy_cells.numpy(), None if dx is None else dx.numpy()
            pads = tuple((p, p) for p in padding)
            grads = _kernels(torch.get_num_threads()).conv_backward_into(
                dx_array, cells.numpy(), dy, _channels_last(weight), stride, dilation, groups,
                lambda index: np.ascontiguousarray(dy[index]), pads, needs_grad[1], False, all(needs_grad[1:]),
            )  # fmt: skip
            weight_grad, bias_grad = (
                torch.from_numpy(dv) if present else None for dv, present in zip(grads, needs_grad[1:], strict=True)
            )
            if weight_grad is not None:
                weight_grad = weight_grad.movedim((-1, -2), (0, 1))
            elif bias_grad is not None:  # the kernel computes bias gradients only together with weight gradients
                bias_grad = _as_matrix(dy_cells).sum(0)
        if dx is not None:
            for axis, (pad, n) in enumerate(zip(padding, cells.shape[1:-1], strict=True), start=1):
                dx = dx.narrow(axis, pad, n - 2 * pad)
            dx = dx.movedim(-1, 1)
        return dx, weight_grad, bias_grad, None, None, None, None


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
def _kernels(num_threads: int) -> CompiledConvolution:
    kernels = CompiledConvolution()
    if num_threads > 1 and kernels.compiled is not None:
        kernels.threads, kernels.gomp_address = num_threads, gomp_parallel_address()
    return kernels
