"""Segments of a module: groups of consecutive operators, beginning with windows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Any, Literal, TypeAlias

from torch.utils import _pytree as pytree

from ...errors import ConfigError
from ...halo import ExchangePolicy, scheme_text
from ...halo.fusion import FusionScheme
from ..exchange.schemes import policy_of_module
from ..ir.errors import UnsupportedOperator
from ..ir.graph import Value
from ..ir.layout import Layout, Mesh, axes_of, default_layout, is_box, shape_of
from .block_lowering import BlockLowering, InputNorm, TracedSubgraph, pair_ids_with_values, value_ids_in
from .program_lowering import OperatorRecord, RecordedProgram

Strips: TypeAlias = int | Literal["auto"] | None
MAX_STRIP_BYTES = 1 << 20
"""Maximum bytes per sample of all operators' results in a strip if `strips` is 'auto'."""
SEED_INPUT_NUMBER = -1
"""Number of the random seed among values of the program."""


class SegmentBuilder(BlockLowering):
    """Segment under construction, to which operators of the program are added.

    Attributes
    ----------
    has_margin : bool
        Whether a rank reads its tile of the image with a margin wide enough for all windows of the segment.
    segment_values : dict of int to Value
        Values of the segment by their number in the program: inputs, and results of operators.
    window_depth_by_value : dict of int to int
        Largest number of consecutive windows of the segment between its inputs and each result.
    inputs_by_program_number : dict of int to Value
        Inputs of the segment, including the random seed, if used (`SEED_INPUT_NUMBER`).
    norms : dict of int to InputNorm
        Input norms by the number of their operator; at most `max_norms`.
    refusal : UnsupportedOperator or None
        Error of the first operator that could not be added.
    """

    def __init__(
        self, program: RecordedProgram, axes: frozenset[int], max_norms: float = 0, has_margin: bool = False
    ) -> None:
        super().__init__(program.mesh.spatial_ndim, axes=axes)
        self.autograd_functions, self.program_values = program.autograd_functions, program.values
        self.max_norms, self.has_margin = max_norms, has_margin
        self.operator_numbers = list[int]()
        self.segment_values = dict[int, Value]()
        self.window_depth_by_value = dict[int, int]()
        self.inputs_by_program_number = dict[int, Value]()
        self.norms = dict[int, InputNorm]()
        self.refusal: UnsupportedOperator | None = None

    def is_read_by(self, record: OperatorRecord) -> bool:
        """Return whether an operator reads a result of the segment."""
        return not self.window_depth_by_value.keys().isdisjoint(record.read_value_ids)

    def window_depth_with(self, record: OperatorRecord) -> int:
        """Return the largest number of consecutive windows of the segment up to and including an operator."""
        return record.needs_halo_exchange + max(
            (self.window_depth_by_value.get(value, 0) for value in record.read_value_ids), default=0
        )

    def try_add(self, number: int, record: OperatorRecord, in_segment: bool = True) -> bool:
        """Add an operator if possible; return whether it was added.

        Parameters
        ----------
        in_segment : bool
            Whether the operator belongs to the segment; otherwise, the segment recomputes those results that it needs.
        """
        inputs_before, values_before = dict(self.inputs_by_program_number), dict(self.segment_values)
        norms_before, seed_before = list(self.input_norms), self.seed
        try:
            result = self._lower_record(record)
            norms = self.input_norms[len(norms_before) :]
            self.require_boxes(record, result, norms)
        except UnsupportedOperator as refusal:
            self.inputs_by_program_number, self.segment_values = inputs_before, values_before
            self.input_norms, self.seed = norms_before, seed_before
            self.refusal = self.refusal or refusal
            return False
        self.segment_values.update(pair_ids_with_values(record.result, result))
        self.norms.update((number, norm) for norm in norms)
        if in_segment:
            depth = self.window_depth_with(record)
            self.window_depth_by_value.update((value, depth) for value in value_ids_in(record.result))
            self.operator_numbers.append(number)
        return True

    def add_input(self, program_value_id: int, value: Value, layout: Layout) -> Value:
        """Add an input of the segment for a value of the program, partitioned as in a layout, and return it."""
        layout = tuple((self.mesh.even_atom(atom.extent, atom.axis),) for (atom,) in layout)
        self.inputs_by_program_number[program_value_id] = self.new_input(layout, value.dtype, value.kind)
        return self.inputs_by_program_number[program_value_id]

    def inputs_of(self, subgraphs: Sequence[TracedSubgraph]) -> dict[int, Value]:
        """Return the inputs on which subgraphs of the segment depend, by their number in the program."""
        read_ids = {value.id for subgraph in subgraphs for value in subgraph.inputs}
        return {number: value for number, value in self.inputs_by_program_number.items() if value.id in read_ids}

    def require_boxes(self, record: OperatorRecord, result: Any, norms: Sequence[InputNorm]) -> None:
        """Reject an operator whose results cannot be computed from boxes of cells of its arguments."""
        are_boxes = [is_box(self.program_values[value].layout, self.mesh.axes) for value in value_ids_in(record.result)]
        if not (
            record.is_getitem_or_constructor
            or (record.can_be_in_segment and are_boxes and are_boxes[0] and (norms or all(are_boxes)))
        ):
            self.refuse()
        if any(
            (n.x, n.y.id) != (self.segment_values[record.read_value_ids[0]], value_ids_in(result)[0]) for n in norms
        ):
            self.refuse()

    def _lower_record(self, record: OperatorRecord) -> Any:
        self.where, self.fake_out, self.draw_number = record.where, record.fake_out, record.draw_number
        args, kwargs = pytree.tree_map(
            lambda leaf: self._segment_value(leaf) if isinstance(leaf, Value) else leaf, (record.args, record.kwargs)
        )
        return self.lower_call(record.target, args, kwargs)

    def _segment_value(self, value: Value) -> Value:
        """Return the segment's value for a value of the program; if there is none, add an input."""
        if value.id not in self.segment_values:
            if value.layout_or_none is None or any(len(dim) > 1 for dim in value.layout):
                self.refuse()
            self.segment_values[value.id] = self.add_input(value.id, value, value.layout)
        return self.segment_values[value.id]

    @property
    def can_add_input_norm(self) -> bool:
        """Whether a further norm may use statistics of the whole image."""
        return len(self.input_norms) < self.max_norms

    def random_key(self) -> tuple[Value, int]:
        """Return the random seed, which is an input of the segment, and a number for this call."""
        is_first_draw = self.seed is None
        key = super().random_key()
        if is_first_draw:
            self.inputs_by_program_number[SEED_INPUT_NUMBER] = key[0]
        return key


