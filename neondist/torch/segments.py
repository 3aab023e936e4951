"""Segments of a module: groups of consecutive operators, beginning with windows."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from math import inf, prod
from typing import Any, Literal, NamedTuple, TypeAlias

from torch.utils import _pytree as pytree

from ..errors import ConfigError
from ..halo import ExchangePolicy, scheme_text
from ..halo.fusion import Fusion
from .capture import lowered
from .errors import UnsupportedOperator
from .graph import Step, Value
from .in_blocks import BlockLowering, Call, Traced, ids_of, paired
from .layout import Layout, Mesh, axes_of, cut, is_box, shape_of
from .plan import TorchPlan
from .program_lowering import ProgramLowering
from .schemes import policy_of

Strips: TypeAlias = int | Literal["auto"] | None
CACHE = 1 << 20
"""bytes of one sample that a strip of 'auto' has at most, all that its operators give together"""
KEY = -1
"""stands for what random numbers are keyed by among values of the program"""
_KINDS = ("local", "view", "norm", "spread", "counted")


class Noted(NamedTuple):
    """An operator of the program, what its rule gave, and whether windows see other tiles."""

    call: Call
    windows: bool
    local: bool

    @property
    def read(self) -> list[int]:
        """The values that it reads."""
        return ids_of((self.call.args, self.call.kwargs))


class _Probe(ProgramLowering):
    """Lowers a module as ever, and takes note of its operators.

    Attributes
    ----------
    kept : set of int
        The values that are read by no operator: outputs, and what is moved between modules.
    """

    def __init__(self, mesh: Mesh, rank: int) -> None:
        super().__init__(mesh, rank)
        self.noted, self.kept = list[Noted](), set[int]()

    def lower_program_call(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what an operator gives by its rule."""
        start, about = len(self.steps), (target, args, kwargs, self.where, self.out, self.draws)
        found = self.ruled(target, args, kwargs)
        views = [step for step in self.steps[start:] if step.kind == "view"]
        windows = any(step.transfer is not None and not step.transfer.silent for step in views)
        local = all(map(_is_window, views)) and all(step.kind in _KINDS for step in self.steps[start:])
        self.noted.append(Noted(Call(self.number, *about, found), windows, local))
        return found

    def enter(self, value: Value, context: Any) -> Value:
        """Take note of a value that is read."""
        self._keep(value)
        return super().enter(value, context)

    def gathered(self, value: Value, dims: Any = None) -> Value:
        """Take note of a value that is read."""
        self._keep(value)
        return super().gathered(value, dims)

    def recut(self, value: Value, layout: Layout) -> Value:
        """Take note of a value that is read."""
        self._keep(value)
        return super().recut(value, layout)

    def _keep(self, value: Value) -> None:
        if not self.ruling:
            self.kept.add(value.id)


def _is_window(step: Step) -> bool:
    """Return whether ranks see cells around their own, a range along each axis that cuts an image."""
    assert step.transfer is not None
    return all(
        (want.axis is not None or want.used is not None)
        and want.axis == want.source.axis
        and want.dim > 1
        and all(len(r) == 1 for r in want.ranges)
        for want in step.transfer.wants
    )


