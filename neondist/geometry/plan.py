"""Halo plans: the cells that tiles send to each other, computed by every rank without communication.

A plan lists, for one tile, the cells that it owns, the cells that it needs, and the pieces that are sent. The adjoint
(bprop) uses the same plan with the two ends swapped, and adds the received values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from typing import Any, Literal, NamedTuple, TypeAlias

from .box import Box
from .lattice import AxisCells, Lattice, Range, group_into_ranges, hull_of, shift_range
from .partition import Partition
from .transfer import AxisOverlap, DimRequest, Piece, ViewTransfer
from .window import Window

KeyDetail: TypeAlias = Literal["messages", "extents", "all"]


@dataclass(frozen=True)
class TransferPlan:
    """Cells that a tile owns and needs, and the pieces that it receives, sends and copies; computed on first access."""

    own: Box
    need: Box
    #: returns the received, sent and local pieces
    pieces: Callable[[], tuple[Sequence[Piece], Sequence[Piece], Sequence[Piece]]] = field(repr=False, compare=False)

    @property
    def receives(self) -> Sequence[Piece]:
        """Pieces received from other tiles."""
        return self._pieces[0]

    @property
    def sends(self) -> Sequence[Piece]:
        """Pieces sent to other tiles."""
        return self._pieces[1]

    @property
    def local(self) -> Sequence[Piece]:
        """Pieces copied from the tile's own cells."""
        return self._pieces[2]

    @cached_property
    def _pieces(self) -> tuple[Sequence[Piece], Sequence[Piece], Sequence[Piece]]:
        return self.pieces()

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
    needed cells, and the sources of padding. Sources and targets of pieces are in coordinates of the image.

    A tile receives only those cells of other tiles on which its outputs depend. Other halo cells, between the taps of a
    dilated window or between windows whose stride exceeds their kernel, hold the fill value.
    """

    buffer: Box
    extent: tuple[int, ...]
    window: Window
    #: whether tiles may overlap: if so, cells that a tile needs beyond its own have no owner or lie outside the image
    tiles_may_overlap: bool = False
    #: along each axis, the cells that outputs of the tile depend on; None: all of `need`
    used: tuple[AxisCells, ...] | None = None

    @property
    def trivial(self) -> bool:
        """Whether the view is the tile itself."""
        return self.need == self.own and not self.receives and not self.sends

    @property
    def prefilled(self) -> list[Box]:
        """Parts of the buffer to fill before the exchange: `outside` or, if cells are unused, all except own cells."""
        return self.buffer.difference(self.own) if self.has_unused_cells else self.outside

    @property
    def has_unused_cells(self) -> bool:
        """Whether `need` contains cells on which no output of the tile depends."""
        used = self.used
        return used is not None and self.need.size != prod(sum(map(len, cells)) for cells in used)

    @property
    def outside(self) -> list[Box]:
        """Parts of the buffer outside the image, or without an owner, that hold the window's fill value."""
        inner_box, modes = self.own if self.tiles_may_overlap else Box.of(self.extent), self.window.modes
        if "zeros" not in modes:
            return []
        if self.window.mode != "zeros":  # along axes with other modes, cells outside the image are copied
            axes = zip(modes, inner_box.axes(), self.buffer.axes(), strict=True)
            inner_box = Box.from_ranges(inner if mode == "zeros" else whole for mode, inner, whole in axes)
        return self.buffer.difference(inner_box)

    @classmethod
    @lru_cache(maxsize=1024)  # shared by virtual ranks and by all plans of a model
    def of(cls, partition: Partition, window: Window, tile: int, outputs: Partition | None = None) -> HaloPlan:
        """Return the plan of `tile` for a window that slides over a partitioned image.

        Parameters
        ----------
        outputs : Partition, optional
            Outputs that each tile computes; default: the output is partitioned like the input.
        """
        axes = _axis_plans(partition, window, outputs)
        own, axis_plans_and_parts = partition.box(tile), list(zip(axes, partition.coords(tile), strict=True))
        need = Box.from_ranges(axis.needs[at] for axis, at in axis_plans_and_parts)
        source_box = Box.from_ranges(axis.sources[at] for axis, at in axis_plans_and_parts)

        def pieces() -> tuple[list[Piece], list[Piece], list[Piece]]:
            if partition.may_overlap or not axes:  # overlapping tiles have all cells that they need; so do vectors
                return [], [], []
            transfer = ViewTransfer(partition.parts, tuple(axis.request for axis in axes))
            needed = transfer.receives(tile)
            local = [piece for piece in needed if piece.peer == tile]
            return [piece for piece in needed if piece.peer != tile], transfer.sends(tile), local

        buffer, used = need.hull(own).hull(source_box), tuple(axis.used[at] for axis, at in axis_plans_and_parts)
        return cls(own, need, pieces, buffer, partition.extent, window, partition.may_overlap, used)

    @classmethod
    @lru_cache(maxsize=512)
    def part_class_keys(
        cls, cells: Partition, window: Window, outputs: Partition | None = None, level: KeyDetail = "all"
    ) -> PartClassKeys:
        """Return class keys of parts; the plans of tiles whose parts have equal keys agree in the given properties.

        Parameters
        ----------
        level : {'messages', 'extents', 'all'}
            'messages': sizes of messages. 'extents': extents of boxes, and whether the plan is trivial. 'all':
            everything except position.
        """
        axes = _axis_plans(cells, window, outputs)
        return PartClassKeys(cells.parts[: len(axes)], [axis.class_keys(level) for axis in axes])


