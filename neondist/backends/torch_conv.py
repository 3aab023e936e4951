"""Valid convolution of images and volumes by PyTorch's kernels (oneDNN on CPUs), channels-last, without autograd."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import numpy as np
import torch

from .torch_arrays import array_like, to_channels_first, to_channels_last, to_tensor, weights_to_tensor
from .windows import Sides, crop_borders, split_into_blocks, unreached_cells

Ints = Sequence[int]
_aten = torch.ops.aten
_MAX_NONZERO_PRODUCT_SHARE = 0.97  # below this share of nonzero products, padding by oneDNN is worth a copy
_MAX_SMALL_VOLUME_SIZE = 20480
"""planes * rows * channels of a single volume up to which PyTorch uses its own kernel instead of oneDNN's"""
_BLOCK_ELEMENTS = 1 << 19  # gathered elements per block; the fastest of 2^17 to 2^22 (measured)


def onednn_supports(x: np.ndarray) -> bool:
    """Return whether x is an array in host memory that oneDNN supports."""
    return isinstance(x, np.ndarray) and x.dtype == np.float32 and torch.backends.mkldnn.is_available()


def forward(
    x: np.ndarray, weights: np.ndarray, stride: Ints, dilation: Ints, groups: int, bias: np.ndarray | None, zeros: Sides
) -> np.ndarray:
    """Return the convolution plus bias (N, *out, C_out); adding the bias needs no separate pass."""
    x, padding = _remove_zero_padding(x, weights.shape[:-2], stride, dilation, zeros)
    x_tensor, kernel, output_padding = to_channels_first(x), weights_to_tensor(weights), (0,) * len(stride)
    added = None if bias is None else to_tensor(bias)
    if onednn_supports(x):
        return to_channels_last(x, torch.mkldnn_convolution(x_tensor, kernel, added, padding, stride, dilation, groups))
    y = _aten.convolution(x_tensor, kernel, added, stride, padding, dilation, False, output_padding, groups)
    return to_channels_last(x, y)


def backward_input(
    dy: np.ndarray, weights: np.ndarray, extent: Ints, stride: Ints, dilation: Ints, groups: int, crop: Sides
) -> np.ndarray:
    """Return the gradient of x (N, *extent, C_in) without `crop`: the transposed convolution.

    It is as fast as the backward kernel, which would need x. Cells that are cropped at both ends are not computed
    (measured: 1.25 times faster for 5 x 5 on 14 cells).
    """
    symmetric_crop = tuple(min(sides) if n > 2 * min(sides) else 0 for sides, n in zip(crop, extent, strict=True))
    unseen = unreached_cells(extent, weights.shape[:-2], stride, dilation)
    gradient, weight_tensor = to_channels_first(dy), weights_to_tensor(weights)
    if onednn_supports(dy):
        transposed = torch.ops.mkldnn._convolution_transpose_pointwise
        dx = transposed(gradient, weight_tensor, None, symmetric_crop, unseen, stride, dilation, groups, "none", [], "")
    else:
        dx = _aten.convolution(gradient, weight_tensor, None, stride, symmetric_crop, dilation, True, unseen, groups)
    remaining_crop = [(before - c, after - c) for (before, after), c in zip(crop, symmetric_crop, strict=True)]
    return crop_borders(to_channels_last(dy, dx), remaining_crop)


