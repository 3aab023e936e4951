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


def plan_segments(search: SegmentSearch, excluded_operators: Collection[int] = ()) -> list[OperatorSegment]:
    """Return the segments; segments under a scheme with a planner are divided at the lowest cost.

    Parameters
    ----------
    excluded_operators : collection of int
        Operators, by number, that belong to no segment.
    """
    segments = search.find_segments(excluded_operators=excluded_operators)
    first_operators = set[int]()
    for segment in segments:
        first_record = next(iter(segment.records.values()))
        policy = policy_of_module(first_record.where.module, search.schemes)
        profile = policy.planner_profile(search.mesh.size) if isinstance(policy, FusionScheme) else None
        if profile is not None:
            first_operators |= _SegmentDivision(search, segment, profile).first_operators
    return search.find_segments(first_operators, excluded_operators) if first_operators else segments


class _SegmentDivision:
    """Division of one potential segment at the lowest cost."""

    def __init__(self, search: SegmentSearch, segment: OperatorSegment, profile: MachineProfile) -> None:
        self.search, self.profile, self.operator_numbers = search, profile, list(segment.records)
        self.window_positions = [at for at, record in enumerate(segment.records.values()) if record.needs_halo_exchange]
        values = search.program.values
        self.flops = {
            number: _count_flops(record, values)
            for number, record in segment.records.items()
            if value_ids_in(record.result)
        }
        self.middle_place = tuple(parts // 2 for parts in search.mesh.parts)  # the tile with the most neighbours
        self.seconds_by_range: dict[tuple[int, int], float] = {}

    @property
    def first_operators(self) -> set[int]:
        return {
            self.operator_numbers[self.window_positions[first]]
            for first, _ in cheapest_ranges(self._segment_seconds, len(self.window_positions))
        }

    def _segment_seconds(self, first_window: int, last_window: int) -> float:
        """Return the seconds per training step of exchanges and redundant computation for a segment of windows.

        This method is called for increasingly long segments with the same end. Redundant computation grows with length:
        once it costs more than separate exchanges, the result is inf for this segment and all longer ones.
        """
        window_range = first_window, last_window
        shorter_range = first_window + 1, last_window
        if self.seconds_by_range.get(shorter_range) == inf:
            self.seconds_by_range[window_range] = inf
            return inf
        exchange_seconds, redundant_seconds = self._exchange_and_redundant_seconds(first_window, last_window)
        separate_seconds = sum(self.seconds_by_range[at, at] for at in range(first_window, last_window))
        separate_seconds += self.seconds_by_range.get((last_window, last_window), inf)
        seconds = inf if redundant_seconds > separate_seconds else exchange_seconds + redundant_seconds
        self.seconds_by_range[window_range] = seconds
        return seconds

    def _exchange_and_redundant_seconds(self, first_window: int, last_window: int) -> tuple[float, float]:
        search, values = self.search, self.search.program.values
        window_bounds = [*self.window_positions, len(self.operator_numbers)]
        start, end = window_bounds[first_window], window_bounds[last_window + 1]
        segment = search.build_segment_of(self.operator_numbers[start:end])
        layouts = [even_layout(out, search.mesh) for out in segment.traced.outputs]
        own_ranges = ranges_at(layouts, dict(enumerate(self.middle_place)))
        output_ranges = extend_empty_ranges(own_ranges, own_ranges)
        exchange_seconds = sum(
            self._exchange_seconds(values[value], ranges, 1 + (value not in search.program.image_value_ids))
            for value, ranges in zip(segment.inputs, segment.traced.source_ranges(output_ranges), strict=True)
            if value in values
        )
        redundant_flops = sum(
            self.flops[number] * self._redundant_share(segment, values[value_ids_in(record.result)[0]], output_ranges)
            for number, record in segment.records.items()
            if number in self.flops
        )
        return exchange_seconds, TRAINING_COST_FACTOR * redundant_flops / self.profile.flops_per_second

    def _exchange_seconds(self, value: Value, ranges: tuple[Range, ...], num_directions: int) -> float:
        """Return the seconds that the middle rank needs to receive the required cells of a value."""
        mesh = self.search.mesh
        dims = enumerate(zip(value.layout, ranges, strict=True))
        requests = (DimRequest(dim, atom, None, ((cells,),)) for dim, ((atom,), cells) in dims if atom.axis is not None)
        rank = mesh.rank(self.middle_place)
        pieces = [piece for piece in ViewTransfer(mesh.parts, tuple(requests)).receives(rank) if piece.peer != rank]
        unpartitioned_size = prod(n for n, (atom,) in zip(value.shape, value.layout, strict=True) if atom.axis is None)
        received_bytes = sum(piece.source.size for piece in pieces) * unpartitioned_size * value.dtype.itemsize
        return num_directions * (len(pieces) * self.profile.latency + received_bytes / self.profile.bandwidth)

    def _redundant_share(self, segment: OperatorSegment, value: Value, output_ranges: AxisRanges) -> float:
        """Return the number of cells that the middle rank computes beyond its own, as a fraction of the whole value."""
        symbol_ranges = segment.traced.symbol_ranges(output_ranges)
        own_share = computed_share = 1.0
        for (atom,), (block,) in zip(value.layout, segment.segment_values[value.id].layout, strict=True):
            if atom.axis is not None and block.origin is not None:
                origin, factor = block.origin
                first, last = atom.range(self.middle_place)
                lo, hi = symbol_ranges.get(origin, (0, 0))
                own_share *= (last - first) / atom.extent
                computed_share *= (hi - lo) * factor / atom.extent
        return max(0.0, computed_share - own_share)


def _count_flops(record: OperatorRecord, values: dict[int, Value]) -> float:
    """Return the forward FLOPs of an operator on the whole image, at least one per element."""

    def as_meta_tensor(leaf: object) -> object:
        if not isinstance(leaf, Value):
            return leaf
        value = values[leaf.id]
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    min_flops = prod(values[value_ids_in(record.result)[0]].shape)
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            args, kwargs = pytree.tree_map(as_meta_tensor, (list(record.args), dict(record.kwargs)))
            record.target(*args, **kwargs)
    except Exception:  # the operator needs values, which meta tensors lack, so it is not a product
        return min_flops
    return max(min_flops, counter.get_total_flops())
