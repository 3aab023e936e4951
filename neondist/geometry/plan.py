"""Halo plans: the cells that tiles send to each other, computed by every rank without communication.

A plan lists, for one tile, the cells that it owns, the cells that it needs, and the pieces that are sent. The adjoint
(bprop) uses the same plan with the two ends swapped, and adds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import Any, Literal, NamedTuple, TypeAlias

from .box import Box
from .lattice import Cells, Lattice, as_ranges, clip_ranges, shift_range
from .partition import Partition
from .window import Window

Level: TypeAlias = Literal["messages", "extents", "all"]


@dataclass(frozen=True)
class Piece:
    """Cells that one tile owns and another (or the same) needs.

    `source` is in image coordinates; `target` is the position on the receiver, different only if the image wraps.
    """

    peer: int
    source: Lattice
    target: Lattice


class TransferPlan:
    """Cells that a tile owns and needs, and the pieces that it receives, sends and copies locally."""

    own: Box
    need: Box
    receives: tuple[Piece, ...]
    sends: tuple[Piece, ...]
    local: tuple[Piece, ...]

    @property
    def sent_cells(self) -> int:
        """Number of cells that this tile sends in fprop and receives in bprop."""
        return sum(piece.source.size for piece in self.sends)

    @property
    def halo_volume(self) -> int:
        """Number of cells that this tile receives in fprop and sends in bprop."""
        return sum(piece.source.size for piece in self.receives)


@dataclass(frozen=True)
class HaloPlan(TransferPlan):
    """Halo plan of one tile for one window.

    `need` extends outside the image by the padding; `buffer` is the bounding box of the tile's array: owned cells,
    needed cells, and the sources of padding. Pieces are computed on first access.

    Of the cells in `need` that other tiles own, only those that an output depends on are received. Cells between the
    taps of a dilated window, or between windows whose stride exceeds their kernel, hold the fill value.
    """

    own: Box
    need: Box
    buffer: Box
    extent: tuple[int, ...]
    window: Window
    #: returns the received, sent and local pieces
    pieces: Callable[[], tuple[Sequence[Piece], Sequence[Piece], Sequence[Piece]]] = field(repr=False, compare=False)
    #: whether tiles overlap: cells needed beyond its own then have no owner or are outside the image
    overlaps: bool = False
    #: along each axis, the cells that outputs of the tile depend on; None: all of `need`
    used: tuple[Cells, ...] | None = None

    @property
    def trivial(self) -> bool:
        """Whether the view is the tile itself."""
        return self.need == self.own and not self.receives and not self.sends

    @property
    def prefilled(self) -> list[Box]:
        """Parts of the buffer to set to the fill value before the exchange: `outside`, or all around the own cells."""
        return self.buffer.outside(self.own) if self.has_unused else self.outside

    @property
    def has_unused(self) -> bool:
        """Whether `need` has cells that no output of the tile depends on."""
        used = self.used
        return used is not None and self.need.size != prod(sum(map(len, cells)) for cells in used)

    @property
    def outside(self) -> list[Box]:
        """Parts of the buffer outside the image, or without owner, that hold the window's fill value."""
        kept, modes = self.own if self.overlaps else Box.of(self.extent), self.window.modes
        if "zeros" not in modes:
            return []
        if self.window.mode != "zeros":  # along other axes cells are copied, also outside this one
            axes = zip(modes, kept.axes(), self.buffer.axes(), strict=True)
            kept = Box(*zip(*(inner if mode == "zeros" else whole for mode, inner, whole in axes), strict=True))
        return self.buffer.outside(kept)

    @property
    def receives(self) -> tuple[Piece, ...]:  # type: ignore[override]
        """Pieces received from other tiles."""
        return self._pieces[0]

    @property
    def sends(self) -> tuple[Piece, ...]:  # type: ignore[override]
        """Pieces sent to other tiles."""
        return self._pieces[1]

    @property
    def local(self) -> tuple[Piece, ...]:  # type: ignore[override]
        """Pieces copied from its own cells."""
        return self._pieces[2]

    @cached_property
    def _pieces(self) -> tuple[tuple[Piece, ...], tuple[Piece, ...], tuple[Piece, ...]]:
        receives, sends, local = self.pieces()
        return tuple(receives), tuple(sends), tuple(local)

    @classmethod
    @lru_cache(maxsize=1024)  # shared by virtual ranks and by all plans of a model
    def of(cls, partition: Partition, window: Window, tile: int, outputs: Partition | None = None) -> HaloPlan:
        """Return the plan of `tile` for a window that slides over a partitioned image.

        Parameters
        ----------
        outputs : Partition, optional
            Outputs that each tile computes; default: the output is partitioned like the input.
        """
        outputs = _output(partition, window) if outputs is None else outputs
        axes = [_axis(partition, window, axis, outputs) for axis in range(len(partition.extent))]
        own, places = partition.box(tile), list(zip(axes, partition.coords(tile), strict=True))
        need, folded = (
            Box(tuple(lo for lo, _ in ranges), tuple(hi for _, hi in ranges))
            for ranges in ([axis.needs[at] for axis, at in places], [axis.sources(at) for axis, at in places])
        )

        def pieces() -> tuple[list[Piece], list[Piece], list[Piece]]:
            if partition.overlaps:  # overlapping tiles have all cells that they need
                return [], [], []
            needed = _combine(partition, [axis.pieces(at) for axis, at in places])
            sent = _combine(partition, [axis.pieces_from(at) for axis, at in places], by_needer=True)
            others = ([piece for piece in group if piece.peer != tile] for group in (needed, sent))
            return *others, [piece for piece in needed if piece.peer == tile]  # type: ignore[return-value]

        buffer, used = need.hull(own).hull(folded), tuple(axis.used[at] for axis, at in places)
        return cls(own, need, buffer, partition.extent, window, pieces, partition.overlaps, used)

    @classmethod
    @lru_cache(maxsize=512)
    def kinds(cls, cells: Partition, window: Window, outputs: Partition | None = None, level: Level = "all") -> Kinds:
        """Return the kinds of parts: plans of tiles whose parts are of the same kinds are alike.

        Parameters
        ----------
        level : {'messages', 'extents', 'all'}
            Property that plans of the same kinds share: message sizes; extents of boxes, and whether they are trivial;
            everything except position.
        """
        outputs = _output(cells, window) if outputs is None else outputs
        axes = [_axis(cells, window, axis, outputs) for axis in range(len(cells.extent))]
        return Kinds(cells.parts[: len(axes)], [axis.kinds(level) for axis in axes])


