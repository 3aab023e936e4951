"""A captured module lowered for a block, which is computed from all cells that it depends on, without messages.

The rules that distribute the module lower it here for one rank that has but a block of every value. Which cells those
are follows backwards: the rules are run again from the last to the first, each for the cells that are needed of its
results, and what their views want to see is needed of their arguments. Zeros are padded at the image's true borders
alone, and the numbers are those of the whole image.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from .building import Ranges, UsedIndices
from .errors import UnsupportedOperator
from .functions import Moments
from .graph import Value
from .layout import Atom, Layout, Mesh, axes_of, is_box, shape_of, whole
from .lower import Lowering
from .plan import TorchPlan
from .steps import Where
from .transfer import Range, hull

Cut = tuple[int, int]
"""The number of a rule's call, and that of a cut which it asks for."""
Ranged = tuple[tuple[Range, ...], ...]
"""Of some values, the range along each dimension."""
_WHY = {
    "gather": "it sees the whole image",
    "ring": "it sees the whole image",
    "sum": "it sums over the whole image",
    "max": "it compares the whole image",
    "norm": "it normalises by sums over the whole image",
}


class Cuts:
    """The range that a block has of each cut; before any block is known, all.

    Attributes
    ----------
    ranges : dict of Cut to Range, or None
    grown : set of int
        The calls of which a cut has grown.
    """

    def __init__(self, ranges: dict[Cut, Range] | None = None) -> None:
        self.ranges, self.grown = ranges, set[int]()
        self.begin(0)

    def begin(self, call: int) -> None:
        """Take note that a rule is called."""
        self._next: Cut = call, 0

    def atom(self, extent: int, axis: int) -> Atom:
        """Return the next cut of a rule."""
        this = self._next
        self._next = this[0], this[1] + 1
        return Atom(extent, axis, (0, extent) if self.ranges is None else self.ranges.get(this, (0, 0)), (this, 1))

    def current(self, layout: Layout) -> Layout:
        """Return a layout of single cuts for the ranges that are known now."""
        return tuple((self._current(atom),) for (atom,) in layout)

    def _current(self, atom: Atom) -> Atom:
        if self.ranges is None or atom.origin is None:
            return atom
        return atom._replace(bounds=self.ranges.get(atom.origin[0], (0, 0)))

    def need(self, atom: Atom, lo: int, hi: int) -> None:
        """Take note that indices of a dimension are needed."""
        if self.ranges is None or atom.origin is None or lo == hi:
            return
        this, factor = atom.origin
        known = self.ranges.get(this, ())
        found = hull([*known[:1], *(at - 1 for at in known[1:]), lo // factor, (hi - 1) // factor])
        if found != known:
            self.ranges[this] = found
            self.grown.add(this[0])


@dataclass(frozen=True)
class BlockMesh(Mesh):
    """One rank that has but a block."""

    cuts: Cuts
    blocked: frozenset[int]

    @property
    def axes(self) -> frozenset[int]:
        """Those along which blocks have but some of the indices: the others' are nowhere."""
        return self.blocked

    def atom(self, extent: int, axis: int | None) -> Atom:
        """Return a cut of its own for each value, which may need less than those that it is made of."""
        return self.cuts.atom(extent, axis) if axis in self.axes else Atom(extent)


class Call(NamedTuple):
    """A rule that was called, and what it gave."""

    number: int
    target: Any
    args: Any
    kwargs: Any
    where: Where
    out: Any
    draws: int
    found: Any


class Statistics(NamedTuple):
    """Statistics of a live norm: the tensor they are computed from, (N·groups,) or (C,), and the method."""

    x: Value
    mean: Value
    variance: Value
    moments: Moments


class BlockLowering(Lowering):
    """Lowers for one block; refuses what needs the whole image.

    Parameters
    ----------
    axes : frozenset of int, optional
        Those that blocks of one pass cut; default: blocks are of several passes, and cut all spatial axes.
    """

    mesh: BlockMesh

    def __init__(
        self,
        spatial: int,
        remedy: str = "",
        ranges: dict[Cut, Range] | None = None,
        values: Sequence[Value] = (),
        axes: frozenset[int] | None = None,
    ) -> None:
        self.cuts, self.remedy, self.spatial, self.asked = Cuts(ranges), remedy, spatial, axes
        blocked = frozenset(range(1, spatial + 1)) if axes is None else axes
        super().__init__(BlockMesh((1,) * (spatial + 1), self.cuts, blocked), 0)
        self.values, self.calls = list(values), list[Call]()
        self.recorded, self._number = set[int](), 0  # the values that calls have made
        self.statistics: dict[int, Statistics] = {}  # by the number of the call that normalises by them

    @property
    def parts_of_gradients(self) -> bool:
        """Whether cells may be in several blocks of one pass, each of which gives a part of their gradients."""
        return self.asked is not None

    @property
    def takes_norms(self) -> bool:
        """Whether one more norm may have statistics that blocks are given."""
        return False

    def call(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a rule for the first time."""
        number = self._number = self._number + 1
        self.cuts.begin(number)
        steps, calls, given = len(self.steps), len(self.calls), (self.where, self.out, self.draws)
        found = super().call(target, args, kwargs)
        if len(self.calls) == calls and len(self.steps) > steps:  # else it was made of others
            self.calls.append(Call(number, target, args, kwargs, *given, found))
            self.recorded.update(value for step in self.steps[steps:] for value in step.outputs)
        return found

    def repeat(self, call: Call, env: Mapping[int, Value]) -> Any:
        """Call a rule again for the ranges that are known now; `env` has its arguments by their former ids."""
        self.cuts.begin(call.number)
        self._number, self.where, self.out, self.draws = call.number, call.where, call.out, call.draws
        args, kwargs = pytree.tree_map(
            lambda arg: env.get(arg.id, arg) if isinstance(arg, Value) else arg, (call.args, call.kwargs)
        )
        return super().call(call.target, args, kwargs)

    def view(
        self,
        value: Value,
        wants: Ranges,
        context: Iterable[int] | None = None,
        pads: Mapping[int, Sequence[tuple[int, int]]] | None = None,
        fill: float = 0.0,
        window: bool = False,
        used: UsedIndices | None = None,
    ) -> Value:
        """Return what a block wants to see of a value, which it therefore needs."""
        inside = self._inside(value, wants, context)
        shape, narrowed, around = list(value.local), [], [0] * (2 * len(value.local))
        lost = axes_of(value.layout) - inside
        for dim, (axis, (ranges, *_)) in wants.items():
            atom = self.atom(value, dim)
            lost -= {atom.axis}
            if atom.axis is not None and axis is None:
                self.refuse(_WHY["gather"])
            first, last = atom.range(self.place)
            for lo, hi in ranges:
                self.cuts.need(atom, lo, hi)
            if tuple(ranges) != ((first, last),):
                narrowed.append((dim, [(lo - first if lo < hi else 0, hi - lo) for lo, hi in ranges]))
            shape[dim] = sum(hi - lo for lo, hi in ranges)
        if lost:
            self.refuse(_WHY["gather"])
        for dim, parts in (pads or {}).items():
            at = 2 * (len(shape) - 1 - dim)
            around[at : at + 2] = parts[0]
            shape[dim] += sum(parts[0])
        if not narrowed and not any(around):
            return value

        def run(a: torch.Tensor) -> tuple[torch.Tensor]:
            for dim, parts in narrowed:
                seen = [_part(a, dim, *part) for part in parts]
                a = seen[0] if len(seen) == 1 else torch.cat(seen, dim)
            return (F.pad(a, around, value=fill) if any(around) else a,)

        found = self._value(tuple(shape), inside, value.dtype, value.kind)
        self._step("local", [value], [found], run=run)
        return found

    def common(self, layouts: Sequence[Layout]) -> Layout:
        """Return cuts of their own for results, which may need less than any of the values has that they are of."""
        return tuple(tuple(self.mesh.atom(atom.extent, atom.axis) for atom in dim) for dim in super().common(layouts))

    def enter(self, value: Value, context: Iterable[int]) -> Value:
        """Return the value: gradients are added up over blocks."""
        return value

    def normalise(
        self, x: Value, weight: Value | None, bias: Value | None, moments: Moments, groups: Layout
    ) -> tuple[Value, Value, Value]:
        """Return x scaled by statistics that blocks are given, and those."""
        if self._number not in self.statistics:
            if not (self.takes_norms and is_box(x.layout, self.mesh.axes)):
                self.refuse(_WHY["norm"])
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
        """Refuse random numbers where blocks are of several passes."""
        return self.refuse("it draws random numbers") if self.asked is None else super().random_key()

    def refuse(self, why: str = "") -> Any:
        """Raise UnsupportedOperator for the operator at hand."""
        raise UnsupportedOperator(self.where, why, cannot="be computed block by block", remedy=self.remedy)

    def _step(self, kind: str, inputs: Sequence[Value], outputs: Sequence[Value], **more: Any) -> None:
        if kind != "local":
            self.refuse(_WHY[kind])
        super()._step(kind, inputs, outputs, **more)


class Traced:
    """A captured module that can go in blocks of some of its values.

    Parameters
    ----------
    lowering : BlockLowering
        What the module was lowered by, for all of `shape`.
    plan : TorchPlan
        What it gave.
    shape : (N, C, *spatial)
        Of the image.
    outputs : list of Value
        Each dimension of which is a single atom.
    """

    def __init__(self, lowering: BlockLowering, plan: TorchPlan, shape: Sequence[int], outputs: list[Value]) -> None:
        self.shape, self.remedy, self.axes = tuple(shape), lowering.remedy, lowering.asked
        self.values, self.outputs, self.key = lowering.values, outputs, lowering.key
        self.statistics, self.functions = lowering.statistics, lowering.functions
        self.inputs = [self.values[value] for value in plan.inputs]
        self.parameters, self.buffers = plan.parameters, plan.buffers
        steps = self._plan(lowering, plan.inputs, outputs).steps  # without what the outputs do not depend on
        read = {value for step in steps for value in step.inputs}
        self.parameters = {name: value for name, value in plan.parameters.items() if value in read}
        self.buffers = {name: value for name, value in plan.buffers.items() if value in read}
        self.constants = [step for step in steps if not step.inputs]
        if any(step.inputs and not lowering.recorded.issuperset(step.outputs) for step in steps):
            lowering.refuse("it is lowered outside calls of a rule")
        calls, needed = list[Call](), {output.id for output in outputs}
        for call in reversed(lowering.calls):
            if not needed.isdisjoint(ids_of(call.found)):
                calls.append(call)
                needed.update(ids_of((call.args, call.kwargs)))  # read or not: a rule looks at their layouts
        self.calls = calls[::-1]
        self.needs = lru_cache(8)(self._needs)

    def sources(self, wanted: Ranged) -> Ranged:
        """Return the indices of the inputs that ranges of the outputs depend on, along each dimension."""
        needed = self.needs(wanted)
        return tuple(
            tuple((0, a.extent) if a.origin is None else needed.get(a.origin[0], (0, 0)) for (a,) in value.layout)
            for value in self.inputs
        )

    def image(self, wanted: Ranged) -> tuple[Range, ...]:
        """Return those of the first input."""
        return self.sources(wanted)[0]

    def plan(self, wanted: Ranged) -> TorchPlan:
        """Return what computes ranges of the outputs from those, and perhaps indices around them."""
        lowering, env = self.begun(wanted)
        lowering.steps = [replace(step) for step in self.constants]
        for call in self.calls:
            env.update(paired(call.found, lowering.repeat(call, env)))
        inputs = [env[value.id].id for value in self.inputs]
        return self._plan(lowering, inputs, [env.get(output.id, output) for output in self.outputs])

    def begun(self, wanted: Ranged) -> tuple[BlockLowering, dict[int, Value]]:
        """Return what can repeat calls for ranges of the outputs, and the inputs of that by what they are here."""
        lowering, env = self._lowering(self.needs(wanted), self.values), dict[int, Value]()
        for value in self.inputs:
            env[value.id] = lowering.input(lowering.cuts.current(value.layout), value.dtype, value.kind)
        if lowering.key is not None:
            lowering.key = env.get(lowering.key.id, lowering.key)
        return lowering, env

    def _needs(self, wanted: Ranged) -> dict[Cut, Range]:
        """Return the range of each cut that ranges of the outputs need."""
        ranges: dict[Cut, Range] = {}
        lowering = self._lowering(ranges, self.values)
        for output, found in zip(self.outputs, wanted, strict=True):
            for (atom,), (lo, hi) in zip(output.layout, found, strict=True):
                lowering.cuts.need(atom, lo, hi)
        grown = lowering.cuts.grown
        for call in reversed(self.calls):
            grown.add(call.number)
            while call.number in grown:  # one rule may make cuts one after the other
                grown.discard(call.number)
                lowering.repeat(call, {})
        return ranges

    def _lowering(self, ranges: dict[Cut, Range] | None = None, values: Sequence[Value] = ()) -> BlockLowering:
        lowering = BlockLowering(len(self.shape) - 2, self.remedy, ranges, values, self.axes)
        lowering.key, lowering.statistics, lowering.functions = self.key, self.statistics, self.functions
        return lowering

    def _plan(self, lowering: BlockLowering, inputs: list[int], outputs: Sequence[Value]) -> TorchPlan:
        given = self.parameters, self.buffers, inputs, [output.id for output in outputs]
        return TorchPlan(lowering.mesh, 0, lowering.steps, lowering.values, *given, {})


def part_of_block(y: torch.Tensor, layout: Layout, ranges: Sequence[Range]) -> torch.Tensor:
    """Return ranges of what a block gave, along each dimension; it may have more."""
    for dim, ((atom,), (lo, hi)) in enumerate(zip(layout, ranges, strict=True)):
        y = _part(y, dim, lo - (0 if atom.bounds is None else atom.bounds[0]), hi - lo)
    return y


def _part(a: torch.Tensor, dim: int, start: int, length: int) -> torch.Tensor:
    if start < 0 or start + length > a.shape[dim]:
        raise RuntimeError("a block lacks cells that it depends on; this is a bug in neondist")
    return a.narrow(dim, start, length)


def paired(old: Any, new: Any) -> Iterator[tuple[int, Any]]:
    """Yield the numbers of values, and what is at their places now."""
    for before, after in zip(pytree.tree_leaves(old), pytree.tree_leaves(new), strict=True):
        if isinstance(before, Value):
            yield before.id, after


def ids_of(found: Any) -> list[int]:
    """Return the numbers of the values that a rule has given."""
    return [value.id for value in pytree.tree_leaves(found) if isinstance(value, Value)]
