"""Messages for partitioned tensors: the indices sent to each rank for the view that it needs; pure integers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from ...geometry import Cells, clip_ranges, shift_range
from .layout import Atom, Mesh, Shape

Range = tuple[int, int]


def clipped(lo: int, hi: int, n: int) -> tuple[Range, Range]:
    """Return the intersection of [lo, hi) with [0, n), and the numbers of indices before and after it."""
    a, b = max(lo, 0), min(hi, n)
    return ((a, b), (a - lo, hi - b)) if a < b else ((0, 0), (0, hi - lo))


Wanted = dict[int, tuple[int, list[Range]]]
"""For each partitioned dimension: the axis of the mesh, and the range that each of its parts needs."""


def at_place(wanted: Wanted, place: Sequence[int]) -> dict[int, Range]:
    """Return the range that the rank at a place needs along each of the dimensions."""
    return {dim: ranges[place[axis]] for dim, (axis, ranges) in wanted.items()}


class Want(NamedTuple):
    """View along one dimension: the ranges needed by the parts of `axis`, in order.

    Attributes
    ----------
    dim : int
    source : Atom
        Partition of the dimension.
    axis : int or None
        None: all ranks need the same, `ranges[0]`.
    ranges : for each part, its ranges [lo, hi)
        Inside of the tensor; the same index may occur more than once.
    used : for each part, the indices in its one range that results are computed from; None: all
        Others are not sent; they have a place in the view, with undefined values.
    """

    dim: int
    source: Atom
    axis: int | None
    ranges: tuple[tuple[Range, ...], ...]
    used: tuple[Cells, ...] | None = None

    def of(self, place: Sequence[int]) -> tuple[Range, ...]:
        """Return the ranges of the rank at a place."""
        return self.ranges[self.part(place)]

    def extent(self, place: Sequence[int]) -> int:
        """Return their total number of indices."""
        return sum(hi - lo for lo, hi in self.of(place))

    @property
    def own(self) -> bool:
        """Whether every rank needs exactly its own indices."""
        return self.axis == self.source.axis and all(
            ranges == ((lo, hi),) or (lo == hi and not sum(b - a for a, b in ranges))
            for ranges, (lo, hi) in zip(self.ranges, self.source.ranges, strict=True)
        )

    def pieces(self, place: Sequence[int], include_unused: bool = False) -> Iterator[tuple[int, range, range]]:
        """Yield (owner's part, indices in its tensor, indices in the view) for the rank at a place.

        Parameters
        ----------
        include_unused : bool
            Whether to include indices that the rank does not use.
        """
        at, bounds = 0, self.source.bounds or (0, self.source.extent)
        for lo, hi in self.of(place):
            for part in range(bisect_right(bounds, lo) - 1, bisect_left(bounds, hi)) if lo < hi else ():
                first, last = bounds[part : part + 2]
                used = [range(lo, hi)] if include_unused or self.used is None else self.used[self.part(place)]
                for cells in clip_ranges(used, max(lo, first), min(hi, last)):
                    yield part, shift_range(cells, -first), shift_range(cells, at - lo)
            at += hi - lo

    def used_at(self, place: Sequence[int]) -> Cells:
        """Return the indices that the rank at a place uses."""
        if self.used is not None:
            return self.used[self.part(place)]
        return tuple(range(lo, hi) for lo, hi in self.of(place))

    def owns(self, place: Sequence[int], part: int) -> bool:
        """Return whether the rank at a place has a part of the dimension."""
        return self.source.axis is None or part == place[self.source.axis]

    def part(self, place: Sequence[int]) -> int:
        """Return the part of the rank at a place."""
        return 0 if self.axis is None else place[self.axis]

    @property
    def axes(self) -> frozenset[int]:
        """Axes that it depends on: the one that partitions the dimension, and `axis`."""
        return frozenset({self.axis, self.source.axis} - {None})  # type: ignore[arg-type]

    def counts(self, parts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the numbers of indices that each of `parts` sends to all, receives of all, and receives of itself.

        The parts are those of the only axis that it depends on; the cost is not quadratic in their number.
        """
        if self.used is not None:
            return self._counts_of_used(parts)
        ranges = self.ranges if self.axis is not None else self.ranges * parts
        seen = np.array([sum(hi - lo for lo, hi in part_ranges) for part_ranges in ranges])
        if self.source.bounds is None:
            return seen, seen, seen
        bounds = np.array(self.source.bounds)
        ends = np.array([end for part_ranges in ranges for end in part_ranges], int).reshape(-1, 2)
        shown = np.diff(_above(ends[:, 0], bounds) - _above(ends[:, 1], bounds))
        own = [
            sum(max(0, min(hi, last) - max(lo, first)) for lo, hi in part_ranges)
            for part_ranges, (first, last) in zip(ranges, self.source.ranges, strict=True)
        ]
        return shown, seen, np.array(own)

    def _counts_of_used(self, parts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        shown, seen, own = np.zeros((3, parts), int)
        axes, place = self.axes, [0] * (1 + max(self.axes, default=0))
        for part in range(parts):
            for axis in axes:
                place[axis] = part
            for owner, cells, _ in self.pieces(place):
                owner = part if self.source.axis is None else owner
                shown[owner] += len(cells)
                seen[part] += len(cells)
                own[part] += len(cells) * (owner == part)
        return shown, seen, own


def _above(points: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Return for each bound the sum of its distances to the points below it."""
    points = np.sort(points)
    below = np.searchsorted(points, bounds)
    sums: np.ndarray = below * bounds - np.concatenate([[0], np.cumsum(points)])[below]
    return sums


class Piece(NamedTuple):
    """Indices that one rank has and another (or the same) needs, along the dimensions of `wants`, in their order."""

    peer: int
    source: tuple[range, ...]
    target: tuple[range, ...]

    @property
    def cells(self) -> int:
        """Number of indices along these dimensions."""
        return prod(map(len, self.source))


def _piece(peer: int, pieces: Sequence[tuple[int, range, range]]) -> Piece:
    return Piece(peer, tuple(source for _, source, _ in pieces), tuple(target for *_, target in pieces))


@dataclass(frozen=True)
class Transfer:
    """Views of a tensor needed by all ranks of a mesh; among ranks with the same data, the nearest one sends.

    Attributes
    ----------
    mesh : Mesh
    wants : tuple of Want
        One for each dimension along which ranks need other indices than their own.
    """

    mesh: Mesh
    wants: tuple[Want, ...]

    def receives(self, rank: int) -> list[Piece]:
        """Return the pieces that a rank needs, by owner; its own pieces include indices that it does not use."""
        place = self.mesh.place(rank)
        result = []
        for pieces in product(*(list(want.pieces(place)) for want in self.wants)):
            owner = list(place)
            for want, (part, _, _) in zip(self.wants, pieces, strict=True):
                if want.source.axis is not None:
                    owner[want.source.axis] = part
            if tuple(owner) != tuple(place) or not self.has_unused:
                result.append(_piece(self.mesh.rank(owner), pieces))
        if self.has_unused:
            own = (
                [p for p in want.pieces(place, include_unused=True) if want.owns(place, p[0])] for want in self.wants
            )
            result += [_piece(rank, pieces) for pieces in product(*own)]
        return result

    @property
    def has_unused(self) -> bool:
        """Whether views may have unused indices, which are not sent."""
        return any(want.used is not None for want in self.wants)

    def sends(self, rank: int) -> list[Piece]:
        """Return the pieces that other ranks need of a rank."""
        if not self.separable:
            return self._sends.get(rank, [])
        place, result = self.mesh.place(rank), []
        for pieces in product(*(shown.get(self._part(want, place), []) for want, shown in self._shown)):
            needer = list(place)
            for (want, _), (part, _, _) in zip(self._shown, pieces, strict=True):
                if want.source.axis is not None:
                    needer[want.source.axis] = part
            if tuple(needer) != place:
                result.append(_piece(self.mesh.rank(needer), pieces))
        return sorted(result, key=lambda piece: piece.peer)

    @cached_property
    def separable(self) -> bool:
        """Whether each dimension depends on at most one axis, and no two on the same: pieces are products."""
        axes = [axis for want in self.wants for axis in want.axes]
        return all(len(want.axes) < 2 for want in self.wants) and len(axes) == len(set(axes))

    @property
    def silent(self) -> bool:
        """Whether no rank needs anything of another."""
        return not (self.cells[0].any() if self.separable else self._sends)

    @cached_property
    def cells(self) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of indices that each rank of the mesh sends to and receives from others, as (size,); if separable."""
        shown, seen, own = (np.ones(self.mesh.parts, int) for _ in range(3))
        for want in self.wants:
            (axis,) = want.axes or {0}  # without a dependence, any axis will do
            counts = want.counts(self.mesh.parts[axis] if want.axes else 1)
            shape = [-1 if at == axis else 1 for at in range(len(self.mesh.parts))]
            for total, count in zip((shown, seen, own), counts, strict=True):
                total *= count.reshape(shape)
        return (shown - own).reshape(-1), (seen - own).reshape(-1)

    def _part(self, want: Want, place: Sequence[int]) -> int:
        return place[next(iter(want.axes))] if want.axes else 0

    @cached_property
    def _shown(self) -> list[tuple[Want, dict[int, list[tuple[int, range, range]]]]]:
        """For each want, the pieces that each part sends to the others."""
        result = []
        for want in self.wants:
            shown: dict[int, list[tuple[int, range, range]]] = {}
            place = [0] * len(self.mesh.parts)
            for part in range(self.mesh.parts[next(iter(want.axes))]) if want.axes else (0,):
                for axis in want.axes:
                    place[axis] = part
                for owner, source, target in want.pieces(place):
                    # an unpartitioned dimension is available on every rank
                    shown.setdefault(owner if want.source.axis is not None else part, []).append((part, source, target))
            result.append((want, shown))
        return result

    @cached_property
    def _sends(self) -> dict[int, list[Piece]]:
        """Pieces sent by each rank, collected from the needs of all ranks."""
        result: dict[int, list[Piece]] = {}
        for needer in range(self.mesh.size):
            for piece in self.receives(needer):
                if piece.peer != needer:
                    result.setdefault(piece.peer, []).append(piece._replace(peer=needer))
        return result

    def shape(self, local: Shape, rank: int) -> Shape:
        """Return the shape of a rank's view from that of its part of the tensor."""
        place, shape = self.mesh.place(rank), list(local)
        for want in self.wants:
            shape[want.dim] = want.extent(place)
        return tuple(shape)
