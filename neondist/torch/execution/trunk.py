"""Block-wise passes, for training and inference, up to the first operator that depends on the whole image.

The operators before it, the *trunk*, are one step of the plan: block by block, each rank computes its tiles of
the values that the remaining operators (the *head*) read, and keeps only these values. In the backward pass each block
is recomputed and propagates its part of the gradient. Blocks overlap in their inputs but not in their outputs, so
sums are exact.

A norm that uses statistics of its input ends the trunk, unless memory is insufficient: then a sweep over the blocks
before the norm computes the statistics. Like parameters, they are inputs of the blocks of later sweeps, with gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, prod
from typing import Any

import torch
from torch import nn

from ...errors import ConfigError
from ...system.memory import format_bytes, format_limit_for
from ...terminal.console import counted
from ..exchange.normalisation import MomentsSpec
from ..ir.errors import UnsupportedOperator
from ..ir.graph import Value
from ..ir.layout import Layout, Mesh, default_layout, is_box, replicated
from ..lowering.plan import TorchPlan
from ..lowering.steps import OperatorPosition
from ..lowering.training_memory import TrainingMemory
from .block_lowering import InputNorm, TracedSubgraph, pair_ids_with_values, value_ids_in
from .fused_lowering import FusedLowering, results_with_placeholders
from .program_lowering import OperatorRecord, RecordedProgram, even_layout
from .recomputed_blocks import BlockMoments, RecomputedBlocks
from .segment_planner import plan_segments
from .segments import SEED_INPUT_NUMBER, OperatorSegment, SegmentBuilder, SegmentSearch

COPIES_OF_WEIGHTS_IN_TRAINING = 4
"""Copies of the weights in training: values, gradients, and an optimiser state of two arrays."""
MAX_FAST_BLOCKS = 256
"""Number of blocks of a rank above which a step may be slow, since each block has overhead and overlaps others."""
TRUNK_STEP_NAME = "blocks"
"""Name of the step that computes the trunk."""


class _TrunkBuilder(SegmentBuilder):
    """Trunk under construction: a segment that begins at the image and whose blocks also partition the samples."""

    def __init__(self, search: SegmentSearch, max_norms: int) -> None:
        program = search.program
        super().__init__(program, frozenset(range(program.mesh.spatial_ndim + 1)), max_norms)
        self.search, self.initial_value_ids = search, {*program.initial_value_ids}
        for number in program.image_value_ids:
            value = program.values[number]
            self.segment_values[number] = self.add_input(number, value, default_layout(value.shape, self.mesh))
            if len(value.shape) == program.mesh.spatial_ndim + 2:
                self.window_depth_by_value[number] = 0

    def can_read_inputs_of(self, record: OperatorRecord) -> bool:
        """Return whether all values that an operator reads are in the trunk, or can be passed to it."""
        return all(value in self.segment_values or value in self.initial_value_ids for value in record.read_value_ids)

    def require_boxes(self, record: OperatorRecord, result: Any, norms: Sequence[InputNorm]) -> None:
        """Reject windows under approximate schemes; accept all other operators, as only outputs must be boxes."""
        if record.needs_halo_exchange and self.search.is_approximate(record):
            self.refuse("its border scheme is not exact")


@dataclass(frozen=True, kw_only=True)
class Trunk(OperatorSegment):
    """Segment that begins at the image and is computed block by block.

    Attributes
    ----------
    norm_sweeps : sequence of TracedSubgraph
        For each input norm, the computation of its input, given the statistics of the previous norms.
    refusal : UnsupportedOperator or None
        Error of the operator that ends the trunk.
    """

    norm_sweeps: Sequence[TracedSubgraph]
    refusal: UnsupportedOperator | None
    program: RecordedProgram

    @classmethod
    def find(cls, search: SegmentSearch, max_norms: int = 0) -> Trunk:
        """Return the trunk of a program, with at most `max_norms` input norms."""
        program = search.program
        excluded_operators = set[int]()
        while True:
            builder = _TrunkBuilder(search, max_norms)
            for number, record in enumerate(program.records):
                if number not in excluded_operators and builder.can_read_inputs_of(record):
                    builder.try_add(number, record, in_segment=builder.is_read_by(record))
            records = {at: program.records[at] for at in builder.operator_numbers}
            statistics_ids = {value for at in builder.norms for value in value_ids_in(records[at].result)[1:]}
            result_ids = builder.window_depth_by_value.keys() - statistics_ids - builder.initial_value_ids
            outputs = program.select_outputs(sorted(result_ids), records)
            segment_values = builder.segment_values
            non_box_ids = {value for value in outputs if not is_box(segment_values[value].layout, builder.mesh.axes)}
            if not non_box_ids:
                break
            excluded_operators.update(
                at for at, record in records.items() if not non_box_ids.isdisjoint(value_ids_in(record.result))
            )
        inputs = [*builder.inputs_by_program_number.values()]
        norm_sweeps = list[TracedSubgraph]()
        for norm in builder.norms.values():
            norm_sweeps.append(TracedSubgraph(builder, inputs, [norm.x]))
            inputs += norm.mean, norm.variance
        traced = TracedSubgraph(builder, inputs, [segment_values[value] for value in outputs])
        trunk_inputs = builder.inputs_of([*norm_sweeps, traced])
        return cls(
            records, trunk_inputs, outputs, segment_values, traced, builder.norms,
            norm_sweeps=norm_sweeps, refusal=builder.refusal, program=program,
        )  # fmt: skip

    @property
    def subgraphs(self) -> list[TracedSubgraph]:
        """Subgraphs in the order of their computation."""
        return [*self.norm_sweeps, self.traced]


class TrunkLowering(FusedLowering):
    """Lowering of a module whose trunk is one step, computed block by block.

    Parameters
    ----------
    segments : sequence of OperatorSegment
        Segments of the head.
    block_counts : tuple of int
        Number of blocks of this rank's tiles along each axis of the mesh.
    """

    def __init__(
        self, mesh: Mesh, rank: int, trunk: Trunk, segments: Sequence[OperatorSegment], block_counts: Sequence[int]
    ) -> None:
        super().__init__(mesh, rank, [trunk, *segments], trunk.program.image_value_ids)
        self.subdivides_tiles = True
        self.trunk, self.block_counts = trunk, tuple(block_counts)
        self.blocks = list[RecomputedBlocks]()
        self.output_tiles: list[Value] = []
        self._norm_moments: dict[int, tuple[Value, Value]] = {}  # by the id of the normalised value's placeholder

    @property
    def group_description(self) -> str:  # type: ignore[override]
        """Description of the part computed block by block."""
        text = f"memory: {' x '.join(map(str, self.block_counts))} blocks per rank (samples x space)"
        if self.trunk.norms:
            text += f", after {counted(len(self.trunk.norms), 'sweep')} for the statistics of norms"
        if prod(self.block_counts) > MAX_FAST_BLOCKS:
            text += ", so many that a step may be slow; fewer blocks suffice with more memory or more ranks"
        if self.trunk.refusal is not None:
            text += f", up to {self.trunk.refusal.operator} in module '{self.trunk.refusal.module}'"
        return text

    def lower_program_call(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the values of an operator, or placeholders if the trunk, which runs before the rest, computes them."""
        if not self.blocks:
            self._add_trunk_steps()
        record = self.trunk.records.get(self.operator_number)
        if record is None:
            return super().lower_program_call(target, args, kwargs)
        if self.operator_number in self.trunk.norms and isinstance(record.result, tuple):  # updates running statistics
            norm = self.trunk.norms[self.operator_number]
            x = self.new_input(even_layout(norm.x, self.mesh), norm.x.dtype)
            self._norm_moments[x.id] = self._trunk_input_views[norm.mean.id], self._trunk_input_views[norm.variance.id]
            _, *running_statistics = self.lower_by_rule(target, (x, *args[1:]), kwargs)
            self.program_values.update(pair_ids_with_values(record.result[1:], running_statistics))
        return results_with_placeholders(record)

    def normalise(
        self, x: Value, weight: Value | None, bias: Value | None, moments: MomentsSpec, groups: Layout
    ) -> tuple[Value, Value, Value]:
        """Return x, normalised, and its statistics; for a norm of the trunk, x itself and the trunk's statistics."""
        if x.id in self._norm_moments:  # running statistics have no gradient, but the statistics of the trunk do
            mean, variance = map(self.detach, self._norm_moments[x.id])
            return x, mean, variance
        return super().normalise(x, weight, bias, moments, groups)

    def _add_trunk_steps(self) -> None:
        trunk = self.trunk
        where, draw_number = self.where, self.draw_number
        self.where = OperatorPosition(TRUNK_STEP_NAME, "", "")
        self.program_values.update(zip(trunk.program.initial_value_ids, self.input_values, strict=True))
        if SEED_INPUT_NUMBER in trunk.inputs:
            self.program_values[SEED_INPUT_NUMBER], _ = self.random_key()
        views, view_offsets = self.input_views_and_offsets(trunk)
        for sweep, norm in zip(trunk.norm_sweeps, trunk.norms.values(), strict=True):
            self.where = OperatorPosition(TRUNK_STEP_NAME, "", "")
            moments = BlockMoments(norm.moments, sweep, self.own_ranges_of(sweep), self.block_counts, view_offsets)
            self.blocks.append(moments)
            (moments_value,) = self.add_block_step(moments, views, [replicated(moments.shape)])
            moments_value.axes = self.mesh.axes
            self.where = OperatorPosition("statistics", "", "")
            views[norm.mean.id] = mean = self._add_mean(moments.sum_of_elements, [moments_value], norm)
            views[norm.variance.id] = self._add_mean(moments.sum_of_squared_deviations, [moments_value, mean], norm)
        self.where = OperatorPosition(TRUNK_STEP_NAME, "", "")
        self._trunk_input_views = views
        own_ranges = self.own_ranges_of(trunk.traced)
        self.blocks.append(RecomputedBlocks(trunk.traced, own_ranges, self.block_counts, view_offsets))
        self.output_tiles = self.add_block_step(self.blocks[-1], views)
        self.program_values.update(zip(trunk.outputs, self.output_tiles, strict=True))
        self.where, self.draw_number = where, draw_number

    def _add_mean(self, run: Callable[..., torch.Tensor], args: Sequence[Value], norm: InputNorm) -> Value:
        total = self.allreduce_local_result(run, args, args[0].axes, norm.mean.layout)
        return self.local(lambda a: a / norm.moments.group_size, [total], total.layout)


