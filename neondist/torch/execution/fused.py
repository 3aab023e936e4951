"""Fused segments of a module: one exchange for several operators, or strips of a tile one after the other.

Each rank receives, in one exchange, all that its tiles of a segment's results depend on, and recomputes cells of other
tiles. Only own results are passed on, so that gradients are those of one process; norms count each cell once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...geometry import DimRequest, Range, joined
from ...halo import ExchangePolicy, Fusion
from ..exchange.functions import Moments
from ..ir.errors import UnsupportedOperator
from ..ir.graph import IN_PLACE, Value
from ..ir.layout import Layout, Mesh, NeededRanges, at_place, axes_of, local_shape
from ..lowering.steps import Where
from .blocked import Blocks, at_least_one
from .choosing import segments_of
from .in_blocks import AxisRanges, Traced, first_indices, paired, part_of_block
from .program_lowering import OperatorRecord, ProgramLowering, laid, ranges_at
from .segments import KEY, OperatorSegment, Search, Strips


@dataclass(frozen=True)
class _Deferred:
    """Placeholder for a value of the program that a segment has yet to compute."""

    value: int


class FusedLowering(ProgramLowering):
    """Lowering of a module with fused segments.

    Parameters
    ----------
    segments : sequence of OperatorSegment
    images : sequence of int
        Ids of the inputs of the program.

    Attributes
    ----------
    overlaps : list of NeededRanges
        Ranges of the inputs passed to each rank, where they exceed its tile.
    """

    def __init__(self, mesh: Mesh, rank: int, segments: Sequence[OperatorSegment], images: Sequence[int]) -> None:
        super().__init__(mesh, rank)
        self._by_number = {number: segment for segment in segments for number in segment.records}
        self.program = dict[int, Value]()  # values of the program that segments read or return
        self.in_parts = any(segment.rows for segment in segments)
        self._segments = segments
        # for inputs of norms: the samples and the cells that count on this rank
        self._own_cells: dict[int, tuple[Range, tuple[slice, ...]]] = {}
        self._needed = {segment.first: self._input_ranges(segment.parts) for segment in segments}
        self.overlaps = [self._widened_ranges(image) for image in images]
        self._waiting = iter(self.overlaps)
        self._entered: dict[int, tuple[Value, NeededRanges]] = {}  # for tiles: the passed value and its ranges

    @property
    def note(self) -> str:  # type: ignore[override]
        """Description of the segments."""
        windows = sum(record.windows for segment in self._segments for record in segment.records.values())
        rows = [segment.rows for segment in self._segments]
        text = f"segments: {len(rows)}, with {windows} windows and the operators after them"
        return f"{text}, in strips of {_range(rows)} rows" if self.in_parts else text

    def read(self, env: Mapping[Any, Any], arg: Any) -> Any:
        """Return the value of an argument, results of segments included."""
        return pytree.tree_map(
            lambda leaf: self.program.get(leaf.value, leaf) if isinstance(leaf, _Deferred) else leaf,
            super().read(env, arg),
        )

    def lower_program_call(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the values of an operator, or placeholders until the last operator of its segment is reached."""
        segment = self._by_number.get(self.number)
        if segment is None:
            return self.lower_by_rule(target, args, kwargs)
        record = segment.records[self.number]
        pairs = paired((record.args, record.kwargs), (args, kwargs))
        self.program.update((old, new) for old, new in pairs if isinstance(new, Value))
        if self.number == max(segment.records):
            self.run_segment(segment)
        return placeholders(record)

    def image(self, layout: Layout, dtype: torch.dtype) -> tuple[Value, Value]:
        """Return the value that a module's input is passed as, with cells around the tile if needed, and its tile."""
        needed, axes = next(self._waiting), axes_of(layout)
        if not needed:
            return super().image(layout, dtype)
        ranges = at_place(needed, self.place)
        own = {dim: layout[dim][0].range(self.place) for dim in ranges}
        self.where = Where("tile", "", "")
        passed = self._value(_cells(local_shape(layout, self.place), ranges), axes, dtype, "value")
        (tile,) = self._locals(partial(_narrow, ranges=own, held=ranges), [passed], [layout], [dtype], axes)
        self.steps[-1].key = None  # the same step on a rank without cells
        self._entered[tile.id] = passed, needed
        return passed, tile

    def _input_ranges(self, parts: Sequence[Traced]) -> dict[int, NeededRanges]:
        """Return the ranges of each input, by its id in the parts, that each part of an axis needs for its tiles."""
        inputs = {value.id: laid(value, self.mesh) for part in parts for value in part.inputs}
        needs = {
            axis: [self._sources(parts, {axis: part}) for part in range(self.mesh.parts[axis])]
            for axis in self.mesh.axes
        }
        return {
            value: {
                dim: (atom.axis, [sources[value][dim] for sources in needs[atom.axis]])
                for dim, (atom,) in enumerate(layout)
                if atom.axis is not None
            }
            for value, layout in inputs.items()
        }

    def _sources(self, parts: Sequence[Traced], place: Mapping[int, int]) -> dict[int, tuple[Range, ...]]:
        """Return the ranges of the inputs that the ranks at a place of some axes need."""
        sources = dict[int, tuple[Range, ...]]()
        for part in parts:
            own = self.tiles_of(part, place)
            for value, ranges in zip(part.inputs, part.sources(at_least_one(own, own)), strict=True):
                sources[value.id] = tuple(map(joined, sources.get(value.id, ranges), ranges))
        return sources

    def tiles_of(self, part: Traced, place: Mapping[int, int] | None = None) -> AxisRanges:
        """Return the ranges of the outputs on this rank, or on those at a place of some axes."""
        layouts = [laid(out, self.mesh) for out in part.outputs]
        return ranges_at(layouts, dict(enumerate(self.place)) if place is None else place)

    def _widened_ranges(self, image: int) -> NeededRanges:
        """Return the ranges of an image passed to each rank: its tile, and margins that segments read locally."""
        widened: NeededRanges = {}
        for segment in self._segments:
            if segment.wide and image in segment.inputs:
                value = segment.inputs[image]
                own = laid(value, self.mesh)
                for dim, (axis, ranges) in self._needed[segment.first][value.id].items():
                    _, before = widened.get(dim, (axis, own[dim][0].ranges))
                    widened[dim] = axis, list(map(joined, before, ranges))
        return widened

    def input_views(self, segment: OperatorSegment) -> tuple[dict[int, Value], dict[int, list[int]]]:
        """Return this rank's views of a segment's inputs, and the first indices of each, by ids in the segment."""
        views, first = dict[int, Value](), dict[int, list[int]]()
        for number, local in segment.inputs.items():
            needed = self._needed[segment.first][local.id]
            views[local.id], ranges = self._view_of(self.program[number], needed), at_place(needed, self.place)
            first[local.id] = [ranges[dim][0] if dim in ranges else 0 for dim in range(len(local.layout))]
        return views, first

    def _view_of(self, value: Value, needed: NeededRanges) -> Value:
        """Return this rank's view of a value: without messages if it was passed with the image."""
        passed, cells = self._entered.get(value.id, (value, {}))
        if not (cells and all(_contains(cells[dim][1], ranges) for dim, (_, ranges) in needed.items())):
            views = (
                DimRequest(dim, self.atom(value, dim), axis, tuple((indices,) for indices in ranges))
                for dim, (axis, ranges) in sorted(needed.items())
            )
            moved = [request for request in views if not request.is_own]
            return self.transferred(value, moved, self.mesh.axes) if moved else self.enter(value, self.mesh.axes)
        ranges = at_place(needed, self.place)
        source = self.enter(passed, self.mesh.axes)
        view = self._value(_cells(source.local, ranges), self.mesh.axes, value.dtype, value.kind)
        run = partial(_narrow, ranges=ranges, held=at_place(cells, self.place))
        self._step("local", [source], [view], run=lambda x: (run(x),))
        return view

    def normalise(
        self, x: Value, weight: Value | None, bias: Value | None, moments: Moments, groups: Layout
    ) -> tuple[Value, Value, Value]:
        """Return x normalised; other ranks may have some of its cells too."""
        if x.id in self._own_cells:
            (first, last), own = self._own_cells[x.id]
            moments = moments._replace(own=own, idle=first == last)
        return super().normalise(x, weight, bias, moments, groups)

    def run_segment(self, segment: OperatorSegment) -> None:
        """Add the steps of a segment."""
        self.where = segment.records[segment.first].where
        if KEY in segment.inputs:
            self.program[KEY], _ = self.random_key()
        views, first = self.input_views(segment)
        if segment.rows:
            self._run_strips(segment, views, first)
        else:
            self._run_whole_tile(segment, views)

    def _run_strips(
        self, segment: OperatorSegment, views: Mapping[int, Value], first: Mapping[int, Sequence[int]]
    ) -> None:
        """Add a step that computes the segment strip by strip, and recomputes it in the backward pass."""
        blocks = Blocks(segment.traced, self.tiles_of(segment.traced), [1] * len(self.mesh.parts), first)
        blocks.parts = tuple(-(-n // segment.rows) if axis == 1 else 1 for axis, n in enumerate(blocks.extents()))
        self.where = Where("strips", self.where.module, self.where.source)
        self.program.update(zip(segment.outputs, self.in_blocks(blocks, views), strict=True))

    def in_blocks(
        self, blocks: Blocks, views: Mapping[int, Value], layouts: Sequence[Layout] | None = None
    ) -> list[Value]:
        """Add a step that computes its results block by block, and recomputes them in the backward pass.

        Parameters
        ----------
        layouts : of partial results; default: results are tiles of the outputs
        """
        outputs, args = blocks.traced.outputs, [views[value.id] for value in blocks.traced.inputs]
        results = self._locals(
            blocks,
            args,
            layouts or [laid(out, self.mesh) for out in outputs],
            [out.dtype for out in outputs],
            self.mesh.axes,
            several=True,
            partial=layouts is not None,
        )
        self.steps[-1].key = None  # this rank may have no index of some outputs
        return results

    def _run_whole_tile(self, segment: OperatorSegment, views: Mapping[int, Value]) -> None:
        """Add steps that compute the segment for the whole tile and the cells around it."""
        traced, own_ranges = segment.traced, self.tiles_of(segment.traced)
        steps, values = traced.at(at_least_one(own_ranges, own_ranges))
        held, norms = dict(views), {norm.y.id: number for number, norm in segment.norms.items()}
        if any(values[value.id].local != held[value.id].local for value in traced.inputs):
            raise RuntimeError("a segment received cells other than those it needs; this is a bug in neondist")
        ends = {out.id: (laid(out, self.mesh), own) for out, own in zip(traced.outputs, own_ranges, strict=True)}
        for step in steps:
            if (first := step.outputs[0]) in norms:
                x = segment.norms[norms[first]].x.id
                held[first] = self._norm(segment, norms[first], held, values[x], *ends[x])
                continue
            for value in (values[out] for out in step.outputs):
                held[value.id] = self._value(value.local, self.mesh.axes, value.dtype, value.kind)
            inputs, outputs = (tuple(held[value].id for value in of) for of in (step.inputs, step.outputs))
            self.steps.append(replace(step, inputs=inputs, outputs=outputs, op="" if step.op in IN_PLACE else step.op))
        for number in segment.outputs:
            local = segment.local_values[number].id
            if local in ends:
                self.program[number] = self._tile(held[local], values[local], *ends[local])

    def _tile(self, wide: Value, block: Value, layout: Layout, ranges: Sequence[Range]) -> Value:
        """Return this rank's tile of a value of which it may have more cells."""
        run = partial(part_of_block, layout=block.layout, ranges=ranges)
        (tile,) = self._locals(run, [wide], [layout], [wide.dtype], self.mesh.axes)
        self.steps[-1].key = None  # the same step on a rank without cells
        return tile

    def _norm(
        self,
        segment: OperatorSegment,
        number: int,
        held: Mapping[int, Value],
        block: Value,
        layout: Layout,
        own: Sequence[Range],
    ) -> Value:
        """Lower a norm for all cells of its input on this rank, of which only its own count; return the result."""
        record, normed = segment.records[number], segment.norms[number].x.id
        x = replace(held[normed], layout_or_none=layout)
        cells = tuple(slice(lo - at, hi - at) for (lo, hi), at in zip(own, first_indices(block.layout), strict=True))
        self._own_cells[x.id] = own[0], cells[2:]
        self.where, self.out, self.draws = record.where, record.out, record.draws

        def substitute(leaf: Any) -> Any:
            if not isinstance(leaf, Value):
                return leaf
            local = segment.local_values[leaf.id].id
            return x if local == normed else held.get(local, self.program.get(leaf.id))

        result = self.lower_by_rule(record.target, *pytree.tree_map(substitute, (record.args, record.kwargs)))
        y, *_ = pytree.tree_leaves(result)
        y.layout_or_none = None  # it has more cells than the tile, too
        self.program.update(paired(record.result, result))
        return y


def placeholders(record: OperatorRecord) -> Any:
    """Return the results of an operator, with placeholders for values."""
    return pytree.tree_map(lambda leaf: _Deferred(leaf.id) if isinstance(leaf, Value) else leaf, record.result)


def _narrow(x: torch.Tensor, ranges: Mapping[int, Range], held: Mapping[int, Range]) -> torch.Tensor:
    """Return ranges of some dimensions of a tensor that has the ranges `held`; they may be empty."""
    for dim, (lo, hi) in ranges.items():
        x = x.narrow(dim, max(0, lo - held[dim][0]), max(0, hi - lo))
    return x


def _cells(shape: Sequence[int], ranges: Mapping[int, Range]) -> tuple[int, ...]:
    """Return the shape restricted to ranges of some dimensions."""
    extents = {dim: max(0, hi - lo) for dim, (lo, hi) in ranges.items()}
    return tuple(extents.get(dim, n) for dim, n in enumerate(shape))


def _contains(outer: Sequence[Range], inner: Sequence[Range]) -> bool:
    return all(lo >= hi or (first <= lo and hi <= last) for (lo, hi), (first, last) in zip(inner, outer, strict=True))


def _range(numbers: Sequence[int]) -> str:
    lo, hi = min(numbers), max(numbers)
    return str(lo) if lo == hi else f"{lo} to {hi}"


def fused(
    program: Any,
    mesh: Mesh,
    rank: int,
    layouts: Sequence[Layout],
    gather_at: Sequence[str],
    schemes: Mapping[str, ExchangePolicy],
    strips: Strips,
) -> FusedLowering | None:
    """Return a lowering of a program in segments if schemes or strips require any, else None."""
    fusing = mesh.axes and any(isinstance(policy, Fusion) for policy in schemes.values())
    if not fusing and strips is None:
        return None
    try:
        search = Search(program, mesh, layouts, gather_at, schemes, strips)
        segments = segments_of(search)
    except UnsupportedOperator:  # it is refused without segments too, or has rows that cannot be partitioned
        if any(isinstance(policy, Fusion) and policy.reads_wide for policy in schemes.values()):
            raise
        return None
    return FusedLowering(mesh, rank, segments, search.program.images) if segments else None
