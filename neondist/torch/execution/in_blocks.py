"""Lowering of a captured module for a block, computed from all cells that it depends on, without messages.

The rules that distribute the module lower it for a single rank that has only a block of every value. The cells of a
block follow from the reaches that the rules declare (`ir/trace.py`). Zeros are padded only at the true borders of the
image, and the results equal those of the whole image.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from ...geometry import Atom, DimRequest, Range
from ..exchange.functions import Moments
from ..ir.errors import UnsupportedOperator
from ..ir.graph import Pads, Value
from ..ir.layout import Layout, Mesh, is_box, shape_of, whole
from ..ir.trace import CutRanges, Dependence, extend, trace
from ..lowering.building import Reaches
from ..lowering.lower import Lowering
from ..lowering.plan import TorchPlan
from ..lowering.steps import Where

AxisRanges = tuple[tuple[Range, ...], ...]
"""For each of several values, the range along each dimension."""
_REASONS = {
    "gather": "it sees the whole image",
    "ring": "it sees the whole image",
    "sum": "it sums over the whole image",
    "max": "it compares the whole image",
    "norm": "it normalises by sums over the whole image",
}


class Cuts:
    """Range of each cut that belongs to a block; the full range before any block is known."""

    def __init__(self, ranges: CutRanges | None = None) -> None:
        self.ranges = ranges
        self.begin(0)

    def begin(self, call: int) -> None:
        """Start a call of a rule."""
        self._numbers = ((call, number) for number in count())

    def atom(self, extent: int, axis: int) -> Atom:
        """Return the next cut of a rule."""
        return self._current(Atom(extent, axis, (0, extent), (next(self._numbers), 1)))

    def current(self, layout: Layout) -> Layout:
        """Return a layout of single cuts with their current ranges."""
        return tuple((self._current(atom),) for (atom,) in layout)

    def _current(self, atom: Atom) -> Atom:
        if self.ranges is None or atom.origin is None:
            return atom
        return atom._replace(bounds=self.ranges.get(atom.origin[0], (0, 0)))


@dataclass(frozen=True)
class BlockMesh(Mesh):
    """Mesh of a single rank with a block of every value."""

    cuts: Cuts
    blocked: frozenset[int]

    @property
    def axes(self) -> frozenset[int]:
        """Axes along which a block has only some of the indices; no rank has the others."""
        return self.blocked

    def atom(self, extent: int, axis: int | None) -> Atom:
        """Return a new cut for each value, whose range may be smaller than its arguments'."""
        return self.cuts.atom(extent, axis) if axis in self.axes else Atom(extent)


class Call(NamedTuple):
    """Recorded call of a rule, with its result."""

    number: int
    target: Any
    args: Any
    kwargs: Any
    where: Where
    out: Any
    draws: int
    result: Any


class Statistics(NamedTuple):
    """Statistics of a live norm: the tensor they are computed from, (N·groups,) or (C,), and the method."""

    x: Value
    mean: Value
    variance: Value
    moments: Moments