def create_trunk_lowering(
    search: SegmentSearch,
    segments: Sequence[OperatorSegment],
    rank: int,
    lower: Callable[..., tuple[TorchPlan, Any]],
    memory: int,
    module: nn.Module,
    plan_without_blocks: TorchPlan | None = None,
) -> FusedLowering | None:
    """Return a lowering whose pass fits in a rank's memory, with blocks only if necessary, or None for the default.

    The plan of the first rank, whose tiles are the largest, determines the lowering of all ranks.

    Parameters
    ----------
    segments : sequence of OperatorSegment
        Segments of the whole program.
    lower : callable
        Maps a lowering to the first rank's plan of the program, and the tree structure of the outputs.
    plan_without_blocks : TorchPlan, optional
        The first rank's plan without blocks, if it is known.

    Raises
    ------
    UserError
        A pass does not fit in memory; the message names the operator that ends the trunk, if there is one.
    """
    tensors = (*module.parameters(), *module.buffers())
    weight_bytes = COPIES_OF_WEIGHTS_IN_TRAINING * sum(tensor.nbytes for tensor in tensors)
    limit_bytes = memory - weight_bytes
    mesh, image_value_ids = search.mesh, search.program.image_value_ids
    trained_names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]

    def peak_function_of(plan: TorchPlan) -> Callable[[], int]:
        return partial(TrainingMemory(plan, trained_names).peak, 0) if module.training else lambda: plan.peak()[0]

    def create_segment_lowering(rank: int) -> FusedLowering | None:
        return FusedLowering(mesh, rank, segments, image_value_ids) if segments else None

    needed_bytes = peak_function_of(plan_without_blocks or lower(lowering=create_segment_lowering(0))[0])()
    if needed_bytes <= limit_bytes:
        return create_segment_lowering(rank)
    if search.reads_margins:
        raise ConfigError(
            f"memory: a pass needs {format_bytes(needed_bytes + weight_bytes)}, but only {format_bytes(memory)} is"
            " available, and scheme 'overlap_tile' cannot be computed block by block; use 'deep_halo' or 'halo', more"
            f" ranks, or give memory: {format_limit_for(needed_bytes + weight_bytes, mesh.size)} or more"
        )
    max_norms = 0
    suggested_bytes = needed_bytes
    while True:
        trunk = Trunk.find(search, max_norms)
        if trunk.outputs:
            head_segments = plan_segments(search, trunk.records)
            lowering = TrunkLowering(mesh, 0, trunk, head_segments, [1] * len(mesh.parts))
            plan, _ = lower(lowering=lowering)
            peaks = _divide_trunk_to_fit_memory(lowering, peak_function_of(plan), limit_bytes)
            block_counts, last_peak = next(reversed(peaks.items()))
            needed_bytes = min(peaks.values())
            if last_peak <= limit_bytes:
                return TrunkLowering(mesh, rank, trunk, head_segments, block_counts)
            suggested_bytes = _peak_with_few_blocks(peaks)
        if len(trunk.norms) < max_norms:
            break
        max_norms += 1 + max_norms // 3  # each norm costs another sweep
    shortage_message = (
        f"a pass needs {format_bytes(needed_bytes + weight_bytes)}, but only {format_bytes(memory)} is available;"
        f" use more ranks, or give memory: {format_limit_for(suggested_bytes + weight_bytes, mesh.size)} or more"
    )
    if trunk.refusal is None:
        raise ConfigError(f"memory: {shortage_message}")
    remedy = f"it and the operators after it are computed on whole tiles, so that {shortage_message}"
    raise UnsupportedOperator(trunk.refusal, trunk.refusal.why, action="be computed block by block", remedy=remedy)


