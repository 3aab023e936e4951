"""Segments of a module: groups of consecutive operators, beginning with windows."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from math import inf, prod
from typing import Any, Literal, NamedTuple, TypeAlias

from torch.utils import _pytree as pytree

from ...errors import ConfigError
from ...halo import ExchangePolicy, scheme_text
from ...halo.fusion import Fusion
from ..capture.capture import lower_program
from ..exchange.schemes import policy_of
from ..ir.errors import UnsupportedOperator
from ..ir.graph import Step, Value
from ..ir.layout import Layout, Mesh, axes_of, cut, is_box, shape_of
from ..lowering.plan import TorchPlan
from .in_blocks import BlockLowering, Call, Traced, ids_of, paired
from .program_lowering import ProgramLowering

Strips: TypeAlias = int | Literal["auto"] | None
CACHE = 1 << 20
"""Most bytes of one sample in a strip of 'auto', over the results of all its operators."""
KEY = -1
"""Stands for the random seed among values of the program."""
_KINDS = ("local", "view", "norm", "spread", "counted")


class OperatorRecord(NamedTuple):
    """Operator of the program, the result of its rule, and whether it has windows over other tiles."""

    call: Call
    windows: bool
    local: bool

    @property
    def read(self) -> list[int]:
        """Values that it reads."""
        return ids_of((self.call.args, self.call.kwargs))


class _Probe(ProgramLowering):
    """Ordinary lowering that records the operators.

    Attributes
    ----------
    kept : set of int
        Values read outside of operators: outputs, and values that are redistributed between modules.
    """

    def __init__(self, mesh: Mesh, rank: int) -> None:
        super().__init__(mesh, rank)
        self.records, self.kept = list[OperatorRecord](), set[int]()

    def lower_program_call(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Lower an operator by its rule and record it."""
        start, context = len(self.steps), (target, args, kwargs, self.where, self.out, self.draws)
        result = self.lower_by_rule(target, args, kwargs)
        views = [step for step in self.steps[start:] if step.kind == "view"]
        windows = any(step.transfer is not None and not step.transfer.needs_no_messages for step in views)
        local = all(map(_is_window, views)) and all(step.kind in _KINDS for step in self.steps[start:])
        self.records.append(OperatorRecord(Call(self.number, *context, result), windows, local))
        return result

    def enter(self, value: Value, context: Any) -> Value:
        """Record a value that is read."""
        self._keep(value)
        return super().enter(value, context)

    def gathered(self, value: Value, dims: Any = None) -> Value:
        """Record a value that is read."""
        self._keep(value)
        return super().gathered(value, dims)

    def recut(self, value: Value, layout: Layout) -> Value:
        """Record a value that is read."""
        self._keep(value)
        return super().recut(value, layout)

    def _keep(self, value: Value) -> None:
        if not self.in_rule:
            self.kept.add(value.id)


def _is_window(step: Step) -> bool:
    """Return whether each rank's view is a range around its own cells along each partitioned image axis."""
    assert step.transfer is not None
    return all(
        (request.axis is not None or request.used is not None)
        and request.axis == request.source.axis
        and request.dim > 1
        and all(len(r) == 1 for r in request.ranges)
        for request in step.transfer.requests
    )


