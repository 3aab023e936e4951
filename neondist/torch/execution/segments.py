"""Segments of a module: groups of consecutive operators, beginning with windows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Any, Literal, TypeAlias

from torch.utils import _pytree as pytree

from ...errors import ConfigError
from ...halo import ExchangePolicy, scheme_text
from ...halo.fusion import Fusion
from ..exchange.schemes import policy_of
from ..ir.errors import UnsupportedOperator
from ..ir.graph import Value
from ..ir.layout import Layout, Mesh, axes_of, cut, is_box, shape_of
from .in_blocks import BlockLowering, Statistics, Traced, ids_of, paired
from .program_lowering import OperatorRecord, Program

Strips: TypeAlias = int | Literal["auto"] | None
CACHE = 1 << 20
"""Most bytes of one sample in a strip of 'auto', over the results of all its operators."""
KEY = -1
"""Stands for the random seed among values of the program."""


class SegmentBuilder(BlockLowering):
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
    program_inputs : dict of int to Value
        Values of the segment by the number of an input in the program.
    norms : dict of int to Statistics
        Live norms by the number of their operator; at most `live`.
    why : UnsupportedOperator or None
        Error of the first operator that could not be added.
    """

    def __init__(self, program: Program, axes: frozenset[int], live: float = 0, wide: bool = False) -> None:
        super().__init__(program.mesh.spatial, axes=axes)
        self.functions, self.program, self.live, self.wide = program.functions, program.values, live, wide
        self.numbers, self.local_values, self.depth = list[int](), dict[int, Value](), dict[int, int]()
        self.program_inputs, self.norms = dict[int, Value](), dict[int, Statistics]()
        self.why: UnsupportedOperator | None = None

    def reads(self, record: OperatorRecord) -> bool:
        """Return whether an operator reads a result of the segment."""
        return not self.depth.keys().isdisjoint(record.read)

    def depth_with(self, record: OperatorRecord) -> int:
        """Return the depth of an operator's results."""
        return record.windows + max((self.depth.get(value, 0) for value in record.read), default=0)

    def add(self, at: int, record: OperatorRecord, inside: bool = True) -> bool:
        """Add an operator if possible; return whether it was added.

        Parameters
        ----------
        inside : bool
            Whether it is part of the segment; others are repeated in the segment, which may read their results.
        """
        before = dict(self.program_inputs), dict(self.local_values), list(self.statistics), self.key
        try:
            result = self._lower_record(record)
            norms = self.statistics[len(before[2]) :]
            self.check(record, result, norms)
        except UnsupportedOperator as refusal:
            self.program_inputs, self.local_values, self.statistics, self.key = before
            self.why = self.why or refusal
            return False
        self.local_values.update(paired(record.result, result))
        self.norms.update((at, norm) for norm in norms)
        if inside:
            depth = self.depth_with(record)
            self.depth.update((value, depth) for value in ids_of(record.result))
            self.numbers.append(at)
        return True

    def add_input(self, number: int, value: Value, layout: Layout) -> Value:
        """Return an input of the segment for a value of the program, partitioned like this layout."""
        layout = tuple((self.mesh.atom(atom.extent, atom.axis),) for (atom,) in layout)
        self.program_inputs[number] = self.input(layout, value.dtype, value.kind)
        return self.program_inputs[number]

    def inputs_of(self, parts: Sequence[Traced]) -> dict[int, Value]:
        """Return the inputs on which parts of the segment depend, by number in the program."""
        read = {value.id for part in parts for value in part.inputs}
        return {number: value for number, value in self.program_inputs.items() if value.id in read}

    def check(self, record: OperatorRecord, result: Any, norms: Sequence[Statistics]) -> None:
        """Refuse an operator whose results are not boxes of cells around those of its arguments."""
        boxes = [is_box(self.program[value].layout, self.mesh.axes) for value in ids_of(record.result)]
        if not (record.structure or (record.local and boxes and boxes[0] and (norms or all(boxes)))):
            self.refuse()
        if any((norm.x, norm.y.id) != (self.local_values[record.read[0]], ids_of(result)[0]) for norm in norms):
            self.refuse()

    def _lower_record(self, record: OperatorRecord) -> Any:
        self.where, self.out, self.draws = record.where, record.out, record.draws
        args, kwargs = pytree.tree_map(
            lambda leaf: self._local_value(leaf) if isinstance(leaf, Value) else leaf, (record.args, record.kwargs)
        )
        return self.call(record.target, args, kwargs)

    def _local_value(self, value: Value) -> Value:
        """Return the segment's value for a value of the program; new ones are inputs."""
        if value.id not in self.local_values:
            if value.layout_or_none is None or any(len(dim) > 1 for dim in value.layout):
                self.refuse()
            self.local_values[value.id] = self.add_input(value.id, value, value.layout)
        return self.local_values[value.id]

    @property
    def takes_norms(self) -> bool:
        """Whether another norm may have statistics of the whole image."""
        return len(self.statistics) < self.live

    def random_key(self) -> tuple[Value, int]:
        """Return the random seed, which is an input, and a number for this call."""
        new = self.key is None
        key = super().random_key()
        if new:
            self.program_inputs[KEY] = key[0]
        return key