def _divide_trunk_to_fit_memory(
    lowering: TrunkLowering, compute_peak: Callable[[], int], limit_bytes: int
) -> dict[tuple[int, ...], int]:
    """Divide a trunk until a pass fits in `limit_bytes` or its peak stops falling; return peaks by block counts."""
    extents = lowering.blocks[-1].max_own_extents()
    block_counts = list(lowering.block_counts)
    block_counts[0] = extents[0]
    peaks = dict[tuple[int, ...], int]()
    previous_peak = inf
    while True:
        for blocks in lowering.blocks:
            blocks.block_counts = tuple(block_counts)
        peaks[tuple(block_counts)] = peak = compute_peak()
        longest_axis = max(range(len(block_counts)), key=lambda axis: extents[axis] / block_counts[axis])
        if peak <= limit_bytes or extents[longest_axis] == block_counts[longest_axis] or peak >= previous_peak:
            return peaks
        block_counts[longest_axis] = min(2 * block_counts[longest_axis], extents[longest_axis])
        previous_peak = peak


def _peak_with_few_blocks(peaks: Mapping[tuple[int, ...], int]) -> int:
    """Return the smallest near-minimal peak with at most MAX_FAST_BLOCKS blocks; if there is none, with the fewest."""
    peaks_by_num_blocks = {prod(counts): peak for counts, peak in peaks.items() if peak <= 1.25 * min(peaks.values())}
    max_blocks = max(MAX_FAST_BLOCKS, min(peaks_by_num_blocks))
    return min(peak for num_blocks, peak in peaks_by_num_blocks.items() if num_blocks <= max_blocks)