@dataclass(frozen=True)
class OperatorSegment:
    """Segment of a program.

    Attributes
    ----------
    records : dict of int to OperatorRecord
        The operators, by number in the program.
    inputs : dict of int to Value
        Values of `traced` by their number in the program, for the values that the operators read.
    outputs : list of int
        Numbers of the results that the rest of the program reads, or that the program returns.
    segment_values : dict of int to Value
        Values of `traced` by their number in the program.
    traced : TracedSubgraph
        Computation of the segment; its outputs are the partitioned outputs, then the inputs and results of norms.
    norms : dict of int to InputNorm
        Input norms by the number of their operator.
    strip_rows : int
        Rows of a strip; 0: the whole tile at once.
    has_margin : bool
        Whether a rank reads its tile of the image with a margin wide enough for all windows of the segment.
    """

    records: dict[int, OperatorRecord]
    inputs: dict[int, Value]
    outputs: list[int]
    segment_values: dict[int, Value]
    traced: TracedSubgraph
    norms: dict[int, InputNorm]
    strip_rows: int = 0
    has_margin: bool = False

    @property
    def first_operator(self) -> int:
        """Number of the segment's first operator."""
        return min(self.records)

    @property
    def subgraphs(self) -> list[TracedSubgraph]:
        """Subgraphs in the order of their computation."""
        return [self.traced]