def total_halo_volume(partition: Partition, window: Window) -> int:
    """Return the total number of cells that tiles receive for a window; does not iterate over the tiles."""
    cell_counts = [axis.request.sent_received_kept_counts for axis in _axis_plans(partition, window)]
    return prod(sum(received) for _, received, _ in cell_counts) - prod(sum(own) for *_, own in cell_counts)


class PartClassKeys(NamedTuple):
    """Class keys of the parts of each axis.

    Attributes
    ----------
    parts : tuple of int
        The number of parts of each axis.
    by_axis : sequence of sequences
        For each axis, the key of each part.
    """

    parts: tuple[int, ...]
    by_axis: Sequence[Sequence[Hashable]]

    @property
    def representative_tiles(self) -> list[int]:
        """Tiles that together cover every key of each axis, chosen along the axes through tile 0."""
        tiles = {0}
        for axis, keys in enumerate(self.by_axis):
            first_part_by_key = {key: part for part, key in reversed(list(enumerate(keys)))}
            tiles.update(part * prod(self.parts[axis + 1 :]) for part in first_part_by_key.values())
        return sorted(tiles)


class RepartitionPlan(TransferPlan):
    """Plan for redistributing an array between partitions; ranks beyond a partition's tiles own nothing."""

    @classmethod
    def of(cls, source: Sequence[Box], target: Sequence[Box], rank: int) -> RepartitionPlan:
        """Return the plan of `rank`; source[q] is the box that rank q owns, and target[q] the box that it needs.

        Boxes of `source` are disjoint or equal; ranks that do not own a box receive it from one of its owners.
        """
        sources_by_box = defaultdict(list)
        for peer, box in enumerate(source):
            sources_by_box[box].append(peer)

        def sender(box: Box, receiver: int) -> int:
            return receiver if source[receiver] == box else sources_by_box[box][receiver % len(sources_by_box[box])]

        def cut(pairs: Iterable[tuple[int, Box]]) -> list[Piece]:
            return [Piece(peer, *[Lattice.of(cells)] * 2) for peer, cells in pairs if not cells.empty]

        own, need = source[rank], target[rank]
        needed = cut((sender(box, rank), box.intersect(need)) for box in sources_by_box)
        sent = cut((q, own.intersect(box)) for q, box in enumerate(target) if sender(own, q) == rank and q != rank)
        local = [piece for piece in needed if piece.peer == rank]
        return cls(own, need, lambda: ([piece for piece in needed if piece.peer != rank], sent, local))


