"""Valid pooling and separable filters, channels-last; the loops run over the cells of the kernel only."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod
from typing import Any

from .windows import output_extent, window_cells

Ints = Sequence[int]
Taps = Sequence[Sequence[float]]


class PoolingKernels:
    """Kernels that process each channel in the same way, over the arrays of `xp`."""

    xp: Any

    def max_pool(self, x: Any, kernel: Ints, stride: Ints) -> tuple[Any, Any]:
        """Return the maxima and, for the backward pass, the position of each window's first maximum (row-major).

        The choice among equal maxima thus does not depend on the tiles. The encoding of positions is private to these
        kernels.
        """
        xp, ones = self.xp, (1,) * len(kernel)
        out_extent = output_extent(x.shape[1:-1], kernel, stride, ones)
        shape = (len(x), *out_extent, x.shape[-1])
        maxima = xp.full(shape, -inf, x.dtype)
        positions = xp.zeros(shape, xp.uint8 if prod(kernel) <= 256 else xp.int32)
        for at, (_, cells) in enumerate(window_cells(kernel, stride, ones, out_extent)):
            candidates = x[cells]
            if at:
                positions[candidates > maxima] = at
            xp.maximum(maxima, candidates, out=maxima)
        return maxima, positions

    def max_pool_backward(self, dy: Any, max_positions: Any, extent: Ints, kernel: Ints, stride: Ints) -> Any:
        """Return the gradient of x (N, *extent, C), which is passed to the first maximum of each window."""
        dx = self.xp.zeros((len(dy), *extent, dy.shape[-1]), dy.dtype)
        ones = (1,) * len(kernel)
        is_disjoint = all(s >= k for s, k in zip(stride, kernel, strict=True))
        for at, (_, cells) in enumerate(window_cells(kernel, stride, ones, dy.shape[1:-1])):
            if is_disjoint:
                self.xp.multiply(dy, max_positions == at, out=dx[cells])
            else:
                dx[cells] += dy * (max_positions == at)
        return dx

    def window_sum(self, x: Any, kernel: Ints, stride: Ints) -> Any:
        """Return the sum over every window, computed along one axis after the other."""
        for axis, (k, s) in enumerate(zip(kernel, stride, strict=True), start=1):
            n = max(0, (x.shape[axis] - k) // s + 1)
            shifted = [x[_axis_index(axis, slice(i, i + (n - 1) * s + 1 if n else i, s))] for i in range(k)]
            total = shifted[0].copy()
            for part in shifted[1:]:
                total += part
            x = total
        return x

    def window_sum_adjoint(self, dy: Any, extent: Ints, kernel: Ints, stride: Ints) -> Any:
        """Return the adjoint of `window_sum`: every window's value added to each of its cells."""
        for axis in range(len(kernel), 0, -1):
            k, s, n = kernel[axis - 1], stride[axis - 1], dy.shape[axis]
            shape = list(dy.shape)
            shape[axis] = extent[axis - 1]
            dx = self.xp.zeros(shape, dy.dtype)
            for i in range(k):
                dx[_axis_index(axis, slice(i, i + (n - 1) * s + 1 if n else i, s))] += dy
            dy = dx
        return dy

    def separable_filter(self, x: Any, taps: Taps) -> Any:
        """Return the valid correlation of every channel with the product of `taps`, a vector for each spatial axis."""
        for axis, weights in enumerate(taps, start=1):
            n = max(0, x.shape[axis] - len(weights) + 1)
            total = x[_axis_index(axis, slice(0, n))] * weights[0]
            for i, weight in enumerate(weights[1:], start=1):
                total += x[_axis_index(axis, slice(i, i + n))] * weight
            x = total
        return x

    def separable_filter_adjoint(self, dy: Any, extent: Ints, taps: Taps) -> Any:
        """Return the adjoint of `separable_filter`, (N, *extent, C); axes are processed in reverse order."""
        for axis in range(len(taps), 0, -1):
            n, shape = dy.shape[axis], list(dy.shape)
            shape[axis] = extent[axis - 1]
            dx = self.xp.zeros(shape, dy.dtype)
            for i, weight in enumerate(taps[axis - 1]):
                dx[_axis_index(axis, slice(i, i + n))] += dy * weight
            dy = dx
        return dy


def _axis_index(axis: int, cells: slice) -> tuple[slice, ...]:
    return (*(slice(None),) * axis, cells)
