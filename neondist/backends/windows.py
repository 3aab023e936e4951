"""Windows of an array as views, and outputs in blocks and strips.

A convolution's activation and, in the backward pass, the gradients of weights, bias and input are all computed for one
strip, while it is in the cache, before the next strip. Results are written into existing arrays of any strides, such
as the interior of a padded buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any, NamedTuple

from ..arrays.namespace import namespace

Ints = Sequence[int]
Sides = Sequence[tuple[int, int]]
"""cells before and after, for every axis"""


def output_extent(extent: Ints, kernel: Ints, stride: Ints, dilation: Ints) -> tuple[int, ...]:
    """Return the number of windows that fit on each axis, at least 0."""
    return _output_extent(tuple(extent), tuple(kernel), tuple(stride), tuple(dilation))


@lru_cache
def _output_extent(extent: Ints, kernel: Ints, stride: Ints, dilation: Ints) -> tuple[int, ...]:
    axes = zip(extent, kernel, stride, dilation, strict=True)
    return tuple(max(0, (n - d * (k - 1) - 1) // s + 1) for n, k, s, d in axes)


def unreached_cells(extent: Ints, kernel: Ints, stride: Ints, dilation: Ints) -> list[int]:
    """Return the number of cells at the end of each axis that no window reaches."""
    axes = zip(extent, kernel, stride, dilation, strict=True)
    return [(n - d * (k - 1) - 1) % s for n, k, s, d in axes]


def all_windows(x: Any, kernel: Ints, stride: Ints, dilation: Ints) -> Any:
    """Return x (N, *spatial, C) as a view (N, *out, *kernel, C), whose overlapping cells must not be written."""
    out_extent = output_extent(x.shape[1:-1], kernel, stride, dilation)
    spatial_strides = x.strides[1:-1]
    steps = [b * step for factors in (stride, dilation) for b, step in zip(spatial_strides, factors, strict=True)]
    shape = (len(x), *out_extent, *kernel, x.shape[-1])
    return namespace(x).lib.stride_tricks.as_strided(x, shape, (x.strides[0], *steps, x.strides[-1]))


def window_cells(kernel: Ints, stride: Ints, dilation: Ints, out: Ints) -> Iterator[tuple[tuple[int, ...], tuple]]:
    """Yield, for every cell of a window in row-major order, its position and the index of that cell in all windows."""
    for place in product(*map(range, kernel)):
        start_cells = [p * d for p, d in zip(place, dilation, strict=True)]
        spans = [slice(a, a + (n - 1) * s + 1 if n else a, s) for a, s, n in zip(start_cells, stride, out, strict=True)]
        yield place, (slice(None), *spans)


def split_into_blocks(
    samples: int, out_extent: Ints, cells_per_row: int, max_block_cells: int
) -> Iterator[tuple[slice, slice]]:
    """Cut (samples, out[0]) into even blocks of at most about `max_block_cells` cells: samples, or rows of one sample.

    `cells_per_row` is the size of one index of out[0].
    """
    num_rows = out_extent[0]
    if samples * num_rows * cells_per_row == 0:
        return
    if samples * num_rows * cells_per_row <= max_block_cells:
        yield slice(0, samples), slice(0, num_rows)
        return
    rows_per_block = max(1, max_block_cells // cells_per_row)
    if rows_per_block >= num_rows:
        samples_per_block = _even_block_size(samples, rows_per_block // num_rows)
        for start in range(0, samples, samples_per_block):
            yield slice(start, min(start + samples_per_block, samples)), slice(0, num_rows)
        return
    rows_per_block = _even_block_size(num_rows, rows_per_block)
    for sample, start in product(range(samples), range(0, num_rows, rows_per_block)):
        yield slice(sample, sample + 1), slice(start, min(start + rows_per_block, num_rows))


def _even_block_size(count: int, max_size: int) -> int:
    """Return a block size at which no block is much smaller than others, since kernels are slow on small blocks."""
    return -(-count // -(-count // max_size))


class Strip(NamedTuple):
    """Samples and rows (indices of the first spatial axis) of an output, and the rows of the view that they use."""

    samples: slice
    output_rows: slice
    view_rows: slice
    is_last: bool

    @property
    def output_index(self) -> tuple[slice, slice]:
        """Index into arrays of the output's shape."""
        return self.samples, self.output_rows

    @property
    def index_in_view(self) -> tuple[slice, slice]:
        """Index into arrays of the view's shape."""
        return self.samples, self.view_rows

    def zero_row_counts(self, rows: tuple[int, int], x: Any) -> tuple[int, int]:
        """Return how many of the view's first `rows[0]` and last `rows[1]` rows this strip uses."""
        zeros_before, zeros_after = rows[0] - self.view_rows.start, self.view_rows.stop - (x.shape[1] - rows[1])
        return max(0, zeros_before), max(0, zeros_after)