class _AxisPlan:
    """One axis of the halo plans of all tiles.

    Attributes
    ----------
    needs : list of Range
        For each part, the range of cells in the windows of its outputs, including cells outside the image.
    sources : list of Range
        For each part, the range of cells that it needs from their owners: inside the image or, with 'wrap', modulo its
        extent.
    used : list of AxisCells
        For each part, the cells, inside the image or not, that its outputs depend on.
    """

    def __init__(self, partition: Partition, window: Window, axis: int, outputs: Partition) -> None:
        self.partition, self.axis, self.mode, self.n = partition, axis, window.modes[axis], partition.extent[axis]
        self.own, stride = partition.ranges_along(axis), window.stride[axis]
        self.needs, axis_window = needed_cells_along(outputs, window, axis), window.axis_window(axis)
        self.used = [axis_window.used_cells(lo, hi) for lo, hi in outputs.ranges_along(axis)]
        for part, ((lo, hi), (first, last)) in enumerate(zip(self.needs, self.own, strict=True)):
            if lo >= hi:  # an empty view lies within the tile's own cells
                self.needs[part] = (min(max(lo, first), last),) * 2
            elif window.kernel[axis] == 1 < stride and first < hi <= last:  # include own cells after the last one used
                self.needs[part] = lo, min(hi + stride - 1, last)  # often, the view is then the whole tile
        self.sources = [sources_within(lo, hi, self.n, self.mode) for lo, hi in self.needs]

    @cached_property
    def request(self) -> DimRequest:
        """Cells that outputs of each part depend on; positions in views are coordinates of the image."""
        source, n, used = self.partition.atom(self.axis), self.n, self.used
        ranges: tuple[tuple[Range, ...], ...] = tuple((cells,) for cells in self.sources)
        if self.mode == "wrap":
            ranges = tuple(
                tuple((max(lo - turn * n, 0), min(hi - turn * n, n)) for turn in range(lo // n, -(-hi // n)))
                for lo, hi in self.sources
            )
        elif self.mode != "zeros":
            used = [self._padding_source_cells(part) for part in range(len(used))]
        return DimRequest(self.axis, source, self.axis, ranges, tuple(used), tuple(lo for lo, _ in self.sources))

    def _padding_source_cells(self, part: int) -> AxisCells:
        """Return the cells inside the image that fill the cells on which a part's outputs depend."""
        used, (lo, hi) = self.used[part], self.needs[part]
        if hi - lo == sum(map(len, used)):
            return (range(*self.sources[part]),)
        return group_into_ranges(
            sorted({i if 0 <= i < self.n else fold_index(i, self.n, self.mode) for cells in used for i in cells})
        )

    def class_keys(self, level: KeyDetail) -> list[Hashable]:
        """Return, for each part, a key that determines the properties of its plan given by `level`."""
        key = {"messages": self._message_class_key, "extents": self._extent_class_key, "all": self._full_class_key}[
            level
        ]
        return [key(part) for part in range(len(self.own))]

    def _overlaps(self, part: int) -> list[list[AxisOverlap]]:
        request = self.request
        return [] if self.partition.may_overlap else [[*request.overlaps(part)], request.overlaps_by_sender[part]]

    def _message_class_key(self, part: int) -> Hashable:
        return tuple(tuple((o.part == part, len(o.cells)) for o in overlaps) for overlaps in self._overlaps(part))

    def _extent_class_key(self, part: int) -> Hashable:
        own, need, seen = self.own[part], self.needs[part], self.sources[part]
        kept = min(own[0], need[0], seen[0]), max(own[1], need[1], seen[1])
        overlap_flags = [(bool(overlaps), any(o.part != part for o in overlaps)) for overlaps in self._overlaps(part)]
        return (*(hi - lo for lo, hi in (own, need, kept)), need == own, need == kept, *overlap_flags)

    def _full_class_key(self, part: int) -> Hashable:
        first, last = self.own[part]
        relative_ends = (end - first for pair in (self.needs[part], self.sources[part]) for end in pair)
        moved = (tuple((o.part - part, shift_range(o.cells, -first)) for o in group) for group in self._overlaps(part))
        return (last - first, *relative_ends, *moved)


_cached_axis_plan = lru_cache(maxsize=512)(_AxisPlan)  # shared by the plans of all tiles


def _axis_plans(partition: Partition, window: Window, outputs: Partition | None = None) -> list[_AxisPlan]:
    """Return the plans of all axes; by default the output is partitioned like the input."""
    if outputs is None and window.pointwise:
        outputs = partition
    elif outputs is None:
        outputs = Partition(window.output_extent(partition.extent), partition.parts, partition.num_copies_of_vector)
    return [_cached_axis_plan(partition, window, axis, outputs) for axis in range(len(partition.extent))]


def needed_cells_along(outputs: Partition, window: Window, axis: int) -> list[Range]:
    """Return the cells of an axis in the windows of each part's outputs, including those outside the image."""
    ranges = outputs.ranges_along(axis)
    if window.pointwise:
        return ranges
    axis_window = window.axis_window(axis)
    return [hull_of(axis_window.used_cells(*ends)) for ends in ranges]


def sources_within(lo: int, hi: int, n: int, mode: str) -> Range:
    """Return the range of an axis of n cells from which the cells [lo, hi) are filled; with 'wrap', modulo n."""
    if mode == "wrap" or lo >= hi:
        return lo, hi
    if mode == "zeros":
        return max(lo, 0), min(hi, n)
    turning_points = (lo, -1, 0, n - 1, n, hi - 1)  # fold_index is monotonic between these
    folded_cells = [fold_index(i, n, mode) for i in turning_points if lo <= i < hi]
    return min(folded_cells), max(folded_cells) + 1


def fold_index(i: Any, n: int, mode: str) -> Any:
    """Return the cell in [0, n) from which cell i (or each cell of an array) is filled: reflect, replicate or wrap."""
    if mode == "wrap":
        return i % n
    if mode == "replicate":
        return (abs(i) - abs(i - n + 1) + n - 1) // 2  # i, but at least 0 and at most n - 1
    return n - 1 - abs(n - 1 - abs(i))