class Kinds(NamedTuple):
    """Kinds of the parts of each axis.

    Attributes
    ----------
    parts : tuple of int
        The number of parts of each axis.
    axes : sequence of sequences
        For each axis, the kind of each part.
    """

    parts: tuple[int, ...]
    axes: Sequence[Sequence[Hashable]]

    @property
    def cross(self) -> list[int]:
        """Tiles that together cover every kind of each axis: some of those on the axes through tile 0."""
        tiles = {0}
        for axis, kinds in enumerate(self.axes):
            firsts = {kind: part for part, kind in reversed(list(enumerate(kinds)))}
            tiles.update(part * prod(self.parts[axis + 1 :]) for part in firsts.values())
        return sorted(tiles)


@dataclass(frozen=True)
class RepartitionPlan(TransferPlan):
    """Plan for redistributing an array between partitions; ranks beyond a partition's tiles own nothing."""

    own: Box
    need: Box
    receives: tuple[Piece, ...]
    sends: tuple[Piece, ...]
    local: tuple[Piece, ...]

    @classmethod
    def of(cls, source: Sequence[Box], target: Sequence[Box], rank: int) -> RepartitionPlan:
        """Return the plan of `rank`; source[q] is the box that rank q owns, and target[q] the box that it needs.

        Boxes of `source` are disjoint or equal; one owner of equal boxes sends the box to ranks that do not own it.
        """
        owners = defaultdict(list)
        for peer, box in enumerate(source):
            owners[box].append(peer)

        def sender(box: Box, needer: int) -> int:
            return needer if source[needer] == box else owners[box][needer % len(owners[box])]

        def pieces(pairs: Iterable[tuple[int, Box]]) -> list[Piece]:
            return [Piece(peer, *[Lattice.of(cut)] * 2) for peer, cut in pairs if not cut.empty]

        own, need = source[rank], target[rank]
        received = pieces((sender(box, rank), box.intersect(need)) for box in owners)
        sent = pieces((q, own.intersect(box)) for q, box in enumerate(target) if sender(own, q) == rank)
        return cls(
            own=own,
            need=need,
            receives=tuple(p for p in received if p.peer != rank),
            sends=tuple(p for p in sent if p.peer != rank),
            local=tuple(p for p in received if p.peer == rank),
        )


