"""Valid convolution of images and volumes by PyTorch's kernels (oneDNN on CPUs), channels-last, without autograd."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch

from .torch_arrays import channels_first, channels_last, kernels, tensor
from .windows import Sides, blocks, cropped

Ints = Sequence[int]
_aten = torch.ops.aten
_SMALL = 20480  # channels * rows of a single volume, up to which PyTorch takes its own kernel instead of oneDNN's
_BLOCK = 1 << 19  # gathered numbers at a time; measured best of 2^17 ... 2^22


def takes(x: np.ndarray) -> bool:
    """Tell whether oneDNN takes such arrays."""
    return x.dtype == np.float32 and torch.backends.mkldnn.is_available()


def forward(
    x: np.ndarray, weights: np.ndarray, stride: Ints, dilation: Ints, groups: int, bias: np.ndarray | None = None
) -> np.ndarray:
    """Return the convolution plus bias (N, *out, C_out); the bias costs no pass of its own."""
    seen, kernel, none = channels_first(x), kernels(weights), (0,) * len(stride)
    added = None if bias is None else tensor(bias)
    if takes(x):
        return channels_last(torch.mkldnn_convolution(seen, kernel, added, none, stride, dilation, groups))
    return channels_last(_aten.convolution(seen, kernel, added, stride, none, dilation, False, none, groups))


def backward_input(
    dy: np.ndarray, weights: np.ndarray, extent: Ints, stride: Ints, dilation: Ints, groups: int, crop: Sides
) -> np.ndarray:
    """Return the gradient of x (N, *extent, C_in) without `crop`: the transposed convolution.

    It is as fast as the backward kernel, which wants x beside it and uses nothing but its shape. What both ends are to
    lose it does not compute (measured: 1.25 times faster for 5 x 5 on 14 cells).
    """
    cut = tuple(min(sides) if n > 2 * min(sides) else 0 for sides, n in zip(crop, extent, strict=True))
    axes = zip(extent, weights.shape[:-2], stride, dilation, strict=True)
    unseen = [(n - d * (k - 1) - 1) % s for n, k, s, d in axes]  # cells at the end that no window reaches
    gradient, kernel = channels_first(dy), kernels(weights)
    if takes(dy):
        transposed = torch.ops.mkldnn._convolution_transpose_pointwise
        dx = transposed(gradient, kernel, None, cut, unseen, stride, dilation, groups, "none", [], "")
    else:
        dx = _aten.convolution(gradient, kernel, None, stride, cut, dilation, True, unseen, groups)
    return cropped(channels_last(dx), [(before - c, after - c) for (before, after), c in zip(crop, cut, strict=True)])


def backward_weights(
    x: np.ndarray, dy: np.ndarray, kernel: Ints, stride: Ints, dilation: Ints, groups: int, zeros: Sides
) -> np.ndarray:
    """Return the gradient of the weights (*kernel, C_in / groups, C_out), in the order of memory of `arranged`."""
    if groups == 1 and min(x.shape[-1], dy.shape[-1]) >= 16 and torch.backends.cpu.get_cpu_capability() != "AVX512":
        return weights_by_gemm(x, dy, kernel, stride, dilation, zeros[0])
    if takes(x):
        x, dy = _for_onednn(x, dy, kernel, stride, dilation)
    none, only = (0,) * len(stride), (False, True, False)
    like = torch.empty((dy.shape[-1], x.shape[-1] // groups, *kernel), dtype=tensor(x).dtype)
    _, gradient, _ = _aten.convolution_backward(
        channels_first(dy), channels_first(x), like, None, stride, none, dilation, False, none, groups, only
    )
    return gradient.movedim((0, 1), (-1, -2)).numpy()


def arranged(weights: np.ndarray) -> np.ndarray:
    """Return the weights in the order of memory that oneDNN reads, so that it is made once and not for each strip."""
    *_, channels = shape = weights.shape
    rows = tensor(weights).reshape(-1, channels).t().contiguous()  # torch's copy of a matrix is 4 times the others'
    return rows.reshape(channels, *shape[:-1]).movedim(0, -1).numpy()


def in_order(gradient: np.ndarray) -> np.ndarray:
    """Return what is arranged so as a contiguous array."""
    if gradient.flags.c_contiguous:
        return gradient
    rows = tensor(gradient).movedim(-1, 0).reshape(gradient.shape[-1], -1)
    return rows.t().contiguous().reshape(gradient.shape).numpy()


def _for_onednn(
    x: np.ndarray, dy: np.ndarray, kernel: Ints, stride: Ints, dilation: Ints
) -> tuple[np.ndarray, np.ndarray]:
    """Return x and dy as more samples, where PyTorch would take a slow kernel of its own for one or a few.

    That is so for kernels of one cell, with one thread: rows become samples; and for small single volumes: they are cut
    into two that overlap by what windows span.
    """
    if prod(kernel) * prod(stride) == 1:
        one = (1,) * (len(kernel) - 1)
        return x.reshape(-1, *one, *x.shape[-2:]), dy.reshape(-1, *one, *dy.shape[-2:])
    if len(kernel) < 3 or len(x) > 1 or x[0, :, :, 0].size > _SMALL:
        return x, dy
    even = (axis for axis, rows in enumerate(dy.shape[1:-1], start=1) if rows % 2 == 0)
    axis = next(even, 1)
    rows = dy.shape[axis]
    count, step, span = -(-rows // 2), stride[axis - 1], dilation[axis - 1] * (kernel[axis - 1] - 1) + 1
    shape = (2, *x.shape[1:axis], (count - 1) * step + span, *x.shape[axis + 1 :])
    strides = ((rows - count) * step * x.strides[axis], *x.strides[1:])
    both = np.ascontiguousarray(np.lib.stride_tricks.as_strided(x, shape, strides))
    if axis == 1 and rows % 2 == 0:
        return both, dy.reshape(2, count, *dy.shape[2:])
    first, second = np.split(dy, [count], axis)
    if rows % 2:  # the row between them is the first one's
        second = np.concatenate([np.zeros_like(first.take([0], axis)), second], axis)
    return both, np.concatenate([first, second])


def weights_by_gemm(
    x: np.ndarray, dy: np.ndarray, kernel: Ints, stride: Ints, dilation: Ints, zeros: tuple[int, int] = (0, 0)
) -> np.ndarray:
    """Return the gradient of the weights (*kernel, C_in, C_out), groups being 1, by GEMM.

    On CPUs without AVX-512 oneDNN's own kernel reaches a fifth to a half of it.

    Windows are gathered along all axes but the first; along that one, a row of the kernel is a shift of the gathered
    rows, so that they are copied once and not for each row of the kernel. Small images go many at a time.

    Parameters
    ----------
    zeros : how many of the first and last rows of x are zero: they are left out
    """
    (first, *_), step, apart = kernel, stride[0], dilation[0]
    channels, length = dy.shape[-1], prod(kernel[1:]) * x.shape[-1]
    windows = _windows(tensor(x), kernel, stride, dilation)
    rows_of_dy = tensor(dy).transpose(0, 1)  # (rows, N, ...)
    total = torch.zeros((first, channels, length), dtype=rows_of_dy.dtype)
    for samples, rows in blocks(len(dy), dy.shape[1:-1], prod(dy.shape[2:-1]) * length, _BLOCK):
        part = rows_of_dy[rows, samples].reshape(rows.stop - rows.start, -1, channels)
        lo = max(zeros[0], rows.start * step)
        hi = min(len(windows) - zeros[1], (rows.stop - 1) * step + apart * (first - 1) + 1)
        if lo >= hi:
            continue
        seen = windows[lo:hi, samples]
        if step == 1:
            seen = seen.reshape(hi - lo, part.shape[1], length)
        for row in range(first):
            start = max(rows.start, -((row * apart - lo) // step))  # of dy, those that see a row from lo to hi
            stop = min(rows.stop, (hi - 1 - row * apart) // step + 1)
            if start < stop:
                at = start * step + row * apart - lo
                columns = seen[at : at + (stop - start - 1) * step + 1 : step].reshape(-1, length)
                gradient = part[start - rows.start : stop - rows.start].reshape(-1, channels)
                total[row].addmm_(gradient.T, columns)
    return total.transpose(1, 2).reshape(*kernel, x.shape[-1], channels).numpy()


def _windows(x: torch.Tensor, kernel: Ints, stride: Ints, dilation: Ints) -> torch.Tensor:
    """Return x (N, *spatial, C) as a view (rows, N, *out[1:], *kernel[1:], C)."""
    for axis, (k, s, d) in enumerate(zip(kernel[1:], stride[1:], dilation[1:], strict=True), start=2):
        x = x.unfold(axis, d * (k - 1) + 1, s)[..., ::d]
    return x.transpose(0, 1).movedim(len(kernel) + 1, -1)
