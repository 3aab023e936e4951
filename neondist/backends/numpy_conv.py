"""Valid n-D convolution, channels-last, through GEMM on cache-sized blocks of gathered windows (im2col)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np

from .windows import all_windows, blocks, offsets, out_extent

Ints = Sequence[int]
_BLOCK = 1 << 17  # gathered numbers at a time: half a MiB of float32 stays in the second-level cache


def forward(
    x: np.ndarray, weights: np.ndarray, stride: Ints, dilation: Ints, groups: int, bias: np.ndarray | None = None
) -> np.ndarray:
    """Return the convolution plus bias (N, *out, C_out)."""
    kernel, channels = weights.shape[:-2], weights.shape[-1]
    out = out_extent(x.shape[1:-1], kernel, stride, dilation)
    y = np.empty((len(x), *out, channels), x.dtype)
    matrix = _matrix(weights, groups)
    for where, columns in _gathered(x, kernel, stride, dilation, groups):
        part = y[where]
        if groups == 1:
            np.matmul(columns[0], matrix[0], out=part.reshape(-1, channels))
        else:
            part[...] = _join(columns @ matrix, part.shape)
        if bias is not None:  # while the block is in the cache
            part += bias
    return y


def backward_weights(
    x: np.ndarray, dy: np.ndarray, kernel: Ints, stride: Ints, dilation: Ints, groups: int
) -> np.ndarray:
    """Return the gradient of the weights (*kernel, C_in / groups, C_out)."""
    inner, outer = x.shape[-1] // groups, dy.shape[-1] // groups
    total = np.zeros((groups, prod(kernel) * inner, outer), x.dtype)
    for where, columns in _gathered(x, kernel, stride, dilation, groups):
        total += columns.transpose(0, 2, 1) @ _divide(dy[where], groups)
    return total.transpose(1, 0, 2).reshape(*kernel, inner, groups * outer)


def backward_input(
    dy: np.ndarray, weights: np.ndarray, extent: Ints, stride: Ints, dilation: Ints, groups: int
) -> np.ndarray:
    """Return the gradient of x (N, *extent, C_in): a GEMM for each cell of the kernel, added where it looked.

    Measured 1.2 to 2.4 times faster than one GEMM whose columns are scattered afterwards.
    """
    kernel, inner = weights.shape[:-2], weights.shape[-2]
    dx = np.zeros((len(dy), *extent, inner * groups), dy.dtype)
    turned = _matrix(weights, groups).reshape(groups, prod(kernel), inner, -1).transpose(1, 0, 3, 2).copy()
    per_row = prod(dy.shape[2:-1]) * max(inner * groups, dy.shape[-1])
    span = dilation[0] * (kernel[0] - 1) + 1
    for samples, rows in blocks(len(dy), dy.shape[1:-1], per_row, _BLOCK):
        part = dy[samples, rows]
        by_group = _divide(part, groups)
        target = dx[samples, rows.start * stride[0] : (rows.stop - 1) * stride[0] + span]
        for at, (_, cells) in enumerate(offsets(kernel, stride, dilation, part.shape[1:-1])):
            target[cells] += _join(by_group @ turned[at], (*part.shape[:-1], inner * groups))
    return dx


def _gathered(
    x: np.ndarray, kernel: Ints, stride: Ints, dilation: Ints, groups: int
) -> Iterator[tuple[tuple[slice, slice], np.ndarray]]:
    """Yield (index into N and the first output axis, windows (groups, cells, kernel * C_in / groups)) by blocks."""
    inner = x.shape[-1] // groups
    windows = all_windows(x, kernel, stride, dilation)
    windows = windows[None] if groups == 1 else np.moveaxis(_by_group(windows, groups), -2, 0)
    out = windows.shape[2 : 2 + len(kernel)]
    length = prod(kernel) * inner
    scratch = np.empty(0, x.dtype)
    for where in blocks(len(x), out, prod(out[1:]) * length * groups, _BLOCK):
        part = windows[(slice(None), *where)]
        if part.size > scratch.size:
            scratch = np.empty(part.size, x.dtype)
        columns = scratch[: part.size].reshape(part.shape)
        np.copyto(columns, part)
        yield where, columns.reshape(groups, -1, length)


def _by_group(windows: np.ndarray, groups: int) -> np.ndarray:
    """Return (…, C) as the view (…, groups, C / groups)."""
    inner, step = windows.shape[-1] // groups, windows.strides[-1]
    return np.lib.stride_tricks.as_strided(
        windows, (*windows.shape[:-1], groups, inner), (*windows.strides[:-1], inner * step, step), writeable=False
    )


def _matrix(weights: np.ndarray, groups: int) -> np.ndarray:
    """Return the weights as (groups, kernel * C_in / groups, C_out / groups)."""
    return weights.reshape(-1, groups, weights.shape[-1] // groups).transpose(1, 0, 2)


def _divide(dy: np.ndarray, groups: int) -> np.ndarray:
    """Return (N, *out, C_out) as (groups, cells, C_out / groups)."""
    return dy.reshape(-1, groups, dy.shape[-1] // groups).transpose(1, 0, 2)


def _join(parts: np.ndarray, shape: Ints) -> np.ndarray:
    return parts.transpose(1, 0, 2).reshape(shape)
