"""Valid filters whose taps are a product of one vector per axis; the loops run over the taps only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Taps = Sequence[Sequence[float]]


def forward(x: np.ndarray, taps: Taps) -> np.ndarray:
    """Return the correlation (N, *out, C), one axis after the other."""
    for axis, weights in enumerate(taps, start=1):
        n = max(0, x.shape[axis] - len(weights) + 1)
        total = x[_along(axis, 0, n)] * weights[0]
        for i, weight in enumerate(weights[1:], start=1):
            total += x[_along(axis, i, n)] * weight
        x = total
    return x


def spread(dy: np.ndarray, extent: Sequence[int], taps: Taps) -> np.ndarray:
    """Return the adjoint of `forward`, (N, *extent, C), axes in the opposite order."""
    for axis in range(len(taps), 0, -1):
        n, shape = dy.shape[axis], list(dy.shape)
        shape[axis] = extent[axis - 1]
        dx = np.zeros(shape, dy.dtype)
        for i, weight in enumerate(taps[axis - 1]):
            dx[_along(axis, i, n)] += dy * weight
        dy = dx
    return dy


def _along(axis: int, start: int, n: int) -> tuple[slice, ...]:
    return (*(slice(None),) * axis, slice(start, start + n))