class _Building(BlockLowering):
    """A segment in the making, to which operators of the program are added.

    Attributes
    ----------
    wide : bool
        Whether it reads the image with all that it needs around a tile.
    numbers : list of int
        Of the operators.
    known : dict of int to Value
        What values of the program are here: inputs, and what operators have made.
    depth : dict of int to int
        Through how many windows of the segment what operators have made has gone.
    given : list of (int, Value)
        The inputs, by number in the program, and what they are here.
    """

    def __init__(self, probe: _Probe, functions: Sequence[Any], live: bool, wide: bool = False) -> None:
        super().__init__(probe.mesh.spatial, axes=probe.mesh.axes)
        self.functions, self.program, self.live, self.wide = functions, probe.values, live, wide
        self.numbers, self.known, self.depth = list[int](), dict[int, Value](), dict[int, int]()
        self.given: list[tuple[int, Value]] = []

    def reads(self, noted: Noted) -> bool:
        """Return whether an operator reads what the segment makes."""
        return not self.depth.keys().isdisjoint(noted.read)

    def depth_with(self, noted: Noted) -> int:
        """Return through how many windows what an operator makes would have gone."""
        return noted.windows + max((self.depth.get(value, 0) for value in noted.read), default=0)

    def add(self, at: int, noted: Noted) -> bool:
        """Add an operator, if it can go with the others."""
        given, calls, known, key, number = len(self.given), len(self.calls), dict(self.known), self.key, self._number
        try:
            found = self._added(noted)
        except UnsupportedOperator:
            self.statistics = {call: norm for call, norm in self.statistics.items() if call <= number}
            self.known, self.key = known, key
            del self.given[given:], self.calls[calls:]
            return False
        depth = self.depth_with(noted)
        self.known.update(paired(noted.call.found, found))
        self.depth.update((value, depth) for value in ids_of(noted.call.found))
        self.numbers.append(at)
        return True

    def _added(self, noted: Noted) -> Any:
        self.where, self.out, self.draws = noted.call.where, noted.call.out, noted.call.draws
        structure = noted.call.target is operator.getitem or isinstance(
            noted.call.target, type
        )  # of what operators gave
        boxes = [is_box(self.program[value].layout, self.mesh.axes) for value in ids_of(noted.call.found)]
        if not (structure or (noted.local and boxes and boxes[0])):
            self.refuse()
        args, kwargs = pytree.tree_map(
            lambda leaf: self._here(leaf) if isinstance(leaf, Value) else leaf, (noted.call.args, noted.call.kwargs)
        )
        start = len(self.steps)
        found = self.call(noted.call.target, args, kwargs)
        if not self.recorded.issuperset(value for step in self.steps[start:] if step.inputs for value in step.outputs):
            self.refuse()  # some of it in no call that could be repeated
        norm = self.statistics.get(self._number)
        if norm is not None and norm.x.id != ids_of(args)[0]:
            self.refuse()
        if norm is None and not (structure or all(boxes)):
            self.refuse()
        return found

    def _here(self, value: Value) -> Value:
        """Return what a value of the program is here."""
        if value.id not in self.known:
            layout = value.layout_or_none
            if layout is None or any(len(dim) > 1 for dim in layout):
                self.refuse()
            self.cuts.begin(-1 - len(self.given))
            self.known[value.id] = self.input(
                tuple((self.mesh.atom(atom.extent, atom.axis),) for (atom,) in value.layout), value.dtype, value.kind
            )
            self.given.append((value.id, self.known[value.id]))
        return self.known[value.id]

    @property
    def takes_norms(self) -> bool:
        """Whether norms may have statistics that ranks will have added up."""
        return self.live

    def random_key(self) -> tuple[Value, int]:
        """Return what random numbers are keyed by, an input."""
        new = self.key is None
        found = super().random_key()
        if new:
            self.given.append((KEY, found[0]))
        return found


class OperatorSegment(NamedTuple):
    """A segment.

    Attributes
    ----------
    noted : dict of int to Noted
        The operators, by number in the program.
    inputs, outputs : of int
        The values of the program that they read, and those of theirs that others read.
    known : dict of int to Value
        What values of the program are in `traced`.
    traced : Traced
        Its outputs are those that are cut, and then what norms take their statistics of and what they give.
    rows : int
        Of a strip; 0: the whole tile at once.
    wide : bool
        Whether it reads the image with all that it needs around a tile.
    """

    noted: dict[int, Noted]
    inputs: list[int]
    outputs: list[int]
    known: dict[int, Value]
    traced: Traced
    rows: int
    wide: bool

    @property
    def first(self) -> int:
        """The number of its first operator."""
        return min(self.noted)


