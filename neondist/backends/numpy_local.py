"""Unshared convolution: every output cell has weights of its own; a batched GEMM over the cells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np

from .windows import all_windows, blocks, offsets

Ints = Sequence[int]
_BLOCK = 1 << 20  # cells of gathered windows at a time


def forward(x: np.ndarray, weights: np.ndarray, stride: Ints) -> np.ndarray:
    """Return (N, *out, C_out) for x (N, *spatial, C_in) and weights (*out, *kernel, C_in, C_out)."""
    ndim = x.ndim - 2
    y = np.empty((len(x), *weights.shape[:ndim], weights.shape[-1]), x.dtype)
    for rows, columns, matrix in _gathered(x, weights, stride):
        y[:, rows] = np.moveaxis(columns @ matrix, -2, 0)
    return y


def backward_weights(x: np.ndarray, dy: np.ndarray, weights: np.ndarray, stride: Ints) -> np.ndarray:
    """Return the gradient of the weights (only the shape of `weights` is used)."""
    gradient = np.zeros_like(weights)
    for rows, columns, _ in _gathered(x, weights, stride):
        part = columns.swapaxes(-1, -2) @ np.moveaxis(dy[:, rows], 0, -2)
        gradient[rows] = part.reshape(gradient[rows].shape)
    return gradient


def backward_input(dy: np.ndarray, weights: np.ndarray, extent: Ints, stride: Ints) -> np.ndarray:
    """Return the gradient of x (N, *extent, C_in)."""
    ndim = dy.ndim - 2
    kernel, out, channels = weights.shape[ndim : 2 * ndim], weights.shape[:ndim], weights.shape[-2]
    dx = np.zeros((*extent, channels, len(dy)), dy.dtype)  # samples last, so that every addition is of long runs
    length = prod(kernel) * channels
    for _, rows in blocks(1, out, prod(out[1:]) * len(dy) * length, _BLOCK):
        matrix, by_cell = weights[rows], np.moveaxis(dy[:, rows], 0, -1)
        here = matrix.shape[:ndim]
        columns = matrix.reshape(*here, length, -1) @ by_cell
        columns = columns.reshape(*here, *kernel, channels, len(dy))
        part = dx[rows.start * stride[0] :]
        for place, (_, *cells) in offsets(kernel, stride, (1,) * ndim, here):
            part[tuple(cells)] += columns[(slice(None),) * ndim + place]
    return np.ascontiguousarray(np.moveaxis(dx, -1, 0))


def _gathered(x: np.ndarray, weights: np.ndarray, stride: Ints) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
    """Yield (rows, windows (rows, ..., N, kernel * C_in), weights (rows, ..., kernel * C_in, C_out))."""
    ndim = x.ndim - 2
    out, length = weights.shape[:ndim], prod(weights.shape[ndim:-1])
    windows = np.moveaxis(all_windows(x, weights.shape[ndim : 2 * ndim], stride, (1,) * ndim), 0, ndim)
    for _, rows in blocks(1, out, prod(out[1:]) * len(x) * length, _BLOCK):
        part = windows[rows]
        columns = part.reshape(*part.shape[: ndim + 1], length)
        yield rows, columns, weights[rows].reshape(*part.shape[:ndim], length, weights.shape[-1])
