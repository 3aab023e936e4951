"""A module in which some operators go together: one exchange for all of them, or strips of a tile one after the other.

Each rank sees, in one exchange, all that its tiles of a segment's results depend on, and computes cells of other tiles
itself. Only own results go on to others, so that gradients are those of one process; norms count each cell once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..halo import ExchangePolicy, Fusion
from .blocked import Blocks, at_least_one
from .choosing import segments_of
from .errors import UnsupportedOperator
from .functions import Moments
from .graph import IN_PLACE, Step, Value
from .in_blocks import BlockLowering, Call, Ranged, ids_of, paired, part_of_block
from .layout import Layout, Mesh, axes_of, local_shape
from .program_lowering import ProgramLowering, joined, laid, ranges_at
from .run import run_local
from .segments import KEY, OperatorSegment, Search, Strips
from .steps import Where
from .transfer import Range, Wanted, at_place


@dataclass(frozen=True)
class _Deferred:
    """Stands for a value of the program that a segment has still to give."""

    value: int


class FusedLowering(ProgramLowering):
    """Lowers a module of which segments go together.

    Parameters
    ----------
    segments : sequence of OperatorSegment
    images : sequence of int
        The inputs of the program, as segments call them.

    Attributes
    ----------
    overlaps : list of Wanted
        What each rank is given of the inputs, where that is more than its tile.
    """

    def __init__(self, mesh: Mesh, rank: int, segments: Sequence[OperatorSegment], images: Sequence[int]) -> None:
        super().__init__(mesh, rank)
        self._by_number = {number: segment for segment in segments for number in segment.noted}
        self._program: dict[int, Value] = {}  # values of the program that segments read or give
        self.in_parts = any(segment.rows for segment in segments)
        self._segments = segments
        # of what norms are given: the samples and the cells that count on this rank
        self._own: dict[int, tuple[Range, tuple[slice, ...]]] = {}
        self._wanted = {segment.first: self._wanted_by(segment) for segment in segments}
        self.overlaps = [self._wanted_around(image) for image in images]
        self._waiting = iter(self.overlaps)
        self._entered: dict[int, tuple[Value, Wanted]] = {}  # for tiles of images: what is given, and of which cells

    @property
    def note(self) -> str:  # type: ignore[override]
        """Description of the number of operators in the group."""
        windows = sum(noted.windows for segment in self._segments for noted in segment.noted.values())
        found = f"segments: {windows} windows and what follows them"
        rows = [segment.rows for segment in self._segments]
        return f"{found}, in strips of {_range(rows)} rows" if self.in_parts else f"{found} in {len(rows)} of them"

    def read(self, env: Mapping[Any, Any], arg: Any) -> Any:
        """Return what an argument stands for, what segments have given included."""
        return pytree.tree_map(
            lambda leaf: self._program.get(leaf.value, leaf) if isinstance(leaf, _Deferred) else leaf,
            super().read(env, arg),
        )

    def lower_program_call(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what an operator gives, or what stands for it until the last one of its segment is there."""
        segment = self._by_number.get(self.number)
        if segment is None:
            return self.ruled(target, args, kwargs)
        noted = segment.noted[self.number]
        given = paired((noted.call.args, noted.call.kwargs), (args, kwargs))
        self._program.update((old, new) for old, new in given if isinstance(new, Value))
        if self.number == max(segment.noted):
            self._run(segment)
        return pytree.tree_map(lambda leaf: _Deferred(leaf.id) if isinstance(leaf, Value) else leaf, noted.call.found)

    def image(self, layout: Layout, dtype: torch.dtype) -> tuple[Value, Value]:
        """Return what is given of an input of the module, with cells around the tile if segments want that."""
        wants, axes = next(self._waiting), axes_of(layout)
        if not wants:
            return super().image(layout, dtype)
        there = at_place(wants, self.place)
        own = {dim: layout[dim][0].range(self.place) for dim in there}
        self.where = Where("tile", "", "")
        given = self._value(_cells(local_shape(layout, self.place), there), axes, dtype, "value")
        (tile,) = self._locals(partial(_narrowed, ranges=own, given=there), [given], [layout], [dtype], axes)
        self.steps[-1].key = None  # the same step on a rank without cells
        self._entered[tile.id] = given, wants
        return given, tile

    def view_of(self, value: Value, wants: Wanted) -> Value:
        """Return what this rank needs of a value: of an image that is given with it, without messages."""
        given, around = self._entered.get(value.id, (value, {}))
        if not (around and all(_inside(ranges, around[dim][1]) for dim, (_, ranges) in wants.items())):
            return super().view_of(value, wants)
        here = at_place(wants, self.place)
        source = self.enter(given, self.mesh.axes)
        found = self._value(_cells(given.local, here), self.mesh.axes, value.dtype, value.kind)
        run = partial(_narrowed, ranges=here, given=at_place(around, self.place))
        self._step("local", [source], [found], run=lambda x: (run(x),))
        return found

    def _wanted_by(self, segment: OperatorSegment) -> list[Wanted]:
        """Return what ranks need of the inputs of a segment."""
        outputs, inputs = ([laid(v, self.mesh) for v in of] for of in (segment.traced.outputs, segment.traced.inputs))
        return self.wanted([segment.traced], [outputs], inputs)

    def _wanted_around(self, image: int) -> Wanted:
        """Return what ranks are given of an image: their tiles, and what segments read without messages around them."""
        found: Wanted = {}
        for segment in self._segments:
            if segment.wide and image in segment.inputs:
                at = segment.inputs.index(image)
                own = laid(segment.traced.inputs[at], self.mesh)
                for dim, (axis, ranges) in self._wanted[segment.first][at].items():
                    _, before = found.get(dim, (axis, own[dim][0].ranges))
                    found[dim] = axis, [joined(pair) for pair in zip(before, ranges, strict=True)]
        return found

    def normalise(
        self, x: Value, weight: Value | None, bias: Value | None, moments: Moments, groups: Layout
    ) -> tuple[Value, Value, Value]:
        """Return x normalised, of which other ranks may have cells, too."""
        if x.id in self._own:
            (first, last), own = self._own[x.id]
            moments = moments._replace(own=own, idle=first == last)
        return super().normalise(x, weight, bias, moments, groups)

    def _run(self, segment: OperatorSegment) -> None:
        self.where = segment.noted[segment.first].call.where
        if KEY in segment.inputs:
            self._program[KEY], _ = self.random_key()
        layouts = [laid(out, self.mesh) for out in segment.traced.outputs]
        here = ranges_at(layouts, dict(enumerate(self.place)))
        inputs, first = self.wide([self._program[value] for value in segment.inputs], self._wanted[segment.first])
        if segment.rows:
            self._in_strips(segment, inputs, first, layouts, here)
        else:
            self._at_once(segment, inputs, layouts, here)

    def _in_strips(
        self,
        segment: OperatorSegment,
        inputs: Sequence[Value],
        first: list[list[int]],
        layouts: Sequence[Layout],
        here: Ranged,
    ) -> None:
        """Let each strip of a tile go through the segment, and once more on the way back."""
        blocks = Blocks(segment.traced, here, [1] * len(self.mesh.parts), first)
        blocks.parts = tuple(-(-n // segment.rows) if axis == 1 else 1 for axis, n in enumerate(blocks.extents()))
        self.where = Where("strips", self.where.module, self.where.source)
        dtypes = [out.dtype for out in segment.traced.outputs]
        tiles = self._locals(blocks, inputs, layouts, dtypes, self.mesh.axes, several=True)
        self.steps[-1].key = None  # blocks of no index are none
        self._program.update(zip(segment.outputs, tiles, strict=True))

    def _at_once(
        self, segment: OperatorSegment, inputs: Sequence[Value], layouts: Sequence[Layout], here: Ranged
    ) -> None:
        """Let all of a tile go through the segment, and what it needs around it."""
        traced = segment.traced
        lowering, env = traced.begun(at_least_one(here, here))
        there = {env[old.id].id: value for old, value in zip(traced.inputs, inputs, strict=True)}
        for value, given in there.items():
            if lowering.values[value].local != given.local:
                raise RuntimeError("a segment received other cells than it needs; this is a bug in neondist")
        for step in traced.constants:
            (known,) = (traced.values[value] for value in step.outputs)
            there[known.id] = self._value(known.local, frozenset(), known.dtype, "constant")
            self._step("local", [], [there[known.id]], run=step.run)
        ends = dict(zip((out.id for out in traced.outputs), zip(layouts, here, strict=True), strict=True))
        for call in traced.calls:
            self.where, norm, start = call.where, traced.statistics.get(call.number), len(lowering.steps)
            found = lowering.repeat(call, env)
            if norm is None:
                self._together(call, lowering, lowering.steps[start:], found, there)
            else:
                made = self._norm(call, env, there, norm.x, *ends[norm.x.id])
                there.update(paired(found, made))
            env.update(paired(call.found, found))
        for number in segment.outputs:
            of = segment.known[number].id
            wide = there[env[of].id]
            self._program[number] = self._tile(wide, env[of], *ends[of]) if of in ends else wide

    def _tile(self, wide: Value, block: Value, layout: Layout, own: Sequence[Range]) -> Value:
        """Return this rank's tile of what it may know more of."""
        run = partial(part_of_block, layout=block.layout, ranges=own)
        (tile,) = self._locals(run, [wide], [layout], [wide.dtype], self.mesh.axes)
        self.steps[-1].key = None  # the same step on a rank without cells
        return tile

    def _together(
        self, call: Call, lowering: BlockLowering, steps: Sequence[Step], found: Any, there: dict[int, Value]
    ) -> None:
        """Let what a rule has asked for be one step, as it is one on every rank; note what it gives in `there`."""
        outputs = ids_of(found)
        read = {value for step in steps for value in step.inputs}.union(outputs)
        given = sorted(read & there.keys(), key=lambda value: there[value].id)
        run = partial(_run, steps, lowering.values, given, outputs)
        known = [lowering.values[value] for value in outputs]
        made = [self._value(value.local, self.mesh.axes, value.dtype, value.kind) for value in known]
        op = str(call.target)
        self._step("local", [there[v] for v in given], made, run=run, op="" if op in IN_PLACE else op)
        there.update(zip(outputs, made, strict=True))

    def _norm(
        self,
        call: Call,
        env: Mapping[int, Value],
        there: Mapping[int, Value],
        of: Value,
        layout: Layout,
        own: Sequence[Range],
    ) -> Any:
        """Return what a norm's rule gives for all that a rank knows of its input, of which its own cells count."""
        block = env[of.id]
        starts = (0 if atom.bounds is None else atom.bounds[0] for (atom,) in block.layout)
        x = replace(there[block.id], layout_or_none=layout)
        self._own[x.id] = own[0], tuple(slice(lo - at, hi - at) for (lo, hi), at in zip(own, starts, strict=True))[2:]
        self.out, self.draws = call.out, call.draws

        def here(leaf: Any) -> Any:
            return (x if leaf.id == of.id else there[env.get(leaf.id, leaf).id]) if isinstance(leaf, Value) else leaf

        made = self.ruled(call.target, *pytree.tree_map(here, (call.args, call.kwargs)))
        y = pytree.tree_leaves(made)[0]
        y.layout_or_none = None  # it, too, has more than its tile
        return made


def _narrowed(x: torch.Tensor, ranges: Mapping[int, Range], given: Mapping[int, Range]) -> torch.Tensor:
    """Return ranges of some dimensions of a tensor, which has those that are given; they may be empty."""
    for dim, (lo, hi) in ranges.items():
        x = x.narrow(dim, max(0, lo - given[dim][0]), max(0, hi - lo))
    return x


def _cells(shape: Sequence[int], ranges: Mapping[int, Range]) -> tuple[int, ...]:
    """Return the shape of ranges of some dimensions."""
    extents = {dim: max(0, hi - lo) for dim, (lo, hi) in ranges.items()}
    return tuple(extents.get(dim, n) for dim, n in enumerate(shape))


def _inside(wanted: Sequence[Range], given: Sequence[Range]) -> bool:
    return all(lo >= hi or (first <= lo and hi <= last) for (lo, hi), (first, last) in zip(wanted, given, strict=True))


def _range(numbers: Sequence[int]) -> str:
    lo, hi = min(numbers), max(numbers)
    return str(lo) if lo == hi else f"{lo} to {hi}"


def _run(
    steps: Sequence[Step],
    values: Sequence[Value],
    inputs: Sequence[int],
    outputs: Sequence[int],
    *tensors: torch.Tensor,
) -> list[torch.Tensor]:
    """Return what local steps give."""
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
    """Return what lowers a program in segments, if schemes or strips ask for any; else None."""
    fusing = mesh.axes and any(isinstance(policy, Fusion) for policy in schemes.values())
    if not fusing and strips is None:
        return None
    try:
        search = Search(program, mesh, layouts, gather_at, schemes, strips)
        segments = segments_of(search)
    except UnsupportedOperator:  # it is refused without segments too, or has rows that cannot be cut
        if any(isinstance(policy, Fusion) and policy.reads_wide for policy in schemes.values()):
            raise
        return None
    return FusedLowering(mesh, rank, segments, search.images) if segments else None
