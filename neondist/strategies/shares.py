"""The parts of parameters that each rank of a job owns under a strategy, computed as boxes without MPI."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from ..geometry import Box, part_range
from .strategy import ParameterStrategy, Strategy

Shape = tuple[int, ...]


@dataclass(frozen=True)
class OwnerBoxes:
    """The box of one parameter that each rank owns.

    Attributes
    ----------
    shape : tuple of int
        The shape in which parts are boxes: the parameter's shape, (1,) for a scalar, or (size,) if parts are ranges of
        the flat array.
    boxes : tuple of Box
        The box of each rank; empty if the rank owns nothing.
    """

    shape: Shape
    boxes: tuple[Box, ...]

    @property
    def flat_ranges(self) -> list[tuple[int, int]] | None:
        """Range of each rank's box in the flat parameter; None if a box is not contiguous."""
        ranges, row_shape = [], self.shape[1:]
        for box in self.boxes:
            if box.size and box.shape[1:] != row_shape:
                return None
            ranges.append((box.lo[0] * prod(row_shape), box.hi[0] * prod(row_shape)) if box.size else (0, 0))
        return ranges


def compute_owner_boxes(strategy: Strategy, ranks: int, names: Iterable[str] | None = None) -> dict[str, OwnerBoxes]:
    """Return the owned boxes of all parameters, or of the named ones, by name; parameters without owners are left out.

    Owner k of n is rank k * ranks // n, so if a replica has several tiles, owners are spread over the replicas.

    Raises
    ------
    ConfigError
        If there are more owners than ranks.
    """
    entries = {name: strategy.parameters[name] for name in (strategy.parameters if names is None else names)}
    strategy.check_owners_exist(ranks)
    num_devices = min(max(strategy.replicas, strategy.servers), ranks)
    owner_ranks = [owner * ranks // num_devices for owner in range(num_devices)]
    sliced_names = [name for name, entry in entries.items() if len(entry.owners) > 1 and entry.partition is None]
    ends = list(accumulate((strategy.specs[name].size for name in sliced_names), initial=0))
    starts = dict(zip(sliced_names, ends, strict=False))
    shares: dict[str, OwnerBoxes] = {}
    for name, entry in entries.items():
        size, shape = strategy.specs[name].size, tuple(strategy.specs[name].shape) or (1,)
        if name in starts:
            slice_bounds = [part_range(ends[-1], len(entry.owners), part) for part in range(len(entry.owners))]
            ranges = [(max(0, lo - starts[name]), min(size, hi - starts[name])) for lo, hi in slice_bounds]
            boxes = {
                owner_ranks[owner]: Box((lo,), (hi,)) for owner, (lo, hi) in zip(entry.owners, ranges, strict=True)
            }
            shares[name] = _create_owner_boxes((size,), boxes, ranks)
        elif entry.owners:
            shares[name] = _create_owner_boxes(shape, _box_by_owning_rank(entry, shape, owner_ranks), ranks)
    return shares


def _box_by_owning_rank(entry: ParameterStrategy, shape: Shape, owner_ranks: Sequence[int]) -> dict[int, Box]:
    """Return the part of each rank that owns one; several parts of an owner are concatenated."""
    if entry.partition is None:
        return {owner_ranks[entry.owners[0]]: Box.of(shape)}
    axis, extents = entry.partition
    extent_by_owner: dict[int, int] = {}
    for owner, size in zip(entry.owners, extents, strict=True):
        extent_by_owner[owner] = extent_by_owner.get(owner, 0) + size
    box_by_rank, start = {}, 0
    for owner in sorted(extent_by_owner):
        stop, whole_box = start + extent_by_owner[owner], Box.of(shape)
        lo, hi = list(whole_box.lo), list(whole_box.hi)
        lo[axis], hi[axis] = start, stop
        box_by_rank[owner_ranks[owner]], start = Box(tuple(lo), tuple(hi)), stop
    return box_by_rank


def _create_owner_boxes(shape: Shape, boxes: dict[int, Box], ranks: int) -> OwnerBoxes:
    empty_box = Box((0,) * len(shape), (0,) * len(shape))
    return OwnerBoxes(shape, tuple(boxes.get(rank, empty_box) for rank in range(ranks)))
