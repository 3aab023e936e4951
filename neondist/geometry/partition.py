"""Balanced partitions of cells into tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple, TypeAlias

from .box import Box
from .lattice import Range

Place: TypeAlias = "Sequence[int] | Mapping[int, Range]"
"""Coordinates of a rank in a mesh, or the range of each symbol of a block."""


def part_range(extent: int, parts: int, part: int) -> Range:
    """Return the half-open range of a part of `extent` cells; the first `extent % parts` parts have one more cell."""
    min_size, remainder = divmod(extent, parts)
    lo = part * min_size + min(part, remainder)
    return lo, lo + min_size + (part < remainder)


def coords_of(parts: Sequence[int], index: int) -> tuple[int, ...]:
    """Return the position of a row-major index in a grid of parts[a] places on every axis a."""
    coords = []
    for count in reversed(parts):
        index, coord = divmod(index, count)
        coords.append(coord)
    return tuple(reversed(coords))


def index_of(parts: Sequence[int], coords: Sequence[int]) -> int:
    """Return the row-major index of a position in a grid of parts[a] places on every axis a."""
    index = 0
    for count, at in zip(parts, coords, strict=True):
        index = index * count + at
    return index


class Atom(NamedTuple):
    """A range of cells, whole on every rank or partitioned: part p of `axis` has cells [bounds[p], bounds[p + 1]).

    If the range is computed in blocks, `origin` is the symbol of a block's range, and the number of cells per index.
    """

    extent: int
    axis: int | None = None
    bounds: tuple[int, ...] | None = None  # None: whole
    origin: tuple[int, int] | None = None

    @staticmethod
    @lru_cache(maxsize=1024)
    def even(extent: int, axis: int, parts: int) -> Atom:
        """Return a range of cells split evenly: the first `extent % parts` parts have one more cell."""
        return Atom(extent, axis, (*(part_range(extent, parts, part)[0] for part in range(parts)), extent))

    @property
    def ranges(self) -> tuple[Range, ...]:
        """Half-open range of each part; a single range of all cells if the atom is whole."""
        return ((0, self.extent),) if self.bounds is None else tuple(pairwise(self.bounds))

    def range(self, place: Place) -> Range:
        """Return the half-open range of the rank, or block, at a place."""
        if self.axis is None or self.bounds is None:
            return 0, self.extent
        if isinstance(place, Mapping):
            assert self.origin is not None
            symbol, factor = self.origin
            lo, hi = place.get(symbol, (0, 0))
            return lo * factor, hi * factor
        return self.bounds[place[self.axis]], self.bounds[place[self.axis] + 1]

    def scaled(self, factor: int) -> Atom:
        """Return the atom with every cell replaced by `factor` consecutive cells."""
        bounds = None if self.bounds is None else tuple(b * factor for b in self.bounds)
        origin = None if self.origin is None else (self.origin[0], self.origin[1] * factor)
        return Atom(self.extent * factor, self.axis, bounds, origin)


@dataclass(frozen=True)
class Partition:
    """Partition of an image of `extent` cells into parts[a] ranges on every axis a; tiles are numbered row-major.

    Without axes (a replicated vector) there are `num_copies_of_vector` tiles, each the box without axes.
    """

    extent: tuple[int, ...]
    parts: tuple[int, ...]
    num_copies_of_vector: int = 1

    #: whether tiles may share cells, as in `OverlappingPartition`
    may_overlap = False

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return prod(self.parts) if self.extent else self.num_copies_of_vector

    def coords(self, tile: int) -> tuple[int, ...]:
        """Return the tile's position in the grid of tiles."""
        return coords_of(self.parts if self.extent else (), tile)

    def box(self, tile: int) -> Box:
        """Return the tile's cells."""
        return Box.from_ranges(self.range(axis, part) for axis, part in enumerate(self.coords(tile)))

    def range(self, axis: int, part: int) -> Range:
        """Return the half-open range of one part of an axis."""
        return part_range(self.extent[axis], self.parts[axis], part)

    def ranges_along(self, axis: int) -> list[Range]:
        """Return the half-open range of every part of an axis."""
        return [self.range(axis, part) for part in range(self.parts[axis])]

    def atom(self, axis: int) -> Atom:
        """Return the partition of one axis, if tiles do not overlap."""
        return Atom.even(self.extent[axis], axis, self.parts[axis])

    @property
    def max_tile_size(self) -> int:
        """Number of cells of the largest tile."""
        return prod(max(max(0, hi - lo) for lo, hi in self.ranges_along(axis)) for axis in range(len(self.extent)))

    def boxes(self) -> list[Box]:
        """Return the cells of all tiles."""
        return [self.box(tile) for tile in range(self.tiles)]


def factorisations(n: int, axes: int) -> list[tuple[int, ...]]:
    """Return all ordered factorisations of n into `axes` factors."""
    if axes == 1:
        return [(n,)]
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    return [(d, *rest) for d in divisors for rest in factorisations(n // d, axes - 1)]
