"""Reach of an operator: the indices of its arguments that its results depend on, as a window along each dimension."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from ...geometry import Atom, AxisCells, DimRequest, Place, Range, Window, clip_ranges, fold_index, hull_of, shift_range

SAME_INDEX_WINDOW = Window.for_pointwise(1)
"""Window for results that depend only on the same index; along a dimension that is not partitioned, every rank then
views all indices."""


class InputDimView(NamedTuple):
    """View that a part of the results needs along one dimension.

    Attributes
    ----------
    ranges : tuple of Range
        Ranges of indices; unless the view is padded, they begin and end with indices that results depend on.
    used_cells : the indices that results depend on
    pads : numbers of padding indices before and after the ranges
    """

    ranges: tuple[Range, ...]
    used_cells: AxisCells
    pads: Range


class Reach(NamedTuple):
    """Dependence of results on a dimension of an argument; rules declare it, and views follow from it.

    Attributes
    ----------
    out_partition : Atom
        Partition of the results along the dimension; if it is whole, all ranks need the same indices.
    window : Window
        Window of one axis; results depend on the indices in the window.
    with_padding : bool
        Whether the view includes the window's cells outside the tensor.
    """

    out_partition: Atom
    window: Window = SAME_INDEX_WINDOW
    with_padding: bool = False

    def view(self, lo: int, hi: int, n: int) -> InputDimView:
        """Return the view, along a dimension of n indices, for the results [lo, hi)."""
        if lo >= hi:
            return InputDimView(((0, 0),), (), (0, 0))
        if self.window is SAME_INDEX_WINDOW:
            return InputDimView(((lo, hi),), (range(lo, hi),), (0, 0))
        cells, (mode, *_) = self.window.used_cells(lo, hi), self.window.modes
        if mode != "zeros":
            ranges = _consecutive_ranges(fold_index(i, n, mode) for i in range(*hull_of(cells)))
            return InputDimView(ranges, tuple(range(*run) for run in ranges), (0, 0))
        used_cells = tuple(clip_ranges(cells, 0, n))
        first, last = hull_of(cells if self.with_padding else used_cells)
        inner_range = max(first, 0), min(last, n)
        if inner_range[0] >= inner_range[1]:
            return InputDimView(((0, 0),), used_cells, (0, last - first))
        return InputDimView((inner_range,), used_cells, (inner_range[0] - first, last - inner_range[1]))

    def first_index(self, source: Atom, place: Place) -> int:
        """Return the first index in the view of the rank at a place."""
        return 0 if self.is_whole(source) else self.view(*self.out_partition.range(place), source.extent).ranges[0][0]

    def is_whole(self, source: Atom) -> bool:
        """Return whether neither the dimension nor the results are partitioned, so that every rank's view is whole."""
        return self.out_partition.axis is source.axis is None and not self.with_padding


@lru_cache(maxsize=256)  # many operators have the same windows
def dim_request_of(reach: Reach, dim: int, source: Atom) -> tuple[DimRequest, Sequence[Range]]:
    """Return the request for the indices of a dimension that each part of the results needs, and the padding."""
    n, axis = source.extent, reach.out_partition.axis
    ranges, used, pads = zip(*(reach.view(lo, hi, n) for lo, hi in reach.out_partition.ranges), strict=True)
    if reach.is_whole(source):
        ranges = (((0, n),),)
    if reach.window is SAME_INDEX_WINDOW or all(map(_fills_ranges, ranges, used)):
        return DimRequest(dim, source, axis, ranges), pads
    positions = (tuple(shift_range(run, -lo) for run in cells) for cells, ((lo, _),) in zip(used, ranges, strict=True))
    return DimRequest(dim, source, axis, ranges, tuple(positions)), pads


def _fills_ranges(ranges: Sequence[Range], cells: AxisCells) -> bool:
    return sum(hi - lo for lo, hi in ranges) == sum(map(len, cells))


def _consecutive_ranges(indices: Iterable[int]) -> tuple[Range, ...]:
    ranges: list[Range] = []
    for i in indices:
        if ranges and i == ranges[-1][1]:
            ranges[-1] = ranges[-1][0], i + 1
        else:
            ranges.append((i, i + 1))
    return tuple(ranges)
