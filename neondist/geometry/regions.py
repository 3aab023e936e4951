"""Overlapping tiles, whose shared cells are computed redundantly so that only a segment's input is exchanged."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .box import Box
from .lattice import Range
from .partition import Partition
from .plan import needed_cells_along, sources_within
from .window import Window


@dataclass(frozen=True)
class OverlappingPartition(Partition):
    """Partition of an image into ranges that may overlap: ranges[a][p] are the cells of part p on axis a."""

    ranges: tuple[tuple[Range, ...], ...] = ()

    may_overlap = True

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.extent, self.ranges))  # cached: there may be thousands of ranges

    @classmethod
    def of_box(cls, extent: tuple[int, ...], box: Box) -> OverlappingPartition:
        """Return a single tile of an image."""
        return cls(extent, (1,) * len(extent), 1, tuple((cells,) for cells in box.axes()))

    def range(self, axis: int, part: int) -> Range:
        """Return the cells of one part of an axis."""
        return self.ranges[axis][part]


def hull_partition(first: Partition, other: Partition) -> OverlappingPartition:
    """Return, for each part, the hull of its ranges in two partitions."""
    axes = range(len(first.parts))
    ranges = tuple(tuple(map(hull_of_ranges, first.ranges_along(axis), other.ranges_along(axis))) for axis in axes)
    return OverlappingPartition(first.extent, first.parts, first.num_copies_of_vector, ranges)


def view_cells(outputs: Partition, window: Window, extent: tuple[int, ...]) -> OverlappingPartition:
    """Return the cells in the windows of each part's outputs, including those outside the image."""
    ranges = tuple(tuple(needed_cells_along(outputs, window, axis)) for axis in range(len(extent)))
    return OverlappingPartition(extent, outputs.parts, outputs.num_copies_of_vector, ranges)


def needed_image_cells(
    outputs: Partition, window: Window, extent: tuple[int, ...], owners: Partition | None = None
) -> OverlappingPartition:
    """Return the cells of an image that each part of `outputs` depends on; the nearest cell if there are none.

    Parameters
    ----------
    outputs : Partition
        Outputs of each part, which may overlap.
    window : Window
        Window without the padding mode 'wrap'.
    owners : Partition, optional
        Partition of the image; the result for each part then includes the part's own cells.
    """
    ranges = []
    for axis, (n, views) in enumerate(zip(extent, view_cells(outputs, window, extent).ranges, strict=True)):
        axis_ranges = []
        for part, view in enumerate(views):
            lo, hi = sources_within(*view, n, window.modes[axis])
            nearest = min(max(lo, 0), n - 1)
            axis_ranges.append(
                hull_of_ranges((lo, hi), (nearest, nearest + 1) if owners is None else owners.range(axis, part))
            )
        ranges.append(tuple(axis_ranges))
    return OverlappingPartition(extent, outputs.parts, outputs.num_copies_of_vector, tuple(ranges))


def hull_of_ranges(a: Range, b: Range) -> Range:
    """Return the hull of two ranges; empty ranges are ignored."""
    if a[0] >= a[1]:
        return b
    return a if b[0] >= b[1] else (min(a[0], b[0]), max(a[1], b[1]))
