"""Lowering that records the operators of a captured program, from which segments and trunks are built."""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..capture.capture import lower_program
from ..ir.graph import Step, Value
from ..ir.layout import Layout, Mesh
from ..lowering.lowering import Lowering
from ..lowering.steps import OperatorPosition
from .block_lowering import AxisRanges, value_ids_in

_SEGMENT_STEP_KINDS = ("local", "view", "norm", "spread", "counted")


class ProgramLowering(Lowering):
    """Lowering with a hook for each operator of the program, but not for operators that rules call.

    Attributes
    ----------
    input_values : list of Value
        Values from which the program starts: inputs, parameters, buffers and constants.
    is_inside_rule : bool
        Whether a rule is running; the operators that a rule calls are not operators of the program.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.input_values = list[Value]()
        self.is_inside_rule = False
        self.operator_number = -1

    def new_input(self, layout: Layout, dtype: torch.dtype, kind: str = "value") -> Value:
        """Return a new input value."""
        self.input_values.append(super().new_input(layout, dtype, kind))
        return self.input_values[-1]

    def add_constant(self, tensor: torch.Tensor) -> Value:
        """Return the value of a tensor known at planning time."""
        value = super().add_constant(tensor)
        if self.operator_number < 0:
            self.input_values.append(value)
        return value

    def lower_call(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Lower one call of an operator and return its values."""
        if self.is_inside_rule:
            return self.lower_by_rule(target, args, kwargs)
        self.operator_number += 1
        return self.lower_program_call(target, args, kwargs)

    def lower_by_rule(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Lower one call of an operator by its rule."""
        was_inside_rule = self.is_inside_rule
        self.is_inside_rule = True
        try:
            return super().lower_call(target, args, kwargs)
        finally:
            self.is_inside_rule = was_inside_rule

    @abstractmethod
    def lower_program_call(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Lower one operator of the program and return its values."""


class OperatorRecord(NamedTuple):
    """Operator of the program, the result of its rule, and whether its windows extend into other tiles."""

    target: Any
    args: Any
    kwargs: Any
    where: OperatorPosition
    fake_out: Any
    draw_number: int
    result: Any
    needs_halo_exchange: bool
    can_be_in_segment: bool

    @property
    def read_value_ids(self) -> list[int]:
        """Ids of the values that the operator reads."""
        return value_ids_in((self.args, self.kwargs))

    @property
    def is_getitem_or_constructor(self) -> bool:
        """Whether the operator only combines results of other operators."""
        return self.target is operator.getitem or isinstance(self.target, type)


class _RecordingLowering(ProgramLowering):
    """Lowering that records each operator of the program and the results of its steps."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        super().__init__(mesh, rank)
        self.records = list[OperatorRecord]()
        self.computed_value_ids = set[int]()

    def lower_program_call(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        num_earlier_steps = len(self.steps)
        call_context = (target, args, kwargs, self.where, self.fake_out, self.draw_number)
        result = self.lower_by_rule(target, args, kwargs)
        steps = self.steps[num_earlier_steps:]
        views = [step for step in steps if step.kind == "view"]
        needs_halo_exchange = any(step.transfer is not None and not step.transfer.needs_no_messages for step in views)
        can_be_in_segment = all(map(_is_window_step, views)) and all(step.kind in _SEGMENT_STEP_KINDS for step in steps)
        self.computed_value_ids.update(value for step in steps for value in step.outputs)
        self.records.append(OperatorRecord(*call_context, result, needs_halo_exchange, can_be_in_segment))
        return result


def _is_window_step(step: Step) -> bool:
    """Return whether each rank's view is a range around its own cells along each partitioned image axis."""
    assert step.transfer is not None
    return all(
        (request.axis is not None or request.used is not None or request.requests_only_own_cells)
        and request.axis == request.source.axis
        and request.dim > 1
        and all(len(r) == 1 for r in request.ranges)
        for request in step.transfer.requests
    )


class RecordedProgram:
    """Operators of a captured program, recorded while it is lowered for the first rank.

    Parameters
    ----------
    program
        Result of `capture_module`.

    Attributes
    ----------
    image_value_ids : list of int
        Ids of the program's inputs.
    initial_value_ids : list of int
        Ids of the values from which the program starts: inputs, parameters, buffers and constants.
    """

    def __init__(self, program: Any, mesh: Mesh, layouts: Sequence[Layout], gather_at: Sequence[str]) -> None:
        recorder = _RecordingLowering(mesh, 0)
        self.mesh, self.autograd_functions = mesh, program.functions
        self.plan, _ = lower_program(program, mesh, 0, layouts, gather_at, lowering=recorder)
        self.records = recorder.records
        self.values = {value.id: value for value in recorder.values}
        self.image_value_ids = list(self.plan.inputs)
        self.initial_value_ids = [value.id for value in recorder.input_values]
        # steps that pass values from one module to another
        boundary_steps = (step for step in recorder.steps if recorder.computed_value_ids.isdisjoint(step.outputs))
        self._output_ids = {value for step in boundary_steps for value in step.inputs}
        self._output_ids.update(self.plan.mutated_tensors.values())
        self._output_ids.update(out for out in self.plan.outputs if isinstance(out, int))
        self._readers_by_id: dict[int, list[int]] = {}
        for number, record in enumerate(self.records):
            for value in record.read_value_ids:
                self._readers_by_id.setdefault(value, []).append(number)

    def select_outputs(self, value_ids: Iterable[int], operator_numbers: Collection[int]) -> list[int]:
        """Return the ids of values that the program returns, or that operators other than the given ones read."""
        numbers = set(operator_numbers)
        return [v for v in value_ids if v in self._output_ids or not numbers.issuperset(self._readers_by_id.get(v, ()))]


def even_layout(value: Value, mesh: Mesh) -> Layout:
    """Return the evenly partitioned layout of a value that is a box."""
    return tuple((mesh.even_atom(atom.extent, atom.axis),) for (atom,) in value.layout)


def ranges_at(layouts: Sequence[Layout], place: Mapping[int, int]) -> AxisRanges:
    """Return, along each dimension, the range of the rank at a place, or the full range for axes not in `place`."""
    return tuple(
        tuple(
            atom.ranges[place[atom.axis]] if atom.axis is not None and atom.axis in place else (0, atom.extent)
            for (atom,) in layout
        )
        for layout in layouts
    )
