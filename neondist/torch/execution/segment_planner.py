"""Planner of a module's segments, from the costs of messages and redundant computation."""

from __future__ import annotations

from collections.abc import Collection
from math import inf, prod

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from ...geometry import DimRequest, Range, ViewTransfer
from ...halo.fusion import FusionScheme
from ...plan.planner import TRAINING_COST_FACTOR, cheapest_ranges
from ...system.machine import MachineProfile
from ..exchange.schemes import policy_of_module
from ..ir.graph import Value
from .block_lowering import AxisRanges, value_ids_in
from .program_lowering import OperatorRecord, even_layout, ranges_at
from .recomputed_blocks import extend_empty_ranges
from .segments import OperatorSegment, SegmentSearch


def plan_segments(search: SegmentSearch, excluded: Collection[int] = ()) -> list[OperatorSegment]:
    """Return the segments; segments under a scheme with a planner are divided at the lowest cost.

    Parameters
    ----------
    excluded : collection of int
        Operators, by number, that belong to no segment.
    """
    segments, starts = search.segments(excluded=excluded), set[int]()
    for segment in segments:
        first = next(iter(segment.records.values()))
        policy = policy_of_module(first.where.module, search.schemes)
        profile = policy.planner_profile(search.mesh.size) if isinstance(policy, FusionScheme) else None
        if profile is not None:
            starts |= _SegmentDivision(search, segment, profile).first_operators
    return search.segments(starts, excluded) if starts else segments


class _SegmentDivision:
    """Division of one potential segment at the lowest cost."""

    def __init__(self, search: SegmentSearch, segment: OperatorSegment, profile: MachineProfile) -> None:
        self.search, self.profile, self.operator_numbers = search, profile, list(segment.records)
        self.windows = [
            at for at, number in enumerate(self.operator_numbers) if segment.records[number].needs_halo_exchange
        ]
        computing = {number: record for number, record in segment.records.items() if value_ids_in(record.result)}
        self.flops = {number: _count_flops(record, search.program.values) for number, record in computing.items()}
        self.middle_place = tuple(parts // 2 for parts in search.mesh.parts)  # the tile with the most neighbours
        self.seconds_by_range: dict[tuple[int, int], float] = {}

    @property
    def first_operators(self) -> set[int]:
        return {
            self.operator_numbers[self.windows[first]] for first, _ in cheapest_ranges(self._seconds, len(self.windows))
        }

    def _seconds(self, first: int, last: int) -> float:
        """Return the seconds per training step of exchanges and redundant computation for a segment of windows.

        This method is called for increasingly long segments with the same end. Redundant computation grows with length:
        once it costs more than separate exchanges, the result is inf for this segment and all longer ones.
        """
        longer, shorter = (first, last), (first + 1, last)
        if self.seconds_by_range.get(shorter) == inf:
            self.seconds_by_range[longer] = inf
            return inf
        sending, redundant = self._exchange_and_redundant_seconds(first, last)
        separate = sum(self.seconds_by_range[at, at] for at in range(first, last)) + self.seconds_by_range.get(
            (last, last), inf
        )
        self.seconds_by_range[longer] = inf if redundant > separate else sending + redundant
        return self.seconds_by_range[longer]

    def _exchange_and_redundant_seconds(self, first: int, last: int) -> tuple[float, float]:
        search, values, ends = self.search, self.search.program.values, [*self.windows, len(self.operator_numbers)]
        segment = search.build_segment_of(self.operator_numbers[ends[first] : ends[last + 1]])
        layouts = [even_layout(out, search.mesh) for out in segment.traced.outputs]
        own = ranges_at(layouts, dict(enumerate(self.middle_place)))
        outputs = extend_empty_ranges(own, own)
        sending = sum(
            self._exchange_seconds(values[value], ranges, 1 + (value not in search.program.image_value_ids))
            for value, ranges in zip(segment.inputs, segment.traced.source_ranges(outputs), strict=True)
            if value in values
        )
        records = {number: record for number, record in segment.records.items() if number in self.flops}
        results = {number: values[value_ids_in(record.result)[0]] for number, record in records.items()}
        redundant = sum(
            self.flops[number] * self._redundant_share(segment, result, outputs) for number, result in results.items()
        )
        return sending, TRAINING_COST_FACTOR * redundant / self.profile.flops_per_second

    def _exchange_seconds(self, value: Value, ranges: tuple[Range, ...], num_directions: int) -> float:
        """Return the seconds that the middle rank needs to receive the required cells of a value."""
        mesh, dims = self.search.mesh, enumerate(zip(value.layout, ranges, strict=True))
        requests = (DimRequest(dim, atom, None, ((cells,),)) for dim, ((atom,), cells) in dims if atom.axis is not None)
        rank = mesh.rank(self.middle_place)
        pieces = [piece for piece in ViewTransfer(mesh.parts, tuple(requests)).receives(rank) if piece.peer != rank]
        whole = prod(n for n, (atom,) in zip(value.shape, value.layout, strict=True) if atom.axis is None)
        count = sum(piece.source.size for piece in pieces) * whole * value.dtype.itemsize
        return num_directions * (len(pieces) * self.profile.latency + count / self.profile.bandwidth)

    def _redundant_share(self, segment: OperatorSegment, value: Value, outputs: AxisRanges) -> float:
        """Return the number of cells that the middle rank computes beyond its own, as a fraction of the whole value."""
        needs, own, needed = segment.traced.symbol_ranges(outputs), 1.0, 1.0
        for (atom,), (block,) in zip(value.layout, segment.segment_values[value.id].layout, strict=True):
            if atom.axis is not None and block.origin is not None:
                origin, factor = block.origin
                (first, last), (lo, hi) = atom.range(self.middle_place), needs.get(origin, (0, 0))
                own *= (last - first) / atom.extent
                needed *= (hi - lo) * factor / atom.extent
        return max(0.0, needed - own)


def _count_flops(record: OperatorRecord, values: dict[int, Value]) -> float:
    """Return the forward FLOPs of an operator on the whole image, at least one per element."""

    def meta(leaf: object) -> object:
        if not isinstance(leaf, Value):
            return leaf
        value = values[leaf.id]
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    least = prod(values[value_ids_in(record.result)[0]].shape)
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            record.target(*pytree.tree_map(meta, list(record.args)), **pytree.tree_map(meta, dict(record.kwargs)))
    except Exception:  # the operator needs values, which meta tensors lack, so it is not a product
        return least
    return max(least, counter.get_total_flops())
