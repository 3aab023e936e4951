"""Fused segments of a module: several operators that need only one exchange, or that are computed strip by strip.

Each rank receives, in one exchange, all cells on which its tiles of a segment's results depend, and recomputes cells of
other tiles. Only results in the rank's own tile leave the segment, so that gradients are those of one process; norms
count each cell once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...geometry import DimRequest, Range, hull_of_ranges
from ...terminal.console import counted
from ..exchange.normalisation import MomentsSpec
from ..ir.graph import IN_PLACE_VARIANTS, Value
from ..ir.layout import Layout, Mesh, NeededRanges, axes_of, local_shape, ranges_at_place
from ..lowering.steps import OperatorPosition
from .block_lowering import AxisRanges, TracedSubgraph, crop_block, first_indices, pair_ids_with_values
from .program_lowering import OperatorRecord, ProgramLowering, even_layout, ranges_at
from .recomputed_blocks import RecomputedBlocks, extend_empty_ranges
from .segments import SEED_INPUT_NUMBER, OperatorSegment


@dataclass(frozen=True)
class _DeferredValue:
    """Placeholder for a value of the program that a segment has yet to compute."""

    value_id: int


class FusedLowering(ProgramLowering):
    """Lowering of a module with fused segments.

    Parameters
    ----------
    image_value_ids : sequence of int
        Ids of the inputs of the program.
    """

    def __init__(
        self, mesh: Mesh, rank: int, segments: Sequence[OperatorSegment], image_value_ids: Sequence[int]
    ) -> None:
        super().__init__(mesh, rank)
        self._segment_of_operator = {number: segment for segment in segments for number in segment.records}
        self.program_values = dict[int, Value]()  # values of the program that segments read or return
        self.subdivides_tiles = any(segment.strip_rows for segment in segments)
        self._segments = segments
        # by id of a norm's input: this rank's own samples and cells, which enter the norm's sums
        self._own_cells_by_id: dict[int, tuple[Range, tuple[slice, ...]]] = {}
        self._input_ranges_by_segment = {s.first_operator: self._input_ranges(s.subgraphs) for s in segments}
        self.widened_ranges = [self._widened_ranges(image) for image in image_value_ids]
        self._widened_ranges_iterator = iter(self.widened_ranges)
        self._widened_values: dict[int, tuple[Value, NeededRanges]] = {}  # by tile id: the passed value and its ranges

    @property
    def group_description(self) -> str:  # type: ignore[override]
        """Description of the segments."""
        num_windows = sum(record.needs_halo_exchange for s in self._segments for record in s.records.values())
        rows_by_segment = [segment.strip_rows for segment in self._segments]
        text = f"segments: {len(rows_by_segment)}, with {counted(num_windows, 'window')} and the operators after them"
        return f"{text}, in strips of {_format_range(rows_by_segment)} rows" if self.subdivides_tiles else text

    def read(self, env: Mapping[Any, Any], arg: Any) -> Any:
        """Return the value of an argument, which may be a result of a segment."""
        return pytree.tree_map(
            lambda leaf: self.program_values.get(leaf.value_id, leaf) if isinstance(leaf, _DeferredValue) else leaf,
            super().read(env, arg),
        )

    def lower_program_call(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return an operator's values; in a segment, return placeholders, and add the steps at the last operator."""
        segment = self._segment_of_operator.get(self.operator_number)
        if segment is None:
            return self.lower_by_rule(target, args, kwargs)
        record = segment.records[self.operator_number]
        pairs = pair_ids_with_values((record.args, record.kwargs), (args, kwargs))
        self.program_values.update((old, new) for old, new in pairs if isinstance(new, Value))
        if self.operator_number == max(segment.records):
            self.add_segment_steps(segment)
        return results_with_placeholders(record)

    def passed_image_and_tile(self, layout: Layout, dtype: torch.dtype) -> tuple[Value, Value]:
        """Return the value passed as a module input (the tile, widened if necessary), and the tile itself."""
        needed_ranges = next(self._widened_ranges_iterator)
        axes = axes_of(layout)
        if not needed_ranges:
            return super().passed_image_and_tile(layout, dtype)
        ranges = ranges_at_place(needed_ranges, self._place)
        tile_ranges = {dim: layout[dim][0].range(self._place) for dim in ranges}
        self.where = OperatorPosition("tile", "", "")
        passed_value = self._new_value(_restrict_shape(local_shape(layout, self._place), ranges), axes, dtype, "value")
        crop = partial(_narrow_dims, ranges=tile_ranges, held_ranges=ranges)
        (tile,) = self._add_local(crop, [passed_value], [layout], [dtype], axes)
        self.steps[-1].kind_args = None  # ranks without cells run the same step
        self._widened_values[tile.id] = passed_value, needed_ranges
        return passed_value, tile

    def _input_ranges(self, subgraphs: Sequence[TracedSubgraph]) -> dict[int, NeededRanges]:
        """Return, by id of each input, the ranges that the ranks at each coordinate of a mesh axis need."""
        input_layouts = {value.id: even_layout(value, self.mesh) for subgraph in subgraphs for value in subgraph.inputs}
        source_ranges_by_axis = {
            axis: [self._source_ranges(subgraphs, {axis: coordinate}) for coordinate in range(self.mesh.parts[axis])]
            for axis in self.mesh.axes
        }
        return {
            value: {
                dim: (atom.axis, [sources[value][dim] for sources in source_ranges_by_axis[atom.axis]])
                for dim, (atom,) in enumerate(layout)
                if atom.axis is not None
            }
            for value, layout in input_layouts.items()
        }

    def _source_ranges(
        self, subgraphs: Sequence[TracedSubgraph], mesh_coordinates: Mapping[int, int]
    ) -> dict[int, tuple[Range, ...]]:
        """Return the ranges of the inputs that ranks with the given coordinates on some mesh axes need."""
        ranges_by_id = dict[int, tuple[Range, ...]]()
        for subgraph in subgraphs:
            own_ranges = self.own_ranges_of(subgraph, mesh_coordinates)
            source_ranges = subgraph.source_ranges(extend_empty_ranges(own_ranges, own_ranges))
            for value, ranges in zip(subgraph.inputs, source_ranges, strict=True):
                ranges_by_id[value.id] = tuple(map(hull_of_ranges, ranges_by_id.get(value.id, ranges), ranges))
        return ranges_by_id

    def own_ranges_of(self, subgraph: TracedSubgraph, mesh_coordinates: Mapping[int, int] | None = None) -> AxisRanges:
        """Return the ranges of the outputs on this rank, or on ranks with the given coordinates on some mesh axes."""
        layouts = [even_layout(out, self.mesh) for out in subgraph.outputs]
        own_coordinates = dict(enumerate(self._place))
        return ranges_at(layouts, own_coordinates if mesh_coordinates is None else mesh_coordinates)

    def _widened_ranges(self, image_id: int) -> NeededRanges:
        """Return the ranges of an image that each rank gets, with the margins of segments; {} without margins."""
        widened: NeededRanges = {}
        for segment in self._segments:
            if segment.has_margin and image_id in segment.inputs:
                value = segment.inputs[image_id]
                own = even_layout(value, self.mesh)
                for dim, (axis, ranges) in self._input_ranges_by_segment[segment.first_operator][value.id].items():
                    _, previous_ranges = widened.get(dim, (axis, own[dim][0].ranges))
                    widened[dim] = axis, list(map(hull_of_ranges, previous_ranges, ranges))
        return widened

    def input_views_and_offsets(self, segment: OperatorSegment) -> tuple[dict[int, Value], dict[int, list[int]]]:
        """Return this rank's views of a segment's inputs, and the first indices of the views, by id in the segment."""
        views = dict[int, Value]()
        view_offsets = dict[int, list[int]]()
        for number, local in segment.inputs.items():
            needed_ranges = self._input_ranges_by_segment[segment.first_operator][local.id]
            ranges = ranges_at_place(needed_ranges, self._place)
            views[local.id] = self._view_of(self.program_values[number], needed_ranges)
            view_offsets[local.id] = [ranges[dim][0] if dim in ranges else 0 for dim in range(len(local.layout))]
        return views, view_offsets

    def _view_of(self, value: Value, needed_ranges: NeededRanges) -> Value:
        """Return this rank's view of a value; no messages are needed if the view is part of the widened tile."""
        axes = self.mesh.axes
        passed_value, passed_ranges = self._widened_values.get(value.id, (value, {}))
        if not (
            passed_ranges and all(_covers(passed_ranges[dim][1], ranges) for dim, (_, ranges) in needed_ranges.items())
        ):
            requests = (
                DimRequest(dim, self.single_atom(value, dim), axis, tuple((indices,) for indices in ranges))
                for dim, (axis, ranges) in sorted(needed_ranges.items())
            )
            exchange_requests = [request for request in requests if not request.requests_only_own_cells]
            if not exchange_requests:
                return self.sum_gradient(value, axes)
            return self.transfer(value, exchange_requests, axes)
        ranges = ranges_at_place(needed_ranges, self._place)
        source = self.sum_gradient(passed_value, axes)
        view = self._new_value(_restrict_shape(source.local, ranges), axes, value.dtype, value.kind)
        narrow = partial(_narrow_dims, ranges=ranges, held_ranges=ranges_at_place(passed_ranges, self._place))
        self._add_step("local", [source], [view], run=lambda x: (narrow(x),))
        return view

    def normalise(
        self, x: Value, weight: Value | None, bias: Value | None, moments: MomentsSpec, groups: Layout
    ) -> tuple[Value, Value, Value]:
        """Return x, normalised, and its statistics; other ranks may also have some of the cells of x."""
        if x.id in self._own_cells_by_id:
            (first, last), own_cells = self._own_cells_by_id[x.id]
            moments = moments._replace(own_cells=own_cells, has_placeholder_sample=first == last)
        return super().normalise(x, weight, bias, moments, groups)

    def add_segment_steps(self, segment: OperatorSegment) -> None:
        """Add the steps of a segment."""
        self.where = segment.records[segment.first_operator].where
        if SEED_INPUT_NUMBER in segment.inputs:
            self.program_values[SEED_INPUT_NUMBER], _ = self.random_key()
        views, view_offsets = self.input_views_and_offsets(segment)
        if segment.strip_rows:
            self._add_strip_step(segment, views, view_offsets)
        else:
            self._add_whole_tile_steps(segment, views)

    def _add_strip_step(
        self, segment: OperatorSegment, views: Mapping[int, Value], view_offsets: Mapping[int, Sequence[int]]
    ) -> None:
        """Add a step that computes the segment strip by strip, and recomputes it in the backward pass."""
        own_ranges = self.own_ranges_of(segment.traced)
        blocks = RecomputedBlocks(segment.traced, own_ranges, [1] * len(self.mesh.parts), view_offsets)
        extents = blocks.max_own_extents()
        blocks.block_counts = tuple(-(-n // segment.strip_rows) if axis == 1 else 1 for axis, n in enumerate(extents))
        self.where = self.where._replace(operator="strips", own_autocast=())
        self.program_values.update(zip(segment.outputs, self.add_block_step(blocks, views), strict=True))

    def add_block_step(
        self, blocks: RecomputedBlocks, views: Mapping[int, Value], layouts: Sequence[Layout] | None = None
    ) -> list[Value]:
        """Add a step that computes its results block by block, and recomputes them in the backward pass.

        Parameters
        ----------
        layouts : sequence of Layout, optional
            Layouts of partial results; default: the results are tiles of the outputs.
        """
        outputs = blocks.traced.outputs
        args = [views[value.id] for value in blocks.traced.inputs]
        results = self._add_local(
            blocks,
            args,
            layouts or [even_layout(out, self.mesh) for out in outputs],
            [out.dtype for out in outputs],
            self.mesh.axes,
            has_several_results=True,
            is_partial=layouts is not None,
        )
        self.steps[-1].kind_args = None  # the step also runs if this rank has no index of some outputs
        self.steps[-1].blocks = blocks
        return [*self.mark_constants(results, [out.kind != "constant" for out in outputs])]

    def _add_whole_tile_steps(self, segment: OperatorSegment, views: Mapping[int, Value]) -> None:
        """Add steps that compute the segment for the whole tile and the cells around it."""
        traced = segment.traced
        own_ranges = self.own_ranges_of(traced)
        steps, values = traced.steps_for(extend_empty_ranges(own_ranges, own_ranges))
        lowered_values = dict(views)
        norm_numbers = {norm.y.id: number for number, norm in segment.norms.items()}
        if any(values[value.id].local != lowered_values[value.id].local for value in traced.inputs):
            raise RuntimeError("a segment received cells other than those it needs; this is a bug in neondist")
        ranges_by_id = {out.id: ranges for out, ranges in zip(traced.outputs, own_ranges, strict=True)}
        for step in steps:
            if (y_id := step.outputs[0]) in norm_numbers:
                number = norm_numbers[y_id]
                x_id = segment.norms[number].x.id
                lowered_values[y_id] = self._lower_norm(
                    segment, number, lowered_values, values[x_id], ranges_by_id[x_id]
                )
                continue
            for value in (values[out] for out in step.outputs):
                lowered_values[value.id] = self._new_value(value.local, self.mesh.axes, value.dtype, value.kind)
            inputs, outputs = (tuple(lowered_values[value].id for value in of) for of in (step.inputs, step.outputs))
            op_name = "" if step.op_name in IN_PLACE_VARIANTS else step.op_name
            self.steps.append(replace(step, inputs=inputs, outputs=outputs, op_name=op_name))
        for number in segment.outputs:
            output = segment.segment_values[number]
            if output.id in ranges_by_id:
                value, block, ranges = lowered_values[output.id], values[output.id], ranges_by_id[output.id]
                self.program_values[number] = self._crop_to_tile(value, block, even_layout(output, self.mesh), ranges)

    def _crop_to_tile(self, value: Value, block: Value, layout: Layout, ranges: Sequence[Range]) -> Value:
        """Return this rank's tile of a value, given a block that may have more cells."""
        crop = partial(crop_block, layout=block.layout, ranges=ranges)
        (tile,) = self._add_local(crop, [value], [layout], [value.dtype], self.mesh.axes)
        self.steps[-1].kind_args = None  # ranks without cells run the same step
        return tile

    def _lower_norm(
        self,
        segment: OperatorSegment,
        operator_number: int,
        lowered_values: Mapping[int, Value],
        block: Value,
        own_ranges: Sequence[Range],
    ) -> Value:
        """Lower a norm for all cells of its input on this rank, with sums over the tile only; return the result."""
        record = segment.records[operator_number]
        norm_input = segment.norms[operator_number].x
        x = replace(lowered_values[norm_input.id], layout_or_none=even_layout(norm_input, self.mesh))
        ranges_and_offsets = zip(own_ranges, first_indices(block.layout), strict=True)
        own_slices = tuple(slice(lo - offset, hi - offset) for (lo, hi), offset in ranges_and_offsets)
        self._own_cells_by_id[x.id] = own_ranges[0], own_slices[2:]
        self.where, self.fake_out, self.draw_number = record.where, record.fake_out, record.draw_number

        def substitute(leaf: Any) -> Any:
            if not isinstance(leaf, Value):
                return leaf
            segment_value_id = segment.segment_values[leaf.id].id
            if segment_value_id == norm_input.id:
                return x
            return lowered_values.get(segment_value_id, self.program_values.get(leaf.id))

        result = self.lower_by_rule(record.target, *pytree.tree_map(substitute, (record.args, record.kwargs)))
        y, *_ = pytree.tree_leaves(result)
        y.layout_or_none = None  # like x, the result has more cells than the tile
        self.program_values.update(pair_ids_with_values(record.result, result))
        return y


def results_with_placeholders(record: OperatorRecord) -> Any:
    """Return the results of an operator, with placeholders for values."""
    return pytree.tree_map(lambda leaf: _DeferredValue(leaf.id) if isinstance(leaf, Value) else leaf, record.result)


def _narrow_dims(x: torch.Tensor, ranges: Mapping[int, Range], held_ranges: Mapping[int, Range]) -> torch.Tensor:
    """Return (possibly empty) ranges of some dimensions of a tensor that holds the ranges `held_ranges`."""
    for dim, (lo, hi) in ranges.items():
        x = x.narrow(dim, max(0, lo - held_ranges[dim][0]), max(0, hi - lo))
    return x


def _restrict_shape(shape: Sequence[int], ranges: Mapping[int, Range]) -> tuple[int, ...]:
    """Return the shape restricted to ranges of some dimensions."""
    extents = {dim: max(0, hi - lo) for dim, (lo, hi) in ranges.items()}
    return tuple(extents.get(dim, n) for dim, n in enumerate(shape))


def _covers(outer: Sequence[Range], inner: Sequence[Range]) -> bool:
    return all(lo >= hi or (first <= lo and hi <= last) for (lo, hi), (first, last) in zip(inner, outer, strict=True))


def _format_range(row_counts: Sequence[int]) -> str:
    lo, hi = min(row_counts), max(row_counts)
    return str(lo) if lo == hi else f"{lo} to {hi}"