def backward_weights(
    x: np.ndarray, dy: np.ndarray, kernel: Ints, stride: Ints, dilation: Ints, groups: int, zero_widths: Sides
) -> np.ndarray:
    """Return the gradient of the weights (*kernel, C_in / groups, C_out), possibly in `reorder_for_onednn`'s order.

    PyTorch uses slow kernels for 1 x 1 with one thread and few samples, so rows are passed as samples.
    """
    has_many_channels = groups == 1 and min(x.shape[-1], dy.shape[-1]) >= 16 and isinstance(x, np.ndarray)
    if has_many_channels and torch.backends.cpu.get_cpu_capability() != "AVX512":
        return weight_gradient_by_gemm(x, dy, kernel, stride, dilation, zero_widths[0])
    padding: Ints = (0,) * len(stride)
    if prod(kernel) * prod(stride) == 1:
        x, dy = (cells.reshape(-1, *(1,) * (len(kernel) - 1), *cells.shape[-2:]) for cells in (x, dy))
    else:
        axis = _axis_to_halve(x, dy)
        remaining_zeros = [(0, 0) if at == axis else two for at, two in enumerate(zero_widths, start=1)]
        x, padding = _remove_zero_padding(x, kernel, stride, dilation, remaining_zeros)
        if axis:
            x, dy = _split_in_halves(x, dy, axis, stride[axis - 1], dilation[axis - 1] * (kernel[axis - 1] - 1) + 1)
    output_padding, output_mask = (0,) * len(stride), (False, True, False)
    x_tensor, dy_tensor = to_channels_first(x), to_channels_first(dy)
    like = x_tensor.new_empty((dy.shape[-1], x.shape[-1] // groups, *kernel))
    _, gradient, _ = _aten.convolution_backward(
        dy_tensor, x_tensor, like, None, stride, padding, dilation, False, output_padding, groups, output_mask
    )
    return array_like(x, gradient.movedim((0, 1), (-1, -2)))


def reorder_for_onednn(weights: np.ndarray) -> np.ndarray:
    """Return the weights in oneDNN's memory order, so that they need not be reordered for each strip."""
    *_, channels = shape = weights.shape
    rows = to_tensor(weights).reshape(-1, channels).t().contiguous()  # 4 times faster than other copies of a matrix
    return array_like(weights, rows.reshape(channels, *shape[:-1]).movedim(0, -1))


def restore_weight_order(gradient: np.ndarray) -> np.ndarray:
    """Return a gradient in the order of `reorder_for_onednn` as a contiguous array."""
    if gradient.flags.c_contiguous:
        return gradient
    rows = to_tensor(gradient).movedim(-1, 0).reshape(gradient.shape[-1], -1)
    return array_like(gradient, rows.t().contiguous().reshape(gradient.shape))


def _remove_zero_padding(
    x: np.ndarray, kernel: Ints, stride: Ints, dilation: Ints, zeros: Sides
) -> tuple[np.ndarray, Ints]:
    """Return x without zeros at both ends, and the padding that replaces them, whose products oneDNN skips."""
    padding = _removable_zeros(x.shape[1:-1], tuple(kernel), tuple(stride), tuple(dilation), tuple(map(min, zeros)))
    return (crop_borders(x, [(p, p) for p in padding]), padding) if any(padding) else (x, padding)


@lru_cache
def _removable_zeros(extent: Ints, kernel: Ints, stride: Ints, dilation: Ints, zeros: Ints) -> Ints:
    """Return the zeros at both ends whose removal is worth a copy of x."""
    padding, remaining_share = [], 1.0
    for n, k, s, d, z in zip(extent, kernel, stride, dilation, zeros, strict=True):
        p = min(z, d * (k - 1), (n - 1) // 2)
        spared = 2 * sum(max(0, -(-(p - d * at) // s)) for at in range(k))  # skipped products of all kernel cells
        padding.append(p)
        remaining_share *= 1 - spared / (k * ((n - d * (k - 1) - 1) // s + 1))
    return tuple(padding) if remaining_share < _MAX_NONZERO_PRODUCT_SHARE else (0,) * len(kernel)


def _axis_to_halve(x: np.ndarray, dy: np.ndarray) -> int:
    """Return the axis along which to split a single small volume into two samples; 0: do not split."""
    if x.ndim < 5 or len(x) > 1 or x[0, :, :, 0].size > _MAX_SMALL_VOLUME_SIZE or not onednn_supports(x):
        return 0
    return next((axis for axis in (1, 2, 3) if dy.shape[axis] % 2 == 0), 1)


def _split_in_halves(x: np.ndarray, dy: np.ndarray, axis: int, stride: int, span: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a single volume as two samples, whose views overlap by the span of a window."""
    rows = dy.shape[axis]
    first_rows = -(-rows // 2)
    shape = (2, *x.shape[1:axis], (first_rows - 1) * stride + span, *x.shape[axis + 1 :])
    strides = ((rows - first_rows) * stride * x.strides[axis], *x.strides[1:])
    stacked_halves = np.ascontiguousarray(np.lib.stride_tricks.as_strided(x, shape, strides))
    if axis == 1 and rows % 2 == 0:
        return stacked_halves, dy.reshape(2, first_rows, *dy.shape[2:])
    first_half, second_half = np.split(dy, [first_rows], axis)
    if rows % 2:  # the middle row belongs to the first half
        second_half = np.concatenate([np.zeros_like(first_half.take([0], axis)), second_half], axis)
    return stacked_halves, np.concatenate([first_half, second_half])


def weight_gradient_by_gemm(
    x: np.ndarray, dy: np.ndarray, kernel: Ints, stride: Ints, dilation: Ints, row_zeros: tuple[int, int] = (0, 0)
) -> np.ndarray:
    """Return the gradient of the weights (*kernel, C_in, C_out), for one group, by GEMM.

    On CPUs without AVX-512, oneDNN's own kernel reaches a fifth to a half of this speed.

    Windows are gathered along all axes but the first. Along the first axis, a row of the kernel is a shift of the
    gathered rows, so rows are copied once, not once per row of the kernel. Small images are batched.

    Parameters
    ----------
    row_zeros : (int, int)
        Numbers of first and last rows of x that are zero and therefore skipped.
    """
    (num_kernel_rows, *_), step, row_dilation = kernel, stride[0], dilation[0]
    channels, length = dy.shape[-1], prod(kernel[1:]) * x.shape[-1]
    windows = _row_windows(to_tensor(x), kernel, stride, dilation)
    rows_of_dy = to_tensor(dy).transpose(0, 1)  # (rows, N, ...)
    total = torch.zeros((num_kernel_rows, channels, length), dtype=rows_of_dy.dtype)
    for samples, rows in split_into_blocks(len(dy), dy.shape[1:-1], prod(dy.shape[2:-1]) * length, _BLOCK_ELEMENTS):
        dy_rows = rows_of_dy[rows, samples].reshape(rows.stop - rows.start, -1, channels)
        lo = max(row_zeros[0], rows.start * step)
        hi = min(len(windows) - row_zeros[1], (rows.stop - 1) * step + row_dilation * (num_kernel_rows - 1) + 1)
        if lo >= hi:
            continue
        window_rows = windows[lo:hi, samples]
        if step == 1:
            window_rows = window_rows.reshape(hi - lo, dy_rows.shape[1], length)
        for row in range(num_kernel_rows):
            start = max(rows.start, -((row * row_dilation - lo) // step))  # rows of dy whose windows use rows lo to hi
            stop = min(rows.stop, (hi - 1 - row * row_dilation) // step + 1)
            if start < stop:
                start_row = start * step + row * row_dilation - lo
                columns = window_rows[start_row : start_row + (stop - start - 1) * step + 1 : step].reshape(-1, length)
                gradient = dy_rows[start - rows.start : stop - rows.start].reshape(-1, channels)
                total[row].addmm_(gradient.T, columns)
    return total.transpose(1, 2).reshape(*kernel, x.shape[-1], channels).numpy()


def _row_windows(x: torch.Tensor, kernel: Ints, stride: Ints, dilation: Ints) -> torch.Tensor:
    """Return x (N, *spatial, C) as a view (rows, N, *out[1:], *kernel[1:], C)."""
    for axis, (k, s, d) in enumerate(zip(kernel[1:], stride[1:], dilation[1:], strict=True), start=2):
        x = x.unfold(axis, d * (k - 1) + 1, s)[..., ::d]
    return x.transpose(0, 1).movedim(len(kernel) + 1, -1)
