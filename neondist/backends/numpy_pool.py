"""Pooling on valid windows, channels-last; the loops run over the cells of the kernel only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .windows import offsets, out_extent

Ints = Sequence[int]


def max_forward(x: np.ndarray, kernel: Ints, stride: Ints) -> tuple[np.ndarray, np.ndarray]:
    """Return the maxima and the place in its window of each first maximum, so that ties do not depend on tiles."""
    ones = (1,) * len(kernel)
    out = out_extent(x.shape[1:-1], kernel, stride, ones)
    shape = (len(x), *out, x.shape[-1])
    best = np.full(shape, -np.inf, x.dtype)
    place = np.zeros(shape, np.uint8 if np.prod(kernel) <= 256 else np.int32)
    for at, (_, cells) in enumerate(offsets(kernel, stride, ones, out)):
        value = x[cells]
        if at:
            place[value > best] = at
        np.maximum(best, value, out=best)
    return best, place


def max_backward(dy: np.ndarray, place: np.ndarray, extent: Ints, kernel: Ints, stride: Ints) -> np.ndarray:
    """Return the gradient of x: all of it goes to the first maximum."""
    dx = np.zeros((len(dy), *extent, dy.shape[-1]), dy.dtype)
    ones = (1,) * len(kernel)
    apart = all(s >= k for s, k in zip(stride, kernel, strict=True))
    for at, (_, cells) in enumerate(offsets(kernel, stride, ones, dy.shape[1:-1])):
        if apart:
            np.multiply(dy, place == at, out=dx[cells])
        else:
            dx[cells] += dy * (place == at)
    return dx


def window_sum(x: np.ndarray, kernel: Ints, stride: Ints) -> np.ndarray:
    """Return the sum over every window, one axis after the other (a box is separable)."""
    for axis, (k, s) in enumerate(zip(kernel, stride, strict=True), start=1):
        n = max(0, (x.shape[axis] - k) // s + 1)
        parts = [x[_along(axis, slice(i, i + (n - 1) * s + 1 if n else i, s))] for i in range(k)]
        total = parts[0].copy()
        for part in parts[1:]:
            total += part
        x = total
    return x


def window_spread(dy: np.ndarray, extent: Ints, kernel: Ints, stride: Ints) -> np.ndarray:
    """Return the adjoint of `window_sum`, axes in the opposite order."""
    for axis in range(len(kernel), 0, -1):
        k, s, n = kernel[axis - 1], stride[axis - 1], dy.shape[axis]
        shape = list(dy.shape)
        shape[axis] = extent[axis - 1]
        dx = np.zeros(shape, dy.dtype)
        for i in range(k):
            dx[_along(axis, slice(i, i + (n - 1) * s + 1 if n else i, s))] += dy
        dy = dx
    return dy


def _along(axis: int, cells: slice) -> tuple[slice, ...]:
    return (*(slice(None),) * axis, cells)
