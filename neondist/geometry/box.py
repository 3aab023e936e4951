"""A half-open n-dimensional box of integer cells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Box:
    """Cells lo[a] <= i[a] < hi[a] on every axis a; a box with hi <= lo on any axis is empty."""

    lo: tuple[int, ...]
    hi: tuple[int, ...]

    @classmethod
    def of(cls, extent: Sequence[int]) -> Box:
        """Return the box of a whole array of the given extent."""
        return cls((0,) * len(extent), tuple(extent))

    @classmethod
    def from_ranges(cls, ranges: Iterable[tuple[int, int]]) -> Box:
        """Return the box with the given range [lo, hi) along every axis."""
        axis_ranges = tuple(ranges)
        return cls(tuple(lo for lo, _ in axis_ranges), tuple(hi for _, hi in axis_ranges))

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.lo)

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent along every axis, never negative."""
        return tuple(max(0, h - lo) for lo, h in zip(self.lo, self.hi, strict=True))

    @property
    def size(self) -> int:
        """Number of cells."""
        return prod(self.shape)

    @property
    def empty(self) -> bool:
        """Whether the box contains no cells."""
        return self.size == 0

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into an array that starts at cell 0."""
        return tuple(slice(lo, lo + n) for lo, n in zip(self.lo, self.shape, strict=True))

    def intersect(self, other: Box) -> Box:
        """Return the intersection of two boxes."""
        lo = tuple(max(a, b) for a, b in zip(self.lo, other.lo, strict=True))
        hi = tuple(min(a, b) for a, b in zip(self.hi, other.hi, strict=True))
        return Box(lo, hi)

    def hull(self, other: Box) -> Box:
        """Return the smallest box that contains both boxes, including the corners of empty boxes."""
        lo = tuple(min(a, b) for a, b in zip(self.lo, other.lo, strict=True))
        hi = tuple(max(a, b) for a, b in zip(self.hi, other.hi, strict=True))
        return Box(lo, hi)

    def shift(self, offset: Sequence[int]) -> Box:
        """Return the box moved by `offset`."""
        lo = tuple(a + o for a, o in zip(self.lo, offset, strict=True))
        hi = tuple(a + o for a, o in zip(self.hi, offset, strict=True))
        return Box(lo, hi)

    def relative_to(self, origin: Box) -> Box:
        """Return the box in the coordinates of an array whose first cell is origin.lo."""
        return self.shift([-o for o in origin.lo])

    def difference(self, other: Box) -> list[Box]:
        """Return disjoint boxes that cover the cells not in `other`."""
        boxes, lo, hi = [], self.lo, self.hi
        for axis, (first, end) in enumerate(other.axes()):
            below_hi = (*hi[:axis], min(first, hi[axis]), *hi[axis + 1 :])
            above_lo = (*lo[:axis], max(end, lo[axis]), *lo[axis + 1 :])
            boxes += [Box(lo, below_hi), Box(above_lo, hi)]
            lo = (*lo[:axis], max(first, lo[axis]), *lo[axis + 1 :])
            hi = (*hi[:axis], min(end, hi[axis]), *hi[axis + 1 :])
        return [box for box in boxes if not box.empty]

    def axes(self) -> Iterator[tuple[int, int]]:
        """Yield (lo, hi) of every axis."""
        return zip(self.lo, self.hi, strict=True)