class _SegmentBuilder(BlockLowering):
    """Segment under construction, to which operators of the program are added.

    Attributes
    ----------
    wide : bool
        Whether it reads the image with the whole margin of a tile.
    numbers : list of int
        Of the operators.
    local_values : dict of int to Value
        Values of the segment by their number in the program: inputs, and results of operators.
    depth : dict of int to int
        Number of windows of the segment between its inputs and each result.
    program_inputs : list of (int, Value)
        The inputs by number in the program, and their values in the segment.
    """

    def __init__(self, probe: _Probe, functions: Sequence[Any], live: bool, wide: bool = False) -> None:
        super().__init__(probe.mesh.spatial, axes=probe.mesh.axes)
        self.functions, self.program, self.live, self.wide = functions, probe.values, live, wide
        self.numbers, self.local_values, self.depth = list[int](), dict[int, Value](), dict[int, int]()
        self.program_inputs: list[tuple[int, Value]] = []

    def reads(self, record: OperatorRecord) -> bool:
        """Return whether an operator reads a result of the segment."""
        return not self.depth.keys().isdisjoint(record.read)

    def depth_with(self, record: OperatorRecord) -> int:
        """Return the depth of an operator's results."""
        return record.windows + max((self.depth.get(value, 0) for value in record.read), default=0)

    def add(self, at: int, record: OperatorRecord) -> bool:
        """Add an operator if possible; return whether it was added."""
        inputs, calls, values = len(self.program_inputs), len(self.calls), dict(self.local_values)
        key, number = self.key, self._number
        try:
            result = self._lower_record(record)
        except UnsupportedOperator:
            self.statistics = {call: norm for call, norm in self.statistics.items() if call <= number}
            self.local_values, self.key = values, key
            del self.program_inputs[inputs:], self.calls[calls:]
            return False
        depth = self.depth_with(record)
        self.local_values.update(paired(record.call.result, result))
        self.depth.update((value, depth) for value in ids_of(record.call.result))
        self.numbers.append(at)
        return True

    def _lower_record(self, record: OperatorRecord) -> Any:
        call = record.call
        self.where, self.out, self.draws = call.where, call.out, call.draws
        structure = call.target is operator.getitem or isinstance(call.target, type)  # of results of operators
        boxes = [is_box(self.program[value].layout, self.mesh.axes) for value in ids_of(call.result)]
        if not (structure or (record.local and boxes and boxes[0])):
            self.refuse()
        args, kwargs = pytree.tree_map(
            lambda leaf: self._local_value(leaf) if isinstance(leaf, Value) else leaf, (call.args, call.kwargs)
        )
        start = len(self.steps)
        result = self.call(call.target, args, kwargs)
        if not self.recorded.issuperset(value for step in self.steps[start:] if step.inputs for value in step.outputs):
            self.refuse()  # some steps are outside of repeatable calls
        norm = self.statistics.get(self._number)
        if norm is not None and norm.x.id != ids_of(args)[0]:
            self.refuse()
        if norm is None and not (structure or all(boxes)):
            self.refuse()
        return result

    def _local_value(self, value: Value) -> Value:
        """Return the segment's value for a value of the program; new ones are inputs."""
        if value.id not in self.local_values:
            layout = value.layout_or_none
            if layout is None or any(len(dim) > 1 for dim in layout):
                self.refuse()
            self.cuts.begin(-1 - len(self.program_inputs))
            self.local_values[value.id] = self.input(
                tuple((self.mesh.atom(atom.extent, atom.axis),) for (atom,) in value.layout), value.dtype, value.kind
            )
            self.program_inputs.append((value.id, self.local_values[value.id]))
        return self.local_values[value.id]

    @property
    def takes_norms(self) -> bool:
        """Whether norms may have statistics that are summed over ranks."""
        return self.live

    def random_key(self) -> tuple[Value, int]:
        """Return the random seed, which is an input, and a number for this call."""
        new = self.key is None
        key = super().random_key()
        if new:
            self.program_inputs.append((KEY, key[0]))
        return key


class OperatorSegment(NamedTuple):
    """Segment of a program.

    Attributes
    ----------
    records : dict of int to OperatorRecord
        The operators, by number in the program.
    inputs, outputs : of int
        Values of the program that they read, and their results that others read.
    local_values : dict of int to Value
        Values of `traced` by their number in the program.
    traced : Traced
        Its outputs are the partitioned outputs, then the inputs and results of norms.
    rows : int
        Of a strip; 0: the whole tile at once.
    wide : bool
        Whether it reads the image with the whole margin of a tile.
    """

    records: dict[int, OperatorRecord]
    inputs: list[int]
    outputs: list[int]
    local_values: dict[int, Value]
    traced: Traced
    rows: int
    wide: bool

    @property
    def first(self) -> int:
        """The number of its first operator."""
        return min(self.records)


