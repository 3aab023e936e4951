"""Which indices of a cut tensor travel to whom, for what each rank wants to see of it; pure integers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import NamedTuple

from .layout import Atom, Mesh, Shape

Range = tuple[int, int]


def clipped(lo: int, hi: int, n: int) -> tuple[Range, Range]:
    """Return what of [lo, hi) is in [0, n), and how many indices there are before and after it."""
    a, b = max(lo, 0), min(hi, n)
    return ((a, b), (a - lo, hi - b)) if a < b else ((0, 0), (0, hi - lo))


def hull(indices: Collection[int]) -> Range:
    """Return the range from the first to the last of some indices."""
    return (min(indices), max(indices) + 1) if indices else (0, 0)


class Want(NamedTuple):
    """What ranks want to see along one dimension: the parts of `axis` want these ranges, one after the other.

    Attributes
    ----------
    dim : int
    source : Atom
        How the dimension is cut.
    axis : int or None
        None: all ranks want the same, `ranges[0]`.
    ranges : for each part, its ranges [lo, hi)
        Inside of the tensor; the same index may be wanted more than once.
    """

    dim: int
    source: Atom
    axis: int | None
    ranges: tuple[tuple[Range, ...], ...]

    def of(self, place: Sequence[int]) -> tuple[Range, ...]:
        """Return what the rank at a place wants."""
        return self.ranges[0 if self.axis is None else place[self.axis]]

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

    def pieces(self, place: Sequence[int]) -> Iterator[tuple[int, Range, Range]]:
        """Yield (owner's part, range in the owner's tensor, range in the view) of what the rank at a place wants."""
        at = 0
        for lo, hi in self.of(place):
            for part, (first, last) in enumerate(self.source.ranges):
                a, b = max(lo, first), min(hi, last)
                if a < b:
                    yield part, (a - first, b - first), (at + a - lo, at + b - lo)
            at += hi - lo


class Piece(NamedTuple):
    """Indices that one rank has and another (or the same) wants, along the dimensions of `wants`, in their order."""

    peer: int
    source: tuple[Range, ...]
    target: tuple[Range, ...]

    @property
    def cells(self) -> int:
        """The number of indices, those of other dimensions not counted."""
        return prod(hi - lo for lo, hi in self.source)


@dataclass(frozen=True)
class Transfer:
    """What all ranks of a mesh want to see of a tensor; a rank that has the same as others takes the nearest.

    Attributes
    ----------
    mesh : Mesh
    wants : tuple of Want
        One for each dimension along which ranks want anything but what they have.
    """

    mesh: Mesh
    wants: tuple[Want, ...]

    def receives(self, rank: int) -> list[Piece]:
        """Return what a rank wants, by who has it; its own included."""
        place = self.mesh.place(rank)
        found = []
        for pieces in product(*(list(want.pieces(place)) for want in self.wants)):
            owner = list(place)
            for want, (part, _, _) in zip(self.wants, pieces, strict=True):
                if want.source.axis is not None:
                    owner[want.source.axis] = part
            source, target = tuple(p[1] for p in pieces), tuple(p[2] for p in pieces)
            found.append(Piece(self.mesh.rank(owner), source, target))
        return found

    def sends(self, rank: int) -> list[Piece]:
        """Return what others want of a rank."""
        return self._sends.get(rank, [])

    @cached_property
    def _sends(self) -> dict[int, list[Piece]]:
        found: dict[int, list[Piece]] = {}
        for needer in range(self.mesh.size):
            for piece in self.receives(needer):
                if piece.peer != needer:
                    found.setdefault(piece.peer, []).append(piece._replace(peer=needer))
        return found

    @property
    def silent(self) -> bool:
        """Whether no rank needs anything of another."""
        return not self._sends

    def shape(self, local: Shape, rank: int) -> Shape:
        """Return the shape of a rank's view, given that of its part of the tensor."""
        place, found = self.mesh.place(rank), list(local)
        for want in self.wants:
            found[want.dim] = want.extent(place)
        return tuple(found)
