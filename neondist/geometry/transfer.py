"""Transfers: the cells that each rank needs from each owner, as products of overlaps along single dimensions.

Halo plans of layers and views of PyTorch modules are both built from transfers. Ranks are numbered row-major in a mesh.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod
from typing import NamedTuple

from .lattice import AxisCells, Lattice, Range, clip_ranges, shift_range
from .partition import Atom, coords_of, index_of


class AxisOverlap(NamedTuple):
    """Cells along one dimension that one part has and another part (or the same part) needs.

    Attributes
    ----------
    part : int
        The part at the other end.
    cells : range
    offset : int
        Position of a cell in the view of the part that needs it, minus its position in the tensor.
    """

    part: int
    cells: range
    offset: int


@dataclass(frozen=True)
class DimRequest:
    """Cells of one dimension that the parts of a mesh axis need.

    Attributes
    ----------
    dim : int
    source : Atom
        Partition of the dimension.
    axis : int or None
        Mesh axis whose parts need these cells; None: all ranks need the same cells, `ranges[0]`.
    ranges : tuple of tuple of Range
        For each part, ranges within the tensor, consecutive in the part's view. The same cell may occur more than once.
    used : tuple of AxisCells, optional
        For each part, the positions in its view that results depend on; None: all. Other cells are not sent; their
        places in the view have undefined values.
    starts : tuple of int, optional
        For each part, the first position in its view; None: 0.
    """

    dim: int
    source: Atom
    axis: int | None
    ranges: tuple[tuple[Range, ...], ...]
    used: tuple[AxisCells, ...] | None = None
    starts: tuple[int, ...] | None = None

    def part(self, place: Sequence[int]) -> int:
        """Return the part of the rank at a place, as an index into `ranges`."""
        return 0 if self.axis is None else place[self.axis]

    def extent(self, part: int) -> int:
        """Return the number of cells in the view of a part."""
        return sum(hi - lo for lo, hi in self.ranges[part])

    @property
    def requests_only_own_cells(self) -> bool:
        """Whether every rank needs exactly its own cells."""
        return self.axis == self.source.axis and all(
            ranges == (own,) or (own[0] == own[1] and not self.extent(part))
            for part, (ranges, own) in enumerate(zip(self.ranges, self.source.ranges, strict=True))
        )

    @property
    def axes(self) -> frozenset[int]:
        """Mesh axes on which the request depends: the axis that partitions the dimension, and `axis`."""
        return frozenset({self.axis, self.source.axis} - {None})  # type: ignore[arg-type]

    def overlaps(self, part: int, include_unused: bool = False) -> Iterator[AxisOverlap]:
        """Yield the cells that a part needs, by owner, in the order of its view.

        Parameters
        ----------
        include_unused : bool
            Whether to include cells that no result depends on.
        """
        at, bounds = 0 if self.starts is None else self.starts[part], self.source.bounds or (0, self.source.extent)
        for lo, hi in self.ranges[part]:
            offset = at - lo
            at += hi - lo
            used = None if include_unused or self.used is None else self.used[part]
            for owner in range(bisect_right(bounds, lo) - 1, bisect_left(bounds, hi)) if lo < hi else ():
                overlap_start, overlap_end = max(lo, bounds[owner]), min(hi, bounds[owner + 1])
                if used is None:
                    yield AxisOverlap(owner, range(overlap_start, overlap_end), offset)
                else:
                    for cells in clip_ranges(used, overlap_start + offset, overlap_end + offset):
                        yield AxisOverlap(owner, shift_range(cells, -offset), offset)

    @property
    def needs_exchange(self) -> bool:
        """Whether a part needs cells of another part; valid only if `axes` has at most one axis."""
        return self.source.axis is not None and any(part != overlap.part for part, overlap in self.needed)

    @cached_property
    def overlaps_by_sender(self) -> list[list[AxisOverlap]]:
        """For each part, its cells that parts (itself included) need; valid only if `axes` has at most one axis."""
        overlaps: list[list[AxisOverlap]] = [[] for _ in range(self._parts)]
        for part, overlap in self.needed:
            owner = part if self.source.axis is None else overlap.part  # a whole dimension is on every rank
            overlaps[owner].append(overlap._replace(part=part))
        return overlaps

    @cached_property
    def sent_received_kept_counts(self) -> tuple[list[int], list[int], list[int]]:
        """Number of cells that each part sends, receives (itself included) and keeps.

        Valid only if `axes` has at most one axis. The cost is linear in the parts, even if all need the same cells.
        """
        sent, received, kept = ([0] * self._parts for _ in range(3))
        for part in range(len(self.ranges)):
            for owner, cells, _ in self.overlaps(part):
                owner = part if self.source.axis is None else owner
                sent[owner] += len(cells)
                received[part] += len(cells)
                kept[owner] += len(cells) if owner == part or self.axis is None else 0
        if self.axis is None:  # all parts receive the same cells
            sent, received = [count * self._parts for count in sent], received[:1] * self._parts
        return sent, received, kept

    @property
    def needed(self) -> Iterator[tuple[int, AxisOverlap]]:
        """Pairs of a part and cells that it needs; valid only if `axes` has at most one axis."""
        for part in range(self._parts):
            for overlap in self.overlaps(part if self.axis is not None else 0):
                yield part, overlap

    @property
    def _parts(self) -> int:
        return max(len(self.ranges), len(self.source.ranges))


@dataclass(frozen=True)
class Piece:
    """Cells that one rank has and another rank (or the same rank) needs.

    `source` is in coordinates of the tensor, or of the image; `target` is the position in the receiver's view.
    """

    peer: int
    source: Lattice
    target: Lattice


@dataclass(frozen=True)
class ViewTransfer:
    """Views of a tensor that all ranks of a mesh need; of all ranks with the same data, the nearest rank sends.

    Attributes
    ----------
    parts : tuple of int
        Number of parts along each axis of the mesh.
    requests : tuple of DimRequest
        One request for each dimension along which ranks need cells other than their own. The lattices of pieces have
        these dimensions, in this order.
    """

    parts: tuple[int, ...]
    requests: tuple[DimRequest, ...]

    def receives(self, rank: int) -> list[Piece]:
        """Return the pieces that a rank needs, ordered by owner, including pieces that the rank itself owns."""
        coords = coords_of(self.parts, rank)
        overlaps_by_dim = [list(request.overlaps(request.part(coords))) for request in self.requests]
        return self._pieces(coords, overlaps_by_dim)

    def local(self, rank: int) -> list[Piece]:
        """Return the pieces of a rank's view that the rank owns, including cells that it does not use."""
        coords, own = coords_of(self.parts, rank), []
        for request in self.requests:
            axis, overlaps = request.source.axis, request.overlaps(request.part(coords), include_unused=True)
            own.append([overlap for overlap in overlaps if axis is None or overlap.part == coords[axis]])
        return self._pieces(coords, own)

    def view_includes_own_part(self, rank: int) -> bool:
        """Return whether a rank's view contains all cells of its own part, in their order."""
        coords = coords_of(self.parts, rank)
        own_extents = [hi - lo for lo, hi in (request.source.range(coords) for request in self.requests)]
        own = [[len(cells) for cells in piece.source.ranges] for piece in self.local(rank)]
        return own == [own_extents]

    def sends(self, rank: int) -> list[Piece]:
        """Return the pieces that other ranks need from a rank."""
        if not self.is_separable:
            return self._sends.get(rank, [])
        coords = coords_of(self.parts, rank)
        sent = [
            request.overlaps_by_sender[next((coords[axis] for axis in request.axes), 0)] for request in self.requests
        ]
        return sorted((p for p in self._pieces(coords, sent) if p.peer != rank), key=lambda piece: piece.peer)

    def _pieces(self, coords: Sequence[int], overlaps_by_dim: Sequence[Sequence[AxisOverlap]]) -> list[Piece]:
        """Return the products of overlaps, in the same order at both ends of a message."""
        pieces, axes = [], [request.source.axis for request in self.requests]
        for combination in product(*overlaps_by_dim):
            peer = list(coords)
            for axis, overlap in zip(axes, combination, strict=True):
                if axis is not None:
                    peer[axis] = overlap.part
            source = Lattice(tuple(overlap.cells for overlap in combination))
            target = source.shift([overlap.offset for overlap in combination])
            pieces.append(Piece(index_of(self.parts, peer), source, target))
        return pieces

    @property
    def has_unused_cells(self) -> bool:
        """Whether views may have unused cells, which are not sent."""
        return any(request.used is not None for request in self.requests)

    @cached_property
    def is_separable(self) -> bool:
        """Whether every dimension depends on at most one axis, no two on the same axis, so pieces are products."""
        axes = [axis for request in self.requests for axis in request.axes]
        return all(len(request.axes) < 2 for request in self.requests) and len(axes) == len(set(axes))

    @cached_property
    def needs_no_messages(self) -> bool:
        """Whether no rank needs cells of another rank."""
        if not self.is_separable:
            return not self._sends
        requests = self.requests
        return not any(dim.needs_exchange for dim in requests) or not all(any(dim.needed) for dim in requests)

    @cached_property
    def _sends(self) -> dict[int, list[Piece]]:
        """Pieces sent by each rank, collected from the needs of all ranks."""
        pieces_by_sender: dict[int, list[Piece]] = {}
        for receiver in range(prod(self.parts)):
            for piece in self.receives(receiver):
                if piece.peer != receiver:
                    pieces_by_sender.setdefault(piece.peer, []).append(replace(piece, peer=receiver))
        return pieces_by_sender

    def shape(self, local: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's view, given the shape of its part of the tensor."""
        coords, shape = coords_of(self.parts, rank), list(local)
        for request in self.requests:
            shape[request.dim] = request.extent(request.part(coords))
        return tuple(shape)
