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

from ...geometry import Range, joined
from ...halo import ExchangePolicy, Fusion
from ..exchange.functions import Moments
from ..ir.errors import UnsupportedOperator
from ..ir.graph import IN_PLACE, Step, Value
from ..ir.layout import Layout, Mesh, NeededRanges, at_place, axes_of, local_shape
from ..lowering.steps import Where
from .blocked import Blocks, at_least_one
from .choosing import segments_of
from .in_blocks import AxisRanges, BlockLowering, Call, ids_of, paired, part_of_block
from .program_lowering import ProgramLowering, laid, ranges_at
from .run import run_local
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
        self._program: dict[int, Value] = {}  # values of the program that segments read or return
        self.in_parts = any(segment.rows for segment in segments)
        self._segments = segments
        # for inputs of norms: the samples and the cells that count on this rank
        self._own_cells: dict[int, tuple[Range, tuple[slice, ...]]] = {}
        self._needed = {segment.first: self._input_ranges_of(segment) for segment in segments}
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
            lambda leaf: self._program.get(leaf.value, leaf) if isinstance(leaf, _Deferred) else leaf,
            super().read(env, arg),
        )

    def lower_program_call(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the values of an operator, or placeholders until the last operator of its segment is reached."""
        segment = self._by_number.get(self.number)
        if segment is None:
            return self.lower_by_rule(target, args, kwargs)
        record = segment.records[self.number]
        pairs = paired((record.call.args, record.call.kwargs), (args, kwargs))
        self._program.update((old, new) for old, new in pairs if isinstance(new, Value))
        if self.number == max(segment.records):
            self._run(segment)
        return pytree.tree_map(lambda leaf: _Deferred(leaf.id) if isinstance(leaf, Value) else leaf, record.call.result)

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

    def view_of(self, value: Value, needed: NeededRanges) -> Value:
        """Return this rank's view of a value: without messages if it was passed with the image."""
        passed, cells = self._entered.get(value.id, (value, {}))
        if not (cells and all(_contains(cells[dim][1], ranges) for dim, (_, ranges) in needed.items())):
            return super().view_of(value, needed)
        ranges = at_place(needed, self.place)
        source = self.enter(passed, self.mesh.axes)
        view = self._value(_cells(source.local, ranges), self.mesh.axes, value.dtype, value.kind)
        run = partial(_narrow, ranges=ranges, held=at_place(cells, self.place))
        self._step("local", [source], [view], run=lambda x: (run(x),))
        return view

    def _input_ranges_of(self, segment: OperatorSegment) -> list[NeededRanges]:
        """Return the ranges that ranks need of the inputs of a segment."""
        outputs, inputs = ([laid(v, self.mesh) for v in of] for of in (segment.traced.outputs, segment.traced.inputs))
        return self.input_ranges([segment.traced], [outputs], inputs)

    def _widened_ranges(self, image: int) -> NeededRanges:
        """Return the ranges of an image passed to each rank: its tile, and margins that segments read locally."""
        widened: NeededRanges = {}
        for segment in self._segments:
            if segment.wide and image in segment.inputs:
                at = segment.inputs.index(image)
                own = laid(segment.traced.inputs[at], self.mesh)
                for dim, (axis, ranges) in self._needed[segment.first][at].items():
                    _, before = widened.get(dim, (axis, own[dim][0].ranges))
                    widened[dim] = axis, list(map(joined, before, ranges))
        return widened

    def normalise(
        self, x: Value, weight: Value | None, bias: Value | None, moments: Moments, groups: Layout
    ) -> tuple[Value, Value, Value]:
        """Return x normalised; other ranks may have some of its cells too."""
        if x.id in self._own_cells:
            (first, last), own = self._own_cells[x.id]
            moments = moments._replace(own=own, idle=first == last)
        return super().normalise(x, weight, bias, moments, groups)

    def _run(self, segment: OperatorSegment) -> None:
        self.where = segment.records[segment.first].call.where
        if KEY in segment.inputs:
            self._program[KEY], _ = self.random_key()
        layouts = [laid(out, self.mesh) for out in segment.traced.outputs]
        own_ranges = ranges_at(layouts, dict(enumerate(self.place)))
        values = [self._program[value] for value in segment.inputs]
        inputs, first = self.input_views(values, self._needed[segment.first])
        if segment.rows:
            self._run_strips(segment, inputs, first, layouts, own_ranges)
        else:
            self._run_whole_tile(segment, inputs, layouts, own_ranges)

    def _run_strips(
        self,
        segment: OperatorSegment,
        inputs: Sequence[Value],
        first: list[list[int]],
        layouts: Sequence[Layout],
        own_ranges: AxisRanges,
    ) -> None:
        """Add a step that computes the segment strip by strip, and recomputes it in the backward pass."""
        blocks = Blocks(segment.traced, own_ranges, [1] * len(self.mesh.parts), first)
        blocks.parts = tuple(-(-n // segment.rows) if axis == 1 else 1 for axis, n in enumerate(blocks.extents()))
        self.where = Where("strips", self.where.module, self.where.source)
        dtypes = [out.dtype for out in segment.traced.outputs]
        tiles = self._locals(blocks, inputs, layouts, dtypes, self.mesh.axes, several=True)
        self.steps[-1].key = None  # empty blocks are skipped
        self._program.update(zip(segment.outputs, tiles, strict=True))

    def _run_whole_tile(
        self, segment: OperatorSegment, inputs: Sequence[Value], layouts: Sequence[Layout], own_ranges: AxisRanges
    ) -> None:
        """Add steps that compute the segment for the whole tile and the cells around it."""
        traced = segment.traced
        lowering, env = traced.start_lowering(at_least_one(own_ranges, own_ranges))
        by_block = {env[old.id].id: value for old, value in zip(traced.inputs, inputs, strict=True)}
        for value, passed in by_block.items():
            if lowering.values[value].local != passed.local:
                raise RuntimeError("a segment received cells other than those it needs; this is a bug in neondist")
        for step in traced.constants:
            (constant,) = (traced.values[value] for value in step.outputs)
            by_block[constant.id] = self._value(constant.local, frozenset(), constant.dtype, "constant")
            self._step("local", [], [by_block[constant.id]], run=step.run)
        ends = dict(zip((out.id for out in traced.outputs), zip(layouts, own_ranges, strict=True), strict=True))
        for call in traced.calls:
            self.where, norm, start = call.where, traced.statistics.get(call.number), len(lowering.steps)
            result = lowering.repeat(call, env)
            if norm is None:
                self._group_steps(call, lowering, lowering.steps[start:], result, by_block)
            else:
                normalised = self._norm(call, env, by_block, norm.x, *ends[norm.x.id])
                by_block.update(paired(result, normalised))
            env.update(paired(call.result, result))
        for number in segment.outputs:
            block_id = segment.local_values[number].id
            wide = by_block[env[block_id].id]
            self._program[number] = self._tile(wide, env[block_id], *ends[block_id]) if block_id in ends else wide

    def _tile(self, wide: Value, block: Value, layout: Layout, ranges: Sequence[Range]) -> Value:
        """Return this rank's tile of a value of which it may have more cells."""
        run = partial(part_of_block, layout=block.layout, ranges=ranges)
        (tile,) = self._locals(run, [wide], [layout], [wide.dtype], self.mesh.axes)
        self.steps[-1].key = None  # the same step on a rank without cells
        return tile

    def _group_steps(
        self, call: Call, lowering: BlockLowering, steps: Sequence[Step], result: Any, by_block: dict[int, Value]
    ) -> None:
        """Add the steps of a rule as a single step, on every rank alike; add its results to `by_block`."""
        outputs = ids_of(result)
        read = {value for step in steps for value in step.inputs}.union(outputs)
        read_here = sorted(read & by_block.keys(), key=lambda value: by_block[value].id)
        run = partial(_run_steps, steps, lowering.values, read_here, outputs)
        block_values = [lowering.values[value] for value in outputs]
        values = [self._value(value.local, self.mesh.axes, value.dtype, value.kind) for value in block_values]
        op = str(call.target)
        self._step("local", [by_block[v] for v in read_here], values, run=run, op="" if op in IN_PLACE else op)
        by_block.update(zip(outputs, values, strict=True))

    def _norm(
        self,
        call: Call,
        env: Mapping[int, Value],
        by_block: Mapping[int, Value],
        normed: Value,
        layout: Layout,
        own: Sequence[Range],
    ) -> Any:
        """Lower a norm for all cells of its input on this rank, of which only its own count."""
        block = env[normed.id]
        starts = (0 if atom.bounds is None else atom.bounds[0] for (atom,) in block.layout)
        x = replace(by_block[block.id], layout_or_none=layout)
        cells = tuple(slice(lo - at, hi - at) for (lo, hi), at in zip(own, starts, strict=True))
        self._own_cells[x.id] = own[0], cells[2:]
        self.out, self.draws = call.out, call.draws

        def substitute(leaf: Any) -> Any:
            if not isinstance(leaf, Value):
                return leaf
            return x if leaf.id == normed.id else by_block[env.get(leaf.id, leaf).id]

        result = self.lower_by_rule(call.target, *pytree.tree_map(substitute, (call.args, call.kwargs)))
        y = pytree.tree_leaves(result)[0]
        y.layout_or_none = None  # it has more cells than the tile, too
        return result


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


def _run_steps(
    steps: Sequence[Step],
    values: Sequence[Value],
    inputs: Sequence[int],
    outputs: Sequence[int],
    *tensors: torch.Tensor,
) -> list[torch.Tensor]:
    """Run local steps and return these outputs."""
    env = dict(zip(inputs, tensors, strict=True))
    for step in steps:
        env.update(zip(step.outputs, run_local(step, [env[value] for value in step.inputs], values), strict=True))
    return [env[value] for value in outputs]


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
    return FusedLowering(mesh, rank, segments, search.images) if segments else None
