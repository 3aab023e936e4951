"""Balanced partitions of cells into tiles."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from .box import Box


def part_range(n: int, parts: int, i: int) -> tuple[int, int]:
    """Return the half-open range of part i of n cells in `parts` parts; the first n % parts have one cell more."""
    base, extra = divmod(n, parts)
    lo = i * base + min(i, extra)
    return lo, lo + base + (i < extra)


def part_of(n: int, parts: int, cell: int) -> int:
    """Return the part that holds a cell of [0, n)."""
    base, extra = divmod(n, parts)
    larger = extra * (base + 1)
    return cell // (base + 1) if cell < larger else extra + (cell - larger) // base


@dataclass(frozen=True)
class Partition:
    """Partition of an image of `extent` cells into parts[a] ranges on every axis a; tiles are numbered row-major.

    Without axes (a replicated vector) there are `copies` tiles, each of the one empty box.
    """

    extent: tuple[int, ...]
    parts: tuple[int, ...]
    copies: int = 1

    #: whether tiles may share cells, as those of `Overlapping`
    overlaps = False

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return prod(self.parts) if self.extent else self.copies

    def coords(self, tile: int) -> tuple[int, ...]:
        """Return the tile's position in the grid of tiles."""
        place = []
        for parts in reversed(self.parts if self.extent else ()):
            tile, at = divmod(tile, parts)
            place.append(at)
        return tuple(reversed(place))

    def box(self, tile: int) -> Box:
        """Return the tile's cells."""
        ranges = [self.range(axis, part) for axis, part in enumerate(self.coords(tile))]
        return Box(tuple(lo for lo, _ in ranges), tuple(hi for _, hi in ranges))

    def range(self, axis: int, part: int) -> tuple[int, int]:
        """Return the half-open range of one part of an axis."""
        return part_range(self.extent[axis], self.parts[axis], part)

    @property
    def largest(self) -> int:
        """Number of cells of the largest tile."""
        ranges = ([self.range(axis, part) for part in range(parts)] for axis, parts in enumerate(self.parts))
        return prod(max(max(0, hi - lo) for lo, hi in axis) for axis in ranges) if self.extent else 1

    def boxes(self) -> list[Box]:
        """Return the cells of all tiles."""
        return [self.box(tile) for tile in range(self.tiles)]

    def owners(self, axis: int, lo: int, hi: int) -> list[tuple[int, int, int]]:
        """Return (part, lo, hi) of every part of the axis that intersects [lo, hi)."""
        n, parts = self.extent[axis], self.parts[axis]
        lo, hi = max(lo, 0), min(hi, n)
        if lo >= hi:
            return []
        holders = range(part_of(n, parts, lo), part_of(n, parts, hi - 1) + 1)
        ranges = ((part, *part_range(n, parts, part)) for part in holders)
        return [(part, max(a, lo), min(b, hi)) for part, a, b in ranges]


def factorisations(n: int, axes: int) -> list[tuple[int, ...]]:
    """Return all ordered factorisations of n into `axes` factors."""
    if axes == 1:
        return [(n,)]
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    return [(d, *rest) for d in divisors for rest in factorisations(n // d, axes - 1)]