@dataclass(frozen=True)
class OperatorSegment:
    """Segment of a program.

    Attributes
    ----------
    records : dict of int to OperatorRecord
        The operators, by number in the program.
    inputs : dict of int to Value
        Values of `traced` by the values of the program that the operators read.
    outputs : list of int
        Results of the operators that others read.
    local_values : dict of int to Value
        Values of `traced` by their number in the program.
    traced : Traced
        Its outputs are the partitioned outputs, then the inputs and results of norms.
    norms : dict of int to Statistics
        Live norms by the number of their operator.
    rows : int
        Of a strip; 0: the whole tile at once.
    wide : bool
        Whether it reads the image with the whole margin of a tile.
    """

    records: dict[int, OperatorRecord]
    inputs: dict[int, Value]
    outputs: list[int]
    local_values: dict[int, Value]
    traced: Traced
    norms: dict[int, Statistics]
    rows: int = 0
    wide: bool = False

    @property
    def first(self) -> int:
        """The number of its first operator."""
        return min(self.records)

    @property
    def parts(self) -> list[Traced]:
        """Parts that are computed one after the other."""
        return [self.traced]


class Search:
    """Search for segments; the result is the same on all ranks.

    Parameters
    ----------
    program, layouts, gather_at : see Program
    mesh : Mesh
        Of the ranks.
    schemes : dict of path to ExchangePolicy
        A window with a fusing scheme joins the segment of the windows before it.
    strips : int or 'auto', optional
        Rows of a strip; None: whole tiles, and no segment of a single exchange.

    Attributes
    ----------
    program : Program
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
        self._samples, *_ = shape_of(layouts[0])
        if strips is not None and mesh.parts[1] == 1:  # so that rules show the dependences between rows
            mesh = Mesh((mesh.parts[0], 2, *mesh.parts[2:]))
            layouts = [cut(shape_of(layout), mesh) for layout in layouts]
        self.program = Program(program, mesh, layouts, gather_at)

    def segments(self, starts: Collection[int] = ()) -> list[OperatorSegment]:
        """Return the segments; operators with numbers in `starts` begin a new one."""
        builders, builder, policy = list[SegmentBuilder](), None, None
        for number, record in enumerate(self.program.records):
            own_policy = policy_of(record.where.module, self.schemes)
            wide = self._wide(own_policy)
            begins = record.windows or (wide and any(value in self.program.images for value in record.read))
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
                builder, policy = self._builder(own_policy, wide), own_policy
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
        for number, record in enumerate(self.program.records):
            policy = policy_of(record.where.module, self.schemes)
            if record.windows and number not in alone and self._wide(policy):
                assert isinstance(policy, Fusion)
                where = record.where
                norms = ", or sum the statistics of norms over tiles in it: 'overlap_tile(statistics=global)'"
                raise ConfigError(
                    f"{where.place}scheme: '{scheme_text(policy)}' exchanges nothing, but"
                    f" {where.operator} in module '{where.module}' depends on cells of other tiles that cannot be"
                    " computed from the image around a tile; give other modules another scheme, as in"
                    " {'': 'halo', 'encoder': 'overlap_tile'}" + norms * (policy.statistics is None)
                )

    def _of_images(self, segment: OperatorSegment) -> bool:
        values, images = self.program.values, self.program.images
        others = (values[value] for value in segment.inputs if value in values and value not in images)
        return not any(axes_of(value.layout) - {0} for value in others)

    def segment_of(self, numbers: Sequence[int]) -> OperatorSegment:
        """Return the segment of operators that can all be in one."""
        policy = policy_of(self.program.records[numbers[0]].where.module, self.schemes)
        builder = self._builder(policy)
        for number in numbers:
            record = self.program.records[number]
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

    def _builder(self, policy: ExchangePolicy | None, wide: bool = False) -> SegmentBuilder:
        sums = self.strips is None and isinstance(policy, Fusion) and policy.statistics is not None
        return SegmentBuilder(self.program, self.program.mesh.axes, inf if sums else 0, wide)

    def _segment(self, builder: SegmentBuilder) -> OperatorSegment:
        outputs, local_values = self.program.outputs(builder.depth, builder.numbers), builder.local_values
        boxes = (value for value in outputs if is_box(self.program.values[value].layout, builder.mesh.axes))
        ends = [local_values[value] for value in boxes]
        for norm in builder.norms.values():  # its statistics may be read though its results are not
            ends += norm.x, norm.y
        traced = Traced(builder, [*builder.program_inputs.values()], ends)
        records = {number: self.program.records[number] for number in builder.numbers}
        inputs, rows = builder.inputs_of([traced]), self._rows(builder, ends)
        return OperatorSegment(records, inputs, outputs, local_values, traced, builder.norms, rows, builder.wide)

    def _rows(self, builder: SegmentBuilder, ends: Sequence[Value]) -> int:
        if self.strips != "auto":
            return self.strips or 0
        rows = max((atom.extent for end in ends for (atom,) in end.layout if atom.axis == 1), default=1)
        values = [self.program.values[value] for value in builder.depth]
        numbers = sum(prod(value.shape) * value.dtype.itemsize for value in values) // self._samples
        return max(1, min(rows, CACHE * rows // max(1, numbers)))


def _can_merge(a: ExchangePolicy | None, b: ExchangePolicy | None) -> bool:
    """Return whether windows of two schemes can be in one segment."""
    if a is None or b is None:
        return a is b
    return type(a) is type(b) and a.arguments() == b.arguments()
