"""Tiles that overlap: what a segment of layers computes twice at the borders, so that only its input has to travel."""

from __future__ import annotations

from dataclasses import dataclass

from .box import Box
from .plan import sources_within
from .split import Partition, split
from .window import Window

Range = tuple[int, int]


@dataclass(frozen=True)
class Overlapping(Partition):
    """An image cut into ranges that may overlap: ranges[a][p] are the cells of part p on axis a."""

    ranges: tuple[tuple[Range, ...], ...] = ()

    overlaps = True

    @classmethod
    def one(cls, extent: tuple[int, ...], box: Box) -> Overlapping:
        """Return the one tile of an image that is wanted."""
        return cls(extent, (1,) * len(extent), 1, tuple((cells,) for cells in box.axes()))

    def range(self, axis: int, part: int) -> Range:
        """Return the cells of one part of an axis."""
        return self.ranges[axis][part]


def sources(outputs: Partition, window: Window, inputs: Partition) -> Overlapping:
    """Return the cells of the input from which each part can compute its part of `outputs`, and its own cells.

    Parameters
    ----------
    outputs : Partition
        May overlap.
    window : Window
        Not of mode 'wrap'.
    inputs : Partition
        Who owns the cells of the input.
    """
    ranges = []
    for axis, (n, parts) in enumerate(zip(inputs.extent, inputs.parts, strict=True)):
        alone = window.along(axis)
        needed = (_needed(alone, outputs.range(axis, part), n) for part in range(parts))
        ranges.append(tuple(_hull(a, split(n, parts, part)) for part, a in enumerate(needed)))
    return Overlapping(inputs.extent, inputs.parts, inputs.copies, tuple(ranges))


def needed_of(window: Window, outputs: Box, extent: tuple[int, ...]) -> Box:
    """Return the cells of an image from which a window computes some outputs; the nearest one where it needs none."""
    found = []
    for axis, (n, out) in enumerate(zip(extent, outputs.axes(), strict=True)):
        lo, hi = _needed(window.along(axis), out, n)
        at = min(max(lo, 0), n - 1)
        found.append((lo, hi) if lo < hi else (at, at + 1))
    return Box(tuple(lo for lo, _ in found), tuple(hi for _, hi in found))


def _needed(alone: Window, out: Range, n: int) -> Range:
    lo, hi = next(alone.needs(Box(out[:1], out[1:])).axes())
    return sources_within(lo, hi, n, alone.mode)


def _hull(a: Range, b: Range) -> Range:
    """Return the range around both; an empty one counts for nothing."""
    if a[0] >= a[1]:
        return b
    return a if b[0] >= b[1] else (min(a[0], b[0]), max(a[1], b[1]))