class Search:
    """Looks for segments; the same on all ranks.

    Parameters
    ----------
    program
        What `captured` returned.
    layouts : of the inputs
    schemes : dict of path to ExchangePolicy
        A window whose scheme fuses goes with those before it.
    strips : int or 'auto', optional
        Rows of a strip; None: whole tiles, and no segment of one exchange.

    Attributes
    ----------
    mesh : Mesh
        Of the ranks.
    values : dict of int to Value
        Those of the program.
    images : list of int
        Those that are given from outside.
    """

    def __init__(
        self,
        program: Any,
        mesh: Mesh,
        layouts: Sequence[Layout],
        gather_at: Sequence[str],
        schemes: Mapping[str, ExchangePolicy],
        strips: Strips,
    ) -> None:
        self.mesh, self.schemes, self.strips, self._apart = mesh, schemes, strips, bool(mesh.axes - {0})
        self.shape, self.functions = shape_of(layouts[0]), program.functions
        if strips is not None and mesh.parts[1] == 1:  # so that rules show what cutting rows takes
            mesh = Mesh((mesh.parts[0], 2, *mesh.parts[2:]))
            layouts = [cut(shape_of(layout), mesh) for layout in layouts]
        self.probe = _Probe(mesh, 0)
        plan, _ = lowered(program, mesh, 0, layouts, gather_at, lowering=self.probe)
        self.values = {value.id: value for value in self.probe.values}
        self.images = list(plan.inputs)
        outputs = {out for out in plan.outputs if isinstance(out, int)}
        self.kept = self.probe.kept | outputs | set(plan.mutated.values())
        self.readers: dict[int, list[int]] = {}
        for number, noted in enumerate(self.probe.noted):
            for value in noted.read:
                self.readers.setdefault(value, []).append(number)

    def segments(self, starts: Collection[int] = ()) -> list[OperatorSegment]:
        """Return the segments; at `starts`, numbers of operators, one ends."""
        found, building, policy = list[_Building](), None, None
        for number, noted in enumerate(self.probe.noted):
            mine = policy_of(noted.call.where.module, self.schemes)
            wide = self._wide(mine)
            begins = noted.windows or (wide and any(value in self.images for value in noted.read))
            longest = self._longest(mine) if begins else inf
            if building is not None and (begins or building.reads(noted)):
                alike = not begins or _alike(mine, policy)
                fits = alike and number not in starts and building.depth_with(noted) <= longest
                if fits and building.add(number, noted):
                    continue
                if not (building.reads(noted) or noted.windows):
                    continue
                building = None
            if begins and longest:
                building, policy = _Building(self.probe, self.functions, self._sums(mine), wide), mine
                if building.add(number, noted):
                    found.append(building)
                else:
                    building = None
        several = (each for each in found if max(each.depth.values()) > (self.strips is None and not each.wide))
        segments = map(self._segment, several)
        made = [segment for segment in segments if segment.outputs]  # others compute values that are never read
        self._check_wide(made)
        return made

    def _wide(self, policy: ExchangePolicy | None) -> bool:
        """Return whether windows of a scheme have to be computed from the image alone."""
        return self._apart and isinstance(policy, Fusion) and policy.reads_wide

    def _check_wide(self, segments: Sequence[OperatorSegment]) -> None:
        """Raise ConfigError for a window that would have to exchange what its scheme exchanges nowhere."""
        alone = {
            number for segment in segments if segment.wide and self._of_images(segment) for number in segment.noted
        }
        for number, noted in enumerate(self.probe.noted):
            policy = policy_of(noted.call.where.module, self.schemes)
            if noted.windows and number not in alone and self._wide(policy):
                assert isinstance(policy, Fusion)
                here = noted.call.where
                norms = ", or sum the statistics of norms over tiles in it: 'overlap_tile(statistics=global)'"
                raise ConfigError(
                    f"{here.place}scheme: '{scheme_text(policy)}' exchanges nothing, but"
                    f" {here.operator} in module '{here.module}' depends on cells of other tiles that cannot be"
                    " computed from the image around a tile; give other modules another scheme, as in"
                    " {'': 'halo', 'encoder': 'overlap_tile'}" + norms * (policy.statistics is None)
                )

    def _of_images(self, segment: OperatorSegment) -> bool:
        others = (self.values[value] for value in segment.inputs if value in self.values and value not in self.images)
        return not any(axes_of(value.layout) - {0} for value in others)

    def segment_of(self, numbers: Sequence[int]) -> OperatorSegment:
        """Return the segment of some operators, which could all be in one."""
        policy = policy_of(self.probe.noted[numbers[0]].call.where.module, self.schemes)
        building = _Building(self.probe, self.functions, self._sums(policy))
        for number in numbers:
            noted = self.probe.noted[number]
            if noted.windows or building.reads(noted):
                building.add(number, noted)
        return self._segment(building)

    def _longest(self, policy: ExchangePolicy | None) -> float:
        """Return through how many windows a segment of a scheme goes at most; 0: there is none."""
        if isinstance(policy, Fusion):
            return policy.layers
        if policy is not None or self.strips is None:
            return 0
        return 1 if self.mesh.axes - {0} else inf  # windows exchange nothing where but samples are apart

    def _sums(self, policy: ExchangePolicy | None) -> bool:
        """Return whether norms with statistics of the image may be in a segment."""
        return self.strips is None and isinstance(policy, Fusion) and policy.statistics is not None

    def _segment(self, building: _Building) -> OperatorSegment:
        inside = set(building.numbers)
        outputs = [
            value
            for value in building.depth
            if value in self.kept or not inside.issuperset(self.readers.get(value, ()))
        ]
        cut = [value for value in outputs if is_box(self.values[value].layout, self.probe.mesh.axes)]
        ends = [building.known[value] for value in cut]
        for call in building.calls:  # the statistics of a norm may be read though its results are not
            if call.number in building.statistics:
                ends += [building.statistics[call.number].x, building.values[ids_of(call.found)[0]]]
        inputs = [value.id for _, value in building.given]
        outs = [value.id for value in ends]
        plan = TorchPlan(building.mesh, 0, building.steps, building.values, {}, {}, inputs, outs, {})
        traced = Traced(building, plan, self.shape, ends)
        given = [value for value, _ in building.given]
        noted = {number: self.probe.noted[number] for number in building.numbers}
        rows = self._rows(building, ends)
        return OperatorSegment(noted, given, outputs, building.known, traced, rows, building.wide)

    def _rows(self, building: _Building, ends: Sequence[Value]) -> int:
        if self.strips != "auto":
            return self.strips or 0
        rows = max((atom.extent for end in ends for (atom,) in end.layout if atom.axis == 1), default=1)
        made = [self.values[value] for value in building.depth]
        numbers = sum(prod(value.shape) * value.dtype.itemsize for value in made) // self.shape[0]
        return max(1, min(rows, CACHE * rows // max(1, numbers)))


def _alike(one: ExchangePolicy | None, other: ExchangePolicy | None) -> bool:
    """Return whether windows of two schemes can be in one segment."""
    if one is None or other is None:
        return one is other
    return type(one) is type(other) and one.arguments() == other.arguments()
