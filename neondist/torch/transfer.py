"""Messages for partitioned tensors: the indices sent to each rank for the view it needs; pure integers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from ..geometry import Cells, clip_ranges, shift_range
from .layout import Atom, Mesh, Shape

Range = tuple[int, int]


def clipped(lo: int, hi: int, n: int) -> tuple[Range, Range]:
    """Return what of [lo, hi) is in [0, n), and how many indices there are before and after it."""
    a, b = max(lo, 0), min(hi, n)
    return ((a, b), (a - lo, hi - b)) if a < b else ((0, 0), (0, hi - lo))


Wanted = dict[int, tuple[int, list[Range]]]
"""For a dimension that an axis of the mesh cuts: the axis, and the range that each of its parts needs."""


def at_place(wanted: Wanted, place: Sequence[int]) -> dict[int, Range]:
    """Return what the rank at a place needs along each of the dimensions."""
    return {dim: ranges[place[axis]] for dim, (axis, ranges) in wanted.items()}


def hull(indices: Collection[int]) -> Range:
    """Return the range from the first to the last of some indices."""
    return (min(indices), max(indices) + 1) if indices else (0, 0)


class Want(NamedTuple):
    """View along one dimension: the ranges needed by the parts of `axis`, in order.

    Attributes
    ----------
    dim : int
    source : Atom
        How the dimension is cut.
    axis : int or None
        None: all ranks want the same, `ranges[0]`.
    ranges : for each part, its ranges [lo, hi)
        Inside of the tensor; the same index may be wanted more than once.
    used : for each part, the indices in its one range that results are computed from; None: all
        Others are not sent; they have a place in the view, and any value.
    """

    dim: int
    source: Atom
    axis: int | None
    ranges: tuple[tuple[Range, ...], ...]
    used: tuple[Cells, ...] | None = None

    def of(self, place: Sequence[int]) -> tuple[Range, ...]:
        """Return what the rank at a place wants."""
        return self.ranges[self._part(place)]

    def extent(self, place: Sequence[int]) -> int:
        """Return how many indices that is."""
        return sum(hi - lo for lo, hi in self.of(place))

    @property
    def own(self) -> bool:
        """Whether every rank wants what it has, and no more."""
        return self.axis == self.source.axis and all(
            ranges == ((lo, hi),) or (lo == hi and not sum(b - a for a, b in ranges))
            for ranges, (lo, hi) in zip(self.ranges, self.source.ranges, strict=True)
        )

    def pieces(self, place: Sequence[int], include_unused: bool = False) -> Iterator[tuple[int, range, range]]:
        """Yield (owner's part, indices in its tensor, indices in the view) of what the rank at a place wants.

        Parameters
        ----------
        include_unused : bool
            Whether to include indices that the rank does not use.
        """
        at, bounds = 0, self.source.bounds or (0, self.source.extent)
        for lo, hi in self.of(place):
            for part in range(bisect_right(bounds, lo) - 1, bisect_left(bounds, hi)) if lo < hi else ():
                first, last = bounds[part : part + 2]
                used = [range(lo, hi)] if include_unused or self.used is None else self.used[self._part(place)]
                for cells in clip_ranges(used, max(lo, first), min(hi, last)):
                    yield part, shift_range(cells, -first), shift_range(cells, at - lo)
            at += hi - lo

    def used_at(self, place: Sequence[int]) -> Cells:
        """Return the indices that the rank at a place uses."""
        if self.used is not None:
            return self.used[self._part(place)]
        return tuple(range(lo, hi) for lo, hi in self.of(place))

    def owns(self, place: Sequence[int], part: int) -> bool:
        """Return whether the rank at a place has a part of the dimension."""
        return self.source.axis is None or part == place[self.source.axis]

    def _part(self, place: Sequence[int]) -> int:
        return 0 if self.axis is None else place[self.axis]

    @property
    def axes(self) -> frozenset[int]:
        """The axes that it depends on: that which cuts the dimension, and that whose parts want."""
        return frozenset({self.axis, self.source.axis} - {None})  # type: ignore[arg-type]

    def counts(self, parts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return how many indices each of `parts` shows to all of them, sees of all, and sees of its own.

        That is of the parts of the only axis that it depends on; nothing here takes their number squared.
        """
        if self.used is not None:
            return self._counts_of_used(parts)
        ranges = self.ranges if self.axis is not None else self.ranges * parts
        seen = np.array([sum(hi - lo for lo, hi in one) for one in ranges])
        if self.source.bounds is None:
            return seen, seen, seen
        bounds = np.array(self.source.bounds)
        ends = np.array([end for one in ranges for end in one], int).reshape(-1, 2)
        shown = np.diff(_above(ends[:, 0], bounds) - _above(ends[:, 1], bounds))
        own = [
            sum(max(0, min(hi, last) - max(lo, first)) for lo, hi in one)
            for one, (first, last) in zip(ranges, self.source.ranges, strict=True)
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
    """Return for each bound by how much it is above the points, summed over those that are below it."""
    points = np.sort(points)
    below = np.searchsorted(points, bounds)
    found: np.ndarray = below * bounds - np.concatenate([[0], np.cumsum(points)])[below]
    return found


class Piece(NamedTuple):
    """Indices that one rank has and another (or the same) wants, along the dimensions of `wants`, in their order."""

    peer: int
    source: tuple[range, ...]
    target: tuple[range, ...]

    @property
    def cells(self) -> int:
        """The number of indices, those of other dimensions not counted."""
        return prod(map(len, self.source))


def _piece(peer: int, pieces: Sequence[tuple[int, range, range]]) -> Piece:
    return Piece(peer, tuple(source for _, source, _ in pieces), tuple(target for *_, target in pieces))


@dataclass(frozen=True)
class Transfer:
    """Views of a tensor needed by all ranks of a mesh; of several ranks with the same data, the nearest one sends.

    Attributes
    ----------
    mesh : Mesh
    wants : tuple of Want
        One for each dimension along which ranks want anything but what they have.
    """

    mesh: Mesh
    wants: tuple[Want, ...]

    def receives(self, rank: int) -> list[Piece]:
        """Return the pieces that a rank wants, by owner; of its own, indices that it does not use are included."""
        place = self.mesh.place(rank)
        found = []
        for pieces in product(*(list(want.pieces(place)) for want in self.wants)):
            owner = list(place)
            for want, (part, _, _) in zip(self.wants, pieces, strict=True):
                if want.source.axis is not None:
                    owner[want.source.axis] = part
            if tuple(owner) != tuple(place) or not self.has_unused:
                found.append(_piece(self.mesh.rank(owner), pieces))
        if self.has_unused:
            own = (
                [p for p in want.pieces(place, include_unused=True) if want.owns(place, p[0])] for want in self.wants
            )
            found += [_piece(rank, pieces) for pieces in product(*own)]
        return found

    @property
    def has_unused(self) -> bool:
        """Whether views may have indices that are not used, and not sent."""
        return any(want.used is not None for want in self.wants)

    def sends(self, rank: int) -> list[Piece]:
        """Return what others want of a rank."""
        if not self.separable:
            return self._sends.get(rank, [])
        place, found = self.mesh.place(rank), []
        for pieces in product(*(shown.get(self._part(want, place), []) for want, shown in self._shown)):
            needer = list(place)
            for (want, _), (part, _, _) in zip(self._shown, pieces, strict=True):
                if want.source.axis is not None:
                    needer[want.source.axis] = part
            if tuple(needer) != place:
                found.append(_piece(self.mesh.rank(needer), pieces))
        return sorted(found, key=lambda piece: piece.peer)

    @cached_property
    def separable(self) -> bool:
        """Whether each dimension depends on one axis at most, and no two on the same: what travels is a product."""
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
            (axis,) = want.axes or {0}  # what depends on none is alike along any
            counts = want.counts(self.mesh.parts[axis] if want.axes else 1)
            shape = [-1 if at == axis else 1 for at in range(len(self.mesh.parts))]
            for found, count in zip((shown, seen, own), counts, strict=True):
                found *= count.reshape(shape)
        return (shown - own).reshape(-1), (seen - own).reshape(-1)

    def _part(self, want: Want, place: Sequence[int]) -> int:
        return place[next(iter(want.axes))] if want.axes else 0

    @cached_property
    def _shown(self) -> list[tuple[Want, dict[int, list[tuple[int, range, range]]]]]:
        """For each want, what each part shows to which others."""
        found = []
        for want in self.wants:
            shown: dict[int, list[tuple[int, range, range]]] = {}
            place = [0] * len(self.mesh.parts)
            for part in range(self.mesh.parts[next(iter(want.axes))]) if want.axes else (0,):
                for axis in want.axes:
                    place[axis] = part
                for owner, source, target in want.pieces(place):
                    # where the dimension is not cut, each has all of it itself
                    shown.setdefault(owner if want.source.axis is not None else part, []).append((part, source, target))
            found.append((want, shown))
        return found

    @cached_property
    def _sends(self) -> dict[int, list[Piece]]:
        """The same for all ranks, where it takes a look at what each of them wants."""
        found: dict[int, list[Piece]] = {}
        for needer in range(self.mesh.size):
            for piece in self.receives(needer):
                if piece.peer != needer:
                    found.setdefault(piece.peer, []).append(piece._replace(peer=needer))
        return found

    def shape(self, local: Shape, rank: int) -> Shape:
        """Return the shape of a rank's view, given that of its part of the tensor."""
        place, found = self.mesh.place(rank), list(local)
        for want in self.wants:
            found[want.dim] = want.extent(place)
        return tuple(found)