def split_into_strips(x: Any, y: Any, kernel: Ints, stride: Ints, dilation: Ints, strip_size: int) -> Iterator[Strip]:
    """Cut a valid operation from x (N, *extent, C) to y (N, *out, C') into strips of about `strip_size` elements."""
    row_stride, window_rows = stride[0], dilation[0] * (kernel[0] - 1) + 1
    row_elements = max(prod(y.shape[2:]), min(row_stride, window_rows) * prod(x.shape[2:]))
    for samples, rows in split_into_blocks(len(y), y.shape[1:-1], row_elements, strip_size):
        view_rows = slice(rows.start * row_stride, (rows.stop - 1) * row_stride + window_rows)
        yield Strip(samples, rows, view_rows, rows.stop == y.shape[1])


def crop_borders(array: Any, sides: Sides | None) -> Any:
    """Return (N, *spatial, C) without `sides` cells at the ends of every axis."""
    if sides is None:
        return array
    sides_and_extents = zip(sides, array.shape[1:-1], strict=True)
    return array[(slice(None), *(slice(before, n - after) for (before, after), n in sides_and_extents))]


def zero_borders(dx: Any, sides: Sides) -> Any:
    """Fill the ends of all spatial axes with zeros; return the interior."""
    for axis, (before, after) in enumerate(sides, start=1):
        all_before = (slice(None),) * axis
        stop_cell = max(before, dx.shape[axis] - after)
        dx[(*all_before, slice(0, before))] = 0
        dx[(*all_before, slice(stop_cell, None))] = 0
        dx = dx[(*all_before, slice(before, stop_cell))]
    return dx


def strided_index(stride: Ints) -> tuple[slice, ...]:
    """Return the index of the cells of (N, *spatial, C) that windows of one cell with a stride read."""
    return slice(None), *(slice(None, None, step) for step in stride)


def zero_cells_between_strides(dx: Any, stride: Ints) -> None:
    """Fill the cells that `strided_index` leaves out with zeros."""
    for axis, step in enumerate(stride, start=1):
        whole = (slice(None),) * axis
        for first in range(1, step):
            dx[(*whole, slice(first, None, step))] = 0
        dx = dx[(*whole, slice(None, None, step))]


class StripAccumulator:
    """Accumulator of the gradients of overlapping strips in `dx`; cells that no window uses become zero.

    No row is written before the last strip that uses it, so that dx may share the memory of the view.

    Parameters
    ----------
    write : callable
        `write(part, index)` writes a sum into dx[index].
    step : int
        Distance between windows, in rows of the view.
    first_row : int
        Row of the view that is the first row of dx. Strips contribute no rows before it, nor after the last row of dx.
    """

    def __init__(self, dx: Any, dy: Any, write: Callable[[Any, tuple], None], step: int, first_row: int = 0) -> None:
        self.dx, self.write, self.step, self.first_row = dx, write, step, first_row
        self.rows_written, self.partial_sums = 0, None  # number of written rows, and partial sums of the next rows
        if not dy.size:
            dx[...] = 0

    def add(self, strip: Strip, gradient: Any) -> None:
        """Add the gradient of the rows that a strip uses; strips must be added in order."""
        dx, start_row = self.dx[strip.samples], max(0, strip.view_rows.start - self.first_row)
        stop = start_row + gradient.shape[1]
        if not strip.output_rows.start:
            self.rows_written, self.partial_sums = 0, None
        if self.partial_sums is not None:
            gradient[:, : self.partial_sums.shape[1]] += self.partial_sums
        dx[:, self.rows_written : start_row] = 0
        self.rows_written = (
            stop if strip.is_last else min(stop, max(start_row, strip.output_rows.stop * self.step - self.first_row))
        )
        self.write(gradient[:, : self.rows_written - start_row], (strip.samples, slice(start_row, self.rows_written)))
        self.partial_sums = gradient[:, self.rows_written - start_row :].copy() if self.rows_written < stop else None
        if strip.is_last:
            dx[:, stop:] = 0


def factor_box_window(kernel: Ints, stride: Ints) -> list[tuple[Ints, Ints]]:
    """Return the box with its stride, or one box per axis if that is faster (measured: from 49 cells on)."""
    if prod(kernel) < 49:
        return [(kernel, stride)]
    one = (1,) * len(kernel)
    return [
        ((*one[:axis], kernel[axis], *one[axis + 1 :]), (*one[:axis], stride[axis], *one[axis + 1 :]))
        for axis in range(len(kernel))
    ]