class Search:
    """Search for segments; the result is the same on all ranks.

    Parameters
    ----------
    program
        Result of `captured`.
    layouts : of the inputs
    schemes : dict of path to ExchangePolicy
        A window with a fusing scheme joins the segment of the windows before it.
    strips : int or 'auto', optional
        Rows of a strip; None: whole tiles, and no segment of a single exchange.

    Attributes
    ----------
    mesh : Mesh
        Of the ranks.
    values : dict of int to Value
        Values of the program.
    images : list of int
        Inputs of the program.
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
        if strips is not None and mesh.parts[1] == 1:  # so that rules show the dependences between rows
            mesh = Mesh((mesh.parts[0], 2, *mesh.parts[2:]))
            layouts = [cut(shape_of(layout), mesh) for layout in layouts]
        self.probe = _Probe(mesh, 0)
        plan, _ = lower_program(program, mesh, 0, layouts, gather_at, lowering=self.probe)
        self.values = {value.id: value for value in self.probe.values}
        self.images = list(plan.inputs)
        outputs = {out for out in plan.outputs if isinstance(out, int)}
        self.kept = self.probe.kept | outputs | set(plan.mutated.values())
        self.readers: dict[int, list[int]] = {}
        for number, record in enumerate(self.probe.records):
            for value in record.read:
                self.readers.setdefault(value, []).append(number)

    def segments(self, starts: Collection[int] = ()) -> list[OperatorSegment]:
        """Return the segments; operators with numbers in `starts` begin a new one."""
        builders, builder, policy = list[_SegmentBuilder](), None, None
        for number, record in enumerate(self.probe.records):
            own_policy = policy_of(record.call.where.module, self.schemes)
            wide = self._wide(own_policy)
            begins = record.windows or (wide and any(value in self.images for value in record.read))
            longest = self._longest(own_policy) if begins else inf
            if builder is not None and (begins or builder.reads(record)):
                mergeable = not begins or _can_merge(own_policy, policy)
                fits = mergeable and number not in starts and builder.depth_with(record) <= longest
                if fits and builder.add(number, record):
                    continue
                if not (builder.reads(record) or record.windows):
                    continue
                builder = None
            if begins and longest:
                builder, policy = _SegmentBuilder(self.probe, self.functions, self._sums(own_policy), wide), own_policy
                if builder.add(number, record):
                    builders.append(builder)
                else:
                    builder = None
        deep = (group for group in builders if max(group.depth.values()) > (self.strips is None and not group.wide))
        segments = map(self._segment, deep)
        results = [segment for segment in segments if segment.outputs]  # others compute values that are never read
        self._check_wide(results)
        return results

    def _wide(self, policy: ExchangePolicy | None) -> bool:
        """Return whether windows of a scheme must be computed from the image alone."""
        return self._apart and isinstance(policy, Fusion) and policy.reads_wide

    def _check_wide(self, segments: Sequence[OperatorSegment]) -> None:
        """Raise ConfigError for a window that needs an exchange although its scheme exchanges nothing."""
        alone = {
            number for segment in segments if segment.wide and self._of_images(segment) for number in segment.records
        }
        for number, record in enumerate(self.probe.records):
            policy = policy_of(record.call.where.module, self.schemes)
            if record.windows and number not in alone and self._wide(policy):
                assert isinstance(policy, Fusion)
                where = record.call.where
                norms = ", or sum the statistics of norms over tiles in it: 'overlap_tile(statistics=global)'"
                raise ConfigError(
                    f"{where.place}scheme: '{scheme_text(policy)}' exchanges nothing, but"
                    f" {where.operator} in module '{where.module}' depends on cells of other tiles that cannot be"
                    " computed from the image around a tile; give other modules another scheme, as in"
                    " {'': 'halo', 'encoder': 'overlap_tile'}" + norms * (policy.statistics is None)
                )

    def _of_images(self, segment: OperatorSegment) -> bool:
        others = (self.values[value] for value in segment.inputs if value in self.values and value not in self.images)
        return not any(axes_of(value.layout) - {0} for value in others)

    def segment_of(self, numbers: Sequence[int]) -> OperatorSegment:
        """Return the segment of operators that can all be in one."""
        policy = policy_of(self.probe.records[numbers[0]].call.where.module, self.schemes)
        builder = _SegmentBuilder(self.probe, self.functions, self._sums(policy))
        for number in numbers:
            record = self.probe.records[number]
            if record.windows or builder.reads(record):
                builder.add(number, record)
        return self._segment(builder)

    def _longest(self, policy: ExchangePolicy | None) -> float:
        """Return the largest number of consecutive windows in a segment of a scheme; 0: no segments."""
        if isinstance(policy, Fusion):
            return policy.layers
        if policy is not None or self.strips is None:
            return 0
        return 1 if self.mesh.axes - {0} else inf  # windows exchange nothing if only the batch is partitioned

    def _sums(self, policy: ExchangePolicy | None) -> bool:
        """Return whether norms with statistics of the whole image may be in a segment."""
        return self.strips is None and isinstance(policy, Fusion) and policy.statistics is not None

    def _segment(self, builder: _SegmentBuilder) -> OperatorSegment:
        inside = set(builder.numbers)
        outputs = [
            value for value in builder.depth if value in self.kept or not inside.issuperset(self.readers.get(value, ()))
        ]
        cut = [value for value in outputs if is_box(self.values[value].layout, self.probe.mesh.axes)]
        ends = [builder.local_values[value] for value in cut]
        for call in builder.calls:  # the statistics of a norm may be read though its results are not
            if call.number in builder.statistics:
                ends += [builder.statistics[call.number].x, builder.values[ids_of(call.result)[0]]]
        inputs = [value.id for _, value in builder.program_inputs]
        outs = [value.id for value in ends]
        plan = TorchPlan(builder.mesh, 0, builder.steps, builder.values, {}, {}, inputs, outs, {})
        traced = Traced(builder, plan, self.shape, ends)
        inputs_in_program = [value for value, _ in builder.program_inputs]
        records = {number: self.probe.records[number] for number in builder.numbers}
        rows = self._rows(builder, ends)
        return OperatorSegment(records, inputs_in_program, outputs, builder.local_values, traced, rows, builder.wide)

    def _rows(self, builder: _SegmentBuilder, ends: Sequence[Value]) -> int:
        if self.strips != "auto":
            return self.strips or 0
        rows = max((atom.extent for end in ends for (atom,) in end.layout if atom.axis == 1), default=1)
        values = [self.values[value] for value in builder.depth]
        numbers = sum(prod(value.shape) * value.dtype.itemsize for value in values) // self.shape[0]
        return max(1, min(rows, CACHE * rows // max(1, numbers)))


def _can_merge(a: ExchangePolicy | None, b: ExchangePolicy | None) -> bool:
    """Return whether windows of two schemes can be in one segment."""
    if a is None or b is None:
        return a is b
    return type(a) is type(b) and a.arguments() == b.arguments()
