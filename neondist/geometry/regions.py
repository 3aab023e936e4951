"""Tiles that overlap: what a segment of layers computes twice at the borders, so that only its input has to travel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .box import Box
from .plan import needs_along, sources_within
from .split import Partition
from .window import Window

Range = tuple[int, int]


@dataclass(frozen=True)
class Overlapping(Partition):
    """An image cut into ranges that may overlap: ranges[a][p] are the cells of part p on axis a."""

    ranges: tuple[tuple[Range, ...], ...] = ()

    overlaps = True

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.extent, self.ranges))  # there may be thousands

    @classmethod
    def one(cls, extent: tuple[int, ...], box: Box) -> Overlapping:
        """Return the one tile of an image that is wanted."""
        return cls(extent, (1,) * len(extent), 1, tuple((cells,) for cells in box.axes()))

    def range(self, axis: int, part: int) -> Range:
        """Return the cells of one part of an axis."""
        return self.ranges[axis][part]


def hulls(one: Partition, other: Partition) -> Overlapping:
    """Return the ranges around both of each part."""
    ranges = tuple(
        tuple(_hull(one.range(axis, part), other.range(axis, part)) for part in range(parts))
        for axis, parts in enumerate(one.parts)
    )
    return Overlapping(one.extent, one.parts, one.copies, ranges)


def looked_at(outputs: Partition, window: Window, extent: tuple[int, ...]) -> Overlapping:
    """Return the cells of an image that the windows of each part's outputs see, those outside of it too."""
    ranges = tuple(tuple(needs_along(outputs, window, axis)) for axis in range(len(extent)))
    return Overlapping(extent, outputs.parts, outputs.copies, ranges)


def sources(
    outputs: Partition, window: Window, extent: tuple[int, ...], owners: Partition | None = None
) -> Overlapping:
    """Return the cells of an image from which each part can compute its part of `outputs`; the nearest, if it is none.

    Parameters
    ----------
    outputs : Partition
        May overlap.
    window : Window
        Not of mode 'wrap'.
    owners : Partition, optional
        Who owns the cells of the image; each part has its own, too.
    """
    ranges = []
    for axis, (n, views) in enumerate(zip(extent, looked_at(outputs, window, extent).ranges, strict=True)):
        found = []
        for part, view in enumerate(views):
            lo, hi = sources_within(*view, n, window.modes[axis])
            nearest = min(max(lo, 0), n - 1)
            found.append(_hull((lo, hi), (nearest, nearest + 1) if owners is None else owners.range(axis, part)))
        ranges.append(tuple(found))
    return Overlapping(extent, outputs.parts, outputs.copies, tuple(ranges))


def _hull(a: Range, b: Range) -> Range:
    """Return the range around both; an empty one counts for nothing."""
    if a[0] >= a[1]:
        return b
    return a if b[0] >= b[1] else (min(a[0], b[0]), max(a[1], b[1]))