def _output(partition: Partition, window: Window) -> Partition:
    if window.pointwise:
        return partition
    return Partition(window.output_extent(partition.extent), partition.parts, partition.copies)


@dataclass(frozen=True)
class _AxisPiece:
    """One axis of a piece: the part at the other end, the owner's cells, and their offset on the receiver."""

    part: int
    cells: range
    offset: int


class _Axis:
    """One axis of a halo: views are products of ranges, so every piece is a product of axis pieces."""

    def __init__(self, partition: Partition, window: Window, axis: int, outputs: Partition) -> None:
        self.partition, self.axis, self.mode = partition, axis, window.modes[axis]
        self.n, self.parts = partition.extent[axis], partition.parts[axis]
        needs, step = needs_along(outputs, window, axis), window.stride[axis]
        self.used = used_along(outputs, window, axis)
        if window.kernel[axis] == 1 < step:  # include own cells after the last one seen: often the whole tile
            for part, (lo, hi) in enumerate(needs):
                first, last = partition.range(axis, part)
                if lo < hi and first < hi <= last:
                    needs[part] = lo, min(hi + step - 1, last)
        for part, (lo, hi) in enumerate(needs):
            if lo >= hi:  # an empty view lies within its own cells
                first, last = partition.range(axis, part)
                needs[part] = (min(max(lo, first), last),) * 2
        self.needs = needs

    def has_unused(self, part: int) -> bool:
        """Return whether the part's view has cells that none of its outputs depends on."""
        lo, hi = self.needs[part]
        return hi - lo != sum(map(len, self.used[part]))

    def sources(self, part: int) -> tuple[int, int]:
        """Return the range of cells, inside the image or (wrap) modulo it, that the part needs from owners."""
        return sources_within(*self.needs[part], self.n, self.mode)

    def pieces(self, part: int) -> list[_AxisPiece]:
        """Return the cells that outputs of `part` depend on, by owner."""
        lo, hi = self.sources(part)
        if lo >= hi:
            return []
        turns = range(lo // self.n, -(-hi // self.n)) if self.mode == "wrap" else range(1)
        return [
            _AxisPiece(owner, cells, turn * self.n)
            for turn in turns
            for owner, a, b in self.partition.owners(self.axis, lo - turn * self.n, hi - turn * self.n)
            for cells in clip_ranges([shift_range(cells, -turn * self.n) for cells in self._used_inside(part)], a, b)
        ]

    def _used_inside(self, part: int) -> Cells:
        """Return the cells inside the image, or (wrap) modulo it, that outputs of `part` depend on."""
        seen = self.used[part]
        if self.mode in ("zeros", "wrap"):
            return seen
        if not self.has_unused(part):
            return (range(*sources_within(seen[0].start, seen[0].stop, self.n, self.mode)),)
        return as_ranges(
            sorted({i if 0 <= i < self.n else fold(i, self.n, self.mode) for cells in seen for i in cells})
        )

    def pieces_from(self, owner: int) -> list[_AxisPiece]:
        """Return the pieces that `owner` sends, by receiver."""
        return self._by_owner.get(owner, [])

    def kinds(self, level: Level) -> list[Hashable]:
        """Return a key for each part that determines its plan up to `level`."""
        key = {"messages": self._messages, "extents": self._extents, "all": self._kind}[level]
        return [key(part) for part in range(self.parts)]

    def _pieces(self, part: int) -> list[list[_AxisPiece]]:
        return [] if self.partition.overlaps else [self.pieces(part), self.pieces_from(part)]

    def _messages(self, part: int) -> Hashable:
        return tuple(tuple((p.part == part, len(p.cells)) for p in pieces) for pieces in self._pieces(part))

    def _extents(self, part: int) -> Hashable:
        own, need, seen = self.partition.range(self.axis, part), self.needs[part], self.sources(part)
        kept = min(own[0], need[0], seen[0]), max(own[1], need[1], seen[1])
        moves = [(bool(pieces), any(p.part != part for p in pieces)) for pieces in self._pieces(part)]
        return (*(hi - lo for lo, hi in (own, need, kept)), need == own, need == kept, *moves)

    def _kind(self, part: int) -> Hashable:
        first, last = self.partition.range(self.axis, part)
        ends = (end - first for pair in (self.needs[part], self.sources(part)) for end in pair)
        moved = (tuple((p.part - part, shift_range(p.cells, -first)) for p in pieces) for pieces in self._pieces(part))
        return (last - first, *ends, *moved)

    @cached_property
    def _by_owner(self) -> dict[int, list[_AxisPiece]]:
        sent = defaultdict(list)
        for part in range(self.parts):
            for p in self.pieces(part):
                sent[p.part].append(_AxisPiece(part, p.cells, p.offset))
        return sent


_axis = lru_cache(maxsize=512)(_Axis)  # shared by the plans of all tiles


def needs_along(outputs: Partition, window: Window, axis: int) -> list[tuple[int, int]]:
    """Return the cells of an axis in the windows of each part's outputs, including those outside the image."""
    ranges = [outputs.range(axis, part) for part in range(outputs.parts[axis])]
    if window.pointwise:
        return ranges
    axis_window = window.along(axis)
    return [next(axis_window.needs(Box((lo,), (hi,))).axes()) for lo, hi in ranges]


def used_along(outputs: Partition, window: Window, axis: int) -> list[Cells]:
    """Return the cells of an axis, inside the image or not, that the outputs of each part depend on."""
    ranges = [outputs.range(axis, part) for part in range(outputs.parts[axis])]
    if window.pointwise:
        return [(range(lo, hi),) for lo, hi in ranges]
    axis_window = window.along(axis)
    return [axis_window.used_cells(lo, hi) for lo, hi in ranges]


def sources_within(lo: int, hi: int, n: int, mode: str) -> tuple[int, int]:
    """Return the cells of an axis of n from which the cells [lo, hi) are filled; with 'wrap', modulo n."""
    if mode == "wrap" or lo >= hi:
        return lo, hi
    if mode == "zeros":
        return max(lo, 0), min(hi, n)
    turning = (lo, -1, 0, n - 1, n, hi - 1)  # fold is monotonic between these
    cells = [fold(i, n, mode) for i in turning if lo <= i < hi]
    return min(cells), max(cells) + 1


def _combine(partition: Partition, axes: list[list[_AxisPiece]], by_needer: bool = False) -> list[Piece]:
    """Return the products of axis pieces, in the same order at both ends of a message."""
    pieces: list[Piece] = []
    if not axes:  # a vector is replicated
        return pieces
    for combination in product(*axes):
        peer = 0
        for parts, p in zip(partition.parts, combination, strict=True):
            peer = peer * parts + p.part
        source = Lattice(tuple(p.cells for p in combination))
        pieces.append(Piece(peer, source, source.shift([p.offset for p in combination])))
    return sorted(pieces, key=lambda piece: piece.peer) if by_needer else pieces


def fold(i: Any, n: int, mode: str) -> Any:
    """Return the cell in [0, n) from which cell i (or each cell of an array) is filled: reflect, replicate or wrap."""
    if mode == "wrap":
        return i % n
    if mode == "replicate":
        return (abs(i) - abs(i - n + 1) + n - 1) // 2  # i, but at least 0 and at most n - 1
    return n - 1 - abs(n - 1 - abs(i))