class BlockLowering(Lowering):
    """Lowering for one block; refuses operators that need the whole image.

    Parameters
    ----------
    axes : frozenset of int, optional
        Axes that the blocks of one pass partition; default: each block is a pass of its own, along all spatial axes.
    """

    mesh: BlockMesh

    def __init__(
        self,
        spatial: int,
        remedy: str = "",
        ranges: CutRanges | None = None,
        values: Sequence[Value] = (),
        axes: frozenset[int] | None = None,
    ) -> None:
        self.cuts, self.remedy, self.spatial, self.block_axes = Cuts(ranges), remedy, spatial, axes
        blocked = frozenset(range(1, spatial + 1)) if axes is None else axes
        super().__init__(BlockMesh((1,) * (spatial + 1), self.cuts, blocked), 0)
        self.values, self.calls = list(values), list[Call]()
        self.dependences = list[Dependence]()
        self.recorded, self._number = set[int](), 0  # values computed in recorded calls
        self.statistics: dict[int, Statistics] = {}  # by the number of the call that normalises by them

    @property
    def parts_of_gradients(self) -> bool:
        """Whether cells may be in several blocks of one pass, each of which computes a part of their gradients."""
        return self.block_axes is not None

    @property
    def takes_norms(self) -> bool:
        """Whether another norm may receive its statistics as inputs."""
        return False

    def call(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a rule for the first time."""
        number = self._number = self._number + 1
        self.cuts.begin(number)
        steps, calls, context = len(self.steps), len(self.calls), (self.where, self.out, self.draws)
        result = super().call(target, args, kwargs)
        if len(self.calls) == calls and len(self.steps) > steps:  # else it was decomposed into other calls
            self.calls.append(Call(number, target, args, kwargs, *context, result))
            self.recorded.update(value for step in self.steps[steps:] for value in step.outputs)
        return result

    def repeat(self, call: Call, env: Mapping[int, Value]) -> Any:
        """Call a rule again for the current ranges; `env` maps the ids of its former arguments to the new ones."""
        self.cuts.begin(call.number)
        self._number, self.where, self.out, self.draws = call.number, call.where, call.out, call.draws
        args, kwargs = pytree.tree_map(
            lambda arg: env.get(arg.id, arg) if isinstance(arg, Value) else arg, (call.args, call.kwargs)
        )
        return super().call(call.target, args, kwargs)

    def view(
        self,
        value: Value,
        reaches: Reaches,
        context: Iterable[int] | None = None,
        fill: float = 0.0,
        window: bool = False,
    ) -> Value:
        """Return the view that a block needs of a value, and record the reaches."""
        for dim, reach in reaches.items():
            atom = self.atom(value, dim)
            if atom.axis is not None and reach.out.axis is None:
                self.refuse(_REASONS["gather"])
            if atom.origin is not None:
                self.dependences.append(Dependence(self._number, reach, atom))
        return super().view(value, reaches, context, fill)

    def transferred(
        self, value: Value, requests: Sequence[DimRequest], context: frozenset[int], pads: Pads = (), fill: float = 0.0
    ) -> Value:
        """Return the view of a value with the requested indices, all of which the block has, and with padding."""
        shape, narrowed, padding = list(value.local), [], [0] * (2 * len(value.local))
        for request in requests:
            first, last = request.source.range(self.place)
            ranges = request.ranges[request.part(self.place)]
            if ranges != ((first, last),):
                narrowed.append((request.dim, [(lo - first if lo < hi else 0, hi - lo) for lo, hi in ranges]))
            shape[request.dim] = request.extent(request.part(self.place))
        for dim, *around in pads:
            at = 2 * (len(shape) - 1 - dim)
            padding[at : at + 2] = around
            shape[dim] += sum(around)
        if not narrowed and not any(padding):
            return value

        def run(a: torch.Tensor) -> tuple[torch.Tensor]:
            for dim, parts in narrowed:
                seen = [_part(a, dim, *part) for part in parts]
                a = seen[0] if len(seen) == 1 else torch.cat(seen, dim)
            return (F.pad(a, padding, value=fill) if any(padding) else a,)

        result = self._value(tuple(shape), context, value.dtype, value.kind)
        self._step("local", [value], [result], run=run)
        return result

    def common(self, layouts: Sequence[Layout]) -> Layout:
        """Return new cuts for results, whose ranges may be smaller than those of all arguments."""
        return tuple(tuple(self.mesh.atom(atom.extent, atom.axis) for atom in dim) for dim in super().common(layouts))

    def enter(self, value: Value, context: Iterable[int]) -> Value:
        """Return the value unchanged: gradients are summed over blocks."""
        return value

    def normalise(
        self, x: Value, weight: Value | None, bias: Value | None, moments: Moments, groups: Layout
    ) -> tuple[Value, Value, Value]:
        """Return x normalised with statistics that are inputs of the block, and the statistics."""
        if self._number not in self.statistics:
            if not (self.takes_norms and is_box(x.layout, self.mesh.axes)):
                self.refuse(_REASONS["norm"])
            shape = shape_of(groups)
            mean, variance = (self._value(shape, frozenset(), x.dtype, "value", whole(shape)) for _ in range(2))
            self.statistics[self._number] = Statistics(x, mean, variance, moments)
        _, mean, variance, _ = self.statistics[self._number]
        samples = None if moments.groups is None else slice(*self.atom(x, 0).range(self.place))

        def run(a: torch.Tensor, m: torch.Tensor, v: torch.Tensor, w: Any, b: Any) -> torch.Tensor:
            std = torch.rsqrt(v + moments.eps)
            if samples is not None:
                m, std = (t.view(x.shape[0], -1)[samples] for t in (m, std))
                m, std = (t.repeat_interleave(a.shape[1] // t.shape[1], 1) for t in (m, std))
            scale = std if w is None else std * w
            shift = -m * scale if b is None else b - m * scale
            shape = [-1, a.shape[1], *[1] * (a.dim() - 2)]
            return torch.addcmul(shift.view(shape), a, scale.view(shape)).to(a.dtype)

        return self.local(run, [x, mean, variance, weight, bias], x.layout), mean, variance

    def random_key(self) -> Any:
        """Refuse random numbers if each block is a pass of its own."""
        return self.refuse("it draws random numbers") if self.block_axes is None else super().random_key()

    def refuse(self, why: str = "") -> Any:
        """Raise UnsupportedOperator for the current operator."""
        raise UnsupportedOperator(self.where, why, cannot="be computed block by block", remedy=self.remedy)

    def _step(self, kind: str, inputs: Sequence[Value], outputs: Sequence[Value], **fields: Any) -> None:
        if kind != "local":
            self.refuse(_REASONS[kind])
        super()._step(kind, inputs, outputs, **fields)


class Traced:
    """Captured module that can be computed in blocks of some of its values.

    Parameters
    ----------
    lowering : BlockLowering
        Lowering of the module for all of `shape`.
    plan : TorchPlan
        Its result.
    shape : (N, C, *spatial)
        Of the image.
    outputs : list of Value
        Each dimension must be a single atom.
    """

    def __init__(self, lowering: BlockLowering, plan: TorchPlan, shape: Sequence[int], outputs: list[Value]) -> None:
        self.shape, self.remedy, self.axes = tuple(shape), lowering.remedy, lowering.block_axes
        self.values, self.outputs, self.key = lowering.values, outputs, lowering.key
        self.statistics, self.functions = lowering.statistics, lowering.functions
        self.inputs = [self.values[value] for value in plan.inputs]
        self.parameters, self.buffers = plan.parameters, plan.buffers
        steps = self._plan(lowering, plan.inputs, outputs).steps  # only those that the outputs depend on
        read = {value for step in steps for value in step.inputs}
        self.parameters = {name: value for name, value in plan.parameters.items() if value in read}
        self.buffers = {name: value for name, value in plan.buffers.items() if value in read}
        self.constants = [step for step in steps if not step.inputs]
        if any(step.inputs and not lowering.recorded.issuperset(step.outputs) for step in steps):
            lowering.refuse("it is lowered outside calls of a rule")
        calls, needed = list[Call](), {output.id for output in outputs}
        for call in reversed(lowering.calls):
            if not needed.isdisjoint(ids_of(call.result)):
                calls.append(call)
                needed.update(ids_of((call.args, call.kwargs)))  # read or not: rules use their layouts
        self.calls = calls[::-1]
        numbers = {call.number for call in calls}
        self.dependences = [each for each in lowering.dependences if each.call in numbers]
        self.needs = lru_cache(8)(self._needs)

    def sources(self, ranges: AxisRanges) -> AxisRanges:
        """Return the indices of the inputs that ranges of the outputs depend on, along each dimension."""
        needed = self.needs(ranges)
        return tuple(
            tuple((0, a.extent) if a.origin is None else needed.get(a.origin[0], (0, 0)) for (a,) in value.layout)
            for value in self.inputs
        )

    def image(self, ranges: AxisRanges) -> tuple[Range, ...]:
        """Return the indices of the first input that ranges of the outputs depend on."""
        return self.sources(ranges)[0]

    def plan(self, ranges: AxisRanges) -> TorchPlan:
        """Return the plan that computes at least these ranges of the outputs from their sources."""
        lowering, env = self.start_lowering(ranges)
        lowering.steps = [replace(step) for step in self.constants]
        for call in self.calls:
            env.update(paired(call.result, lowering.repeat(call, env)))
        inputs = [env[value.id].id for value in self.inputs]
        return self._plan(lowering, inputs, [env.get(output.id, output) for output in self.outputs])

    def start_lowering(self, ranges: AxisRanges) -> tuple[BlockLowering, dict[int, Value]]:
        """Return a lowering that can repeat calls for ranges of the outputs, and its inputs by the ids of ours."""
        env = dict[int, Value]()
        lowering = BlockLowering(len(self.shape) - 2, self.remedy, self.needs(ranges), self.values, self.axes)
        lowering.key, lowering.statistics, lowering.functions = self.key, self.statistics, self.functions
        for value in self.inputs:
            env[value.id] = lowering.input(lowering.cuts.current(value.layout), value.dtype, value.kind)
        if lowering.key is not None:
            lowering.key = env.get(lowering.key.id, lowering.key)
        return lowering, env

    def _needs(self, ranges: AxisRanges) -> CutRanges:
        """Return the range of each cut that ranges of the outputs depend on."""
        ends: CutRanges = {}
        for output, box in zip(self.outputs, ranges, strict=True):
            for (atom,), indices in zip(output.layout, box, strict=True):
                extend(ends, atom, *indices)
        return trace(self.dependences, ends)

    def _plan(self, lowering: BlockLowering, inputs: list[int], outputs: Sequence[Value]) -> TorchPlan:
        ends = self.parameters, self.buffers, inputs, [output.id for output in outputs]
        return TorchPlan(lowering.mesh, 0, lowering.steps, lowering.values, *ends, {})


def part_of_block(y: torch.Tensor, layout: Layout, ranges: Sequence[Range]) -> torch.Tensor:
    """Return these ranges of an output of a block, which may be larger."""
    for dim, ((atom,), (lo, hi)) in enumerate(zip(layout, ranges, strict=True)):
        y = _part(y, dim, lo - (0 if atom.bounds is None else atom.bounds[0]), hi - lo)
    return y


def _part(a: torch.Tensor, dim: int, start: int, length: int) -> torch.Tensor:
    if start < 0 or start + length > a.shape[dim]:
        raise RuntimeError("a block lacks cells that it depends on; this is a bug in neondist")
    return a.narrow(dim, start, length)


def paired(old: Any, new: Any) -> Iterator[tuple[int, Any]]:
    """Yield the ids of the old values, and the corresponding new leaves."""
    for before, after in zip(pytree.tree_leaves(old), pytree.tree_leaves(new), strict=True):
        if isinstance(before, Value):
            yield before.id, after


def ids_of(values: Any) -> list[int]:
    """Return the ids of the values in a tree."""
    return [value.id for value in pytree.tree_leaves(values) if isinstance(value, Value)]