class SegmentSearch:
    """Search for segments; the result is the same on all ranks.

    Parameters
    ----------
    program, layouts, gather_at : see RecordedProgram
    schemes : dict of path to ExchangePolicy
        A window with a fusing scheme joins the segment of the windows before it, up to the scheme's `layers`.
    strips : int or 'auto', optional
        Rows of a strip; None: whole tiles, and only segments that replace several exchanges.
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
        self.mesh, self.schemes, self.strips = mesh, schemes, strips
        self._has_neighbours = bool(mesh.axes - {0})
        self._num_samples, *_ = shape_of(layouts[0])
        if strips is not None and mesh.parts[1] == 1:  # so that rules declare the dependences between rows
            mesh = Mesh((mesh.parts[0], 2, *mesh.parts[2:]))
            layouts = [default_layout(shape_of(layout), mesh) for layout in layouts]
        self.program = RecordedProgram(program, mesh, layouts, gather_at)

    def find_segments(
        self, first_operators: Collection[int] = (), excluded_operators: Collection[int] = ()
    ) -> list[OperatorSegment]:
        """Return the segments of operators.

        Parameters
        ----------
        first_operators : collection of int
            Operators, by number, that begin a new segment.
        excluded_operators : collection of int
            Operators, by number, that belong to no segment.
        """
        builders = list[SegmentBuilder]()
        builder = builder_policy = None
        for number, record in enumerate(self.program.records):
            if number in excluded_operators:
                continue
            own_policy = policy_of_module(record.where.module, self.schemes)
            has_margin = self._must_read_margin(own_policy)
            begins_segment = record.needs_halo_exchange or (
                has_margin and any(v in self.program.image_value_ids for v in record.read_value_ids)
            )
            max_depth = self._max_window_depth(own_policy) if begins_segment else inf
            if builder is not None and (begins_segment or builder.is_read_by(record)):
                can_merge = not begins_segment or _can_share_segment(own_policy, builder_policy)
                fits = can_merge and number not in first_operators and builder.window_depth_with(record) <= max_depth
                if fits and builder.try_add(number, record):
                    continue
                if not (builder.is_read_by(record) or record.needs_halo_exchange):
                    continue
                builder = None
            if begins_segment and max_depth:
                builder, builder_policy = self._new_builder(own_policy, has_margin), own_policy
                if builder.try_add(number, record):
                    builders.append(builder)
                else:
                    builder = None
        deep_builders = (
            b for b in builders if max(b.window_depth_by_value.values()) > (self.strips is None and not b.has_margin)
        )
        segments = map(self._build_segment, deep_builders)
        results = [segment for segment in segments if segment.outputs]  # results of other segments are never read
        self._check_margin_schemes(results)
        return results

    @property
    def reads_margins(self) -> bool:
        """Whether a scheme computes windows from the image alone, so that tiles have margins."""
        return any(map(self._must_read_margin, self.schemes.values()))

    def is_approximate(self, record: OperatorRecord) -> bool:
        """Return whether the results of an operator's windows depend on the grid."""
        policy = policy_of_module(record.where.module, self.schemes)
        return self._has_neighbours and policy is not None and not isinstance(policy, FusionScheme)

    def _must_read_margin(self, policy: ExchangePolicy | None) -> bool:
        """Return whether windows of a scheme must be computed from the image alone."""
        return self._has_neighbours and isinstance(policy, FusionScheme) and policy.reads_extended_tile

    def _check_margin_schemes(self, segments: Sequence[OperatorSegment]) -> None:
        """Raise ConfigError for a window that needs an exchange although its scheme exchanges nothing."""
        exchange_free_segments = (s for s in segments if s.has_margin and self._reads_only_images(s))
        exchange_free_operators = {number for s in exchange_free_segments for number in s.records}
        for number, record in enumerate(self.program.records):
            policy = policy_of_module(record.where.module, self.schemes)
            if record.needs_halo_exchange and number not in exchange_free_operators and self._must_read_margin(policy):
                assert isinstance(policy, FusionScheme)
                where = record.where
                norms_hint = ", or use 'overlap_tile(statistics=global)', which sums the statistics of norms over tiles"
                raise ConfigError(
                    f"{where.source and where.source + ': '}scheme: '{scheme_text(policy)}' exchanges nothing, but"
                    f" {where.operator} in module '{where.module}' depends on cells of other tiles that cannot be"
                    " computed from the image around a tile; give other modules another scheme, as in"
                    " {'': 'halo', 'encoder': 'overlap_tile'}" + norms_hint * (policy.statistics is None)
                )

    def _reads_only_images(self, segment: OperatorSegment) -> bool:
        values = self.program.values
        image_value_ids = self.program.image_value_ids
        other_inputs = (values[value] for value in segment.inputs if value in values and value not in image_value_ids)
        return not any(axes_of(value.layout) - {0} for value in other_inputs)

    def build_segment_of(self, operator_numbers: Sequence[int]) -> OperatorSegment:
        """Return the segment of these operators, all of which can be in one segment."""
        policy = policy_of_module(self.program.records[operator_numbers[0]].where.module, self.schemes)
        builder = self._new_builder(policy)
        for number in operator_numbers:
            record = self.program.records[number]
            if record.needs_halo_exchange or builder.is_read_by(record):
                builder.try_add(number, record)
        return self._build_segment(builder)

    def _max_window_depth(self, policy: ExchangePolicy | None) -> float:
        """Return the largest number of consecutive windows in a segment of a scheme; 0: no segments."""
        if isinstance(policy, FusionScheme):
            return policy.layers
        if policy is not None or self.strips is None:
            return 0
        return 1 if self.mesh.axes - {0} else inf  # windows exchange nothing if only the batch is partitioned

    def _new_builder(self, policy: ExchangePolicy | None, has_margin: bool = False) -> SegmentBuilder:
        sums_statistics = self.strips is None and isinstance(policy, FusionScheme) and policy.statistics is not None
        return SegmentBuilder(self.program, self.program.mesh.axes, inf if sums_statistics else 0, has_margin)

    def _build_segment(self, builder: SegmentBuilder) -> OperatorSegment:
        outputs = self.program.select_outputs(builder.window_depth_by_value, builder.operator_numbers)
        segment_values = builder.segment_values
        box_ids = (value for value in outputs if is_box(self.program.values[value].layout, builder.mesh.axes))
        output_values = [segment_values[value] for value in box_ids]
        for norm in builder.norms.values():  # a norm's statistics may be read even if its results are not
            output_values += norm.x, norm.y
        traced = TracedSubgraph(builder, [*builder.inputs_by_program_number.values()], output_values)
        records = {number: self.program.records[number] for number in builder.operator_numbers}
        inputs = builder.inputs_of([traced])
        strip_rows = self._rows_per_strip(builder, output_values)
        return OperatorSegment(
            records, inputs, outputs, segment_values, traced, builder.norms, strip_rows, builder.has_margin
        )

    def _rows_per_strip(self, builder: SegmentBuilder, output_values: Sequence[Value]) -> int:
        if self.strips != "auto":
            return self.strips or 0
        rows = max((atom.extent for value in output_values for (atom,) in value.layout if atom.axis == 1), default=1)
        values = [self.program.values[value] for value in builder.window_depth_by_value]
        bytes_per_sample = sum(prod(value.shape) * value.dtype.itemsize for value in values) // self._num_samples
        return max(1, min(rows, MAX_STRIP_BYTES * rows // max(1, bytes_per_sample)))


def _can_share_segment(a: ExchangePolicy | None, b: ExchangePolicy | None) -> bool:
    """Return whether windows under two schemes can be in one segment."""
    if a is None or b is None:
        return a is b
    return type(a) is type(b) and a.arguments() == b.arguments()
