"""Steps of a plan: local work, sums over ranks, and values whose gradients are summed over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch

from ...geometry import Atom, Place
from ..exchange.normalisation import MomentsSpec
from ..exchange.ring import RingPlan
from ..ir.errors import UnsupportedOperator
from ..ir.graph import ACCUMULATION_DTYPES, DimPart, Step, Value, axes_of_values, supports_gradients
from ..ir.layout import Layout, Mesh, Shape, axes_of, local_shape, replicated

PlaceFunction = Callable[[Place], Any]
"""Maps the place of a rank or block to the value that a step uses there."""


class StepListBuilder:
    """Steps of a plan under construction.

    Attributes
    ----------
    mesh : Mesh
    where : OperatorPosition
        Source position of the current operator in the user's program.
    """

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self.mesh, self._rank, self._place = mesh, rank, mesh.place(rank)
        self.steps: list[Step] = []
        self.values: list[Value] = []
        self.where = OperatorPosition("")
        self._values_with_summed_gradient: dict[tuple[int, frozenset[int]], Value] = {}

    def local(
        self,
        run: Callable[..., torch.Tensor],
        args: Sequence[Value | None],
        layout: Layout,
        dtype: torch.dtype | None = None,
        partition_axes: Iterable[int] = (),
        at: PlaceFunction | None = None,
    ) -> Value:
        """Return the result of a function that each rank applies to its own parts.

        Parameters
        ----------
        run : callable
            Maps the tensors of the parts to the tensor of the result.
        args : sequence of Value or None
            None is passed to `run` as None.
        layout : Layout
            Layout of the result.
        partition_axes : iterable of int
            Further axes along which ranks compute different parts.
        at : callable, optional
            Maps the place of a rank or block to the first argument of `run` there.
        """
        values = [arg for arg in args if arg is not None]
        work_axes = axes_of_values(values) | axes_of(layout) | frozenset(partition_axes)
        run = _pass_none_for_missing(run, [*[True] * (at is not None), *(arg is not None for arg in args)])
        (result,) = self._add_local(run, values, [layout], [dtype or values[0].dtype], work_axes, at=at)
        return result

    def local_results(
        self,
        run: Callable[..., Sequence[torch.Tensor]],
        args: Sequence[Value],
        outs: Sequence[Any],
        layouts: Any = None,
    ) -> tuple[Value, ...]:
        """Return several local results with the dtypes of fake tensors, by default replicated with their shapes."""
        layouts = [replicated(out.shape) for out in outs] if layouts is None else layouts
        axes = axes_of_values(args)
        for layout in layouts:
            axes |= axes_of(layout)
        return tuple(self._add_local(run, args, layouts, [out.dtype for out in outs], axes, has_several_results=True))

    def convert_dtype(self, value: Value, dtype: torch.dtype) -> Value:
        """Return a value in a dtype."""
        return value if value.dtype == dtype else self.local(lambda a: a.to(dtype), [value], value.layout, dtype)

    def widen(self, value: Value) -> Value:
        """Return a value in the dtype in which PyTorch's kernels compute: float32 for 16-bit numbers."""
        return self.convert_dtype(value, ACCUMULATION_DTYPES.get(value.dtype, value.dtype))

    def without_gradient(self, value: Value) -> Value:
        """Mark a new local result as constant, in place, and return it."""
        value.kind = "constant"
        return value

    def detach(self, value: Value) -> Value:
        """Return a value detached from its gradient, and constant even on ranks without elements."""
        return self.without_gradient(self.local(torch.Tensor.detach, [value], value.layout))

    def mark_constants(self, results: Sequence[Value], have_gradients: Sequence[bool]) -> Sequence[Value]:
        """Mark results without a gradient as constant, and return all results."""
        for value, has_gradient in zip(results, have_gradients, strict=True):
            value.kind = value.kind if has_gradient else "constant"
        return results

    def allreduce_local_result(
        self,
        run: Callable[..., torch.Tensor],
        args: Sequence[Value],
        axes: Iterable[int],
        layout: Layout,
        dtype: torch.dtype | None = None,
        op: str = "sum",
        at: PlaceFunction | None = None,
    ) -> Value:
        """Return the sum over axes of a local result or, with `op` 'max', the maximum, which has no gradient.

        `at` is as for `local`.
        """
        axes = frozenset(axes)
        partition_axes = axes_of_values(args) | axes | axes_of(layout)
        (part,) = self._add_local(run, args, [layout], [dtype or args[0].dtype], partition_axes, is_partial=True, at=at)
        part.axes = partition_axes
        if not axes:
            return part
        kind = part.kind if op == "sum" else "constant"
        total = self._new_value(part.local, partition_axes - axes, part.dtype, kind, layout)
        self._add_step(op, [part], [total], axes=axes)
        return total

    def normalise(
        self, x: Value, weight: Value | None, bias: Value | None, moments: MomentsSpec, groups: Layout
    ) -> tuple[Value, Value, Value]:
        """Return x (N, C, ...) normalised in each group and scaled, and the mean and variance of each group."""
        partition_axes = x.axes
        params = [None if value is None else self.sum_gradient(value, partition_axes) for value in (weight, bias)]
        has_gradient = any(value is not None and value.kind != "constant" for value in params)
        kind = "value" if x.kind == "constant" and has_gradient else x.kind
        y = self._new_value(x.local, x.axes, x.dtype, kind, x.layout)
        shape, axes = local_shape(groups, self._place), partition_axes - moments.axes
        mean, variance = (self._new_value(shape, axes, x.dtype, "constant", groups) for _ in range(2))
        inputs = [x, *(value for value in params if value is not None)]
        self._add_step("norm", inputs, [y, mean, variance], kind_args=(moments, *(p is not None for p in params)))
        return y, mean, variance

    def ring_attention(self, args: Sequence[Value], layout: Layout, ring: RingPlan) -> Value:
        """Return ring attention of queries, keys and values; a fourth argument is the mask."""
        inputs = [self.sum_gradient(value, axes_of(layout)) for value in args]
        kind = "constant" if all(value.kind == "constant" for value in inputs) else "value"
        result = self._new_value(local_shape(layout, self._place), axes_of(layout), args[0].dtype, kind, layout)
        self._add_step("ring", inputs, [result], axes=axes_of([ring.keys]), kind_args=ring)
        return result

    def sum_gradient(self, value: Value, partition_axes: Iterable[int]) -> Value:
        """Return a value for use in work partitioned over `partition_axes`; its gradient is summed where necessary."""
        partition_axes = frozenset(partition_axes)
        missing_axes = (self.mesh.axes - partition_axes) if value.kind == "parameter" else (partition_axes - value.axes)
        if value.kind == "constant" or not missing_axes or not supports_gradients(value.dtype):
            return value
        key = value.id, missing_axes
        if key not in self._values_with_summed_gradient:
            result = self._new_value(
                value.local, value.axes | partition_axes, value.dtype, value.kind, value.layout_or_none
            )
            if value.kind == "parameter":
                contributes = all(self._place[axis] == 0 for axis in missing_axes)
                self._add_step("counted", [value], [result], contributes_gradient=contributes)
                result.kind = "value"
            else:
                self._add_step("spread", [value], [result], axes=missing_axes)
            self._values_with_summed_gradient[key] = result
        return self._values_with_summed_gradient[key]

    def own_part(self, value: Value, layout: Layout, dim_part: DimPart) -> Value:
        """Return the part of a parameter or constant that each rank uses, as partitioned in `layout`."""
        shape, axes = local_shape(layout, self._place), axes_of(layout)
        result = self._new_value(shape, axes, value.dtype, value.kind, layout)
        self._add_step("part", [value], [result], kind_args=dim_part)
        return result

    def add_constant(self, tensor: torch.Tensor) -> Value:
        """Return the value of a tensor known at planning time."""
        value = self._new_value(tuple(tensor.shape), frozenset(), tensor.dtype, "constant", replicated(tensor.shape))
        self._add_step("local", [], [value], run=lambda: (tensor,))
        return value

    def new_input(self, layout: Layout, dtype: torch.dtype, kind: str = "value") -> Value:
        """Return a new input value."""
        return self._new_value(local_shape(layout, self._place), axes_of(layout), dtype, kind, layout)

    def passed_image_and_tile(self, layout: Layout, dtype: torch.dtype) -> tuple[Value, Value]:
        """Return the value passed as a module's input, and the input's tile; they differ if the former is widened."""
        tile = self.new_input(layout, dtype)
        return tile, tile

    def single_atom(self, value: Value, dim: int) -> Atom:
        """Return the only atom of a dimension."""
        atoms = value.layout[dim]
        if len(atoms) != 1:
            self.refuse(f"dimension {dim} of {value.shape} merges several partitioned dimensions")
        return atoms[0]

    def axis_of(self, value: Value, dim: int) -> int | None:
        """Return the axis that partitions a dimension of one atom, or None if it is whole."""
        return self.single_atom(value, dim).axis

    def is_whole(self, value: Value, dim: int) -> bool:
        """Return whether every rank has all indices of a dimension."""
        return all(atom.axis is None for atom in value.layout[dim])

    def refuse(self, why: str = "", remedy: str = "") -> Any:
        """Raise UnsupportedOperator for the current operator; default remedy: `gather_at`, or a rule."""
        raise UnsupportedOperator(self.where, why, remedy=remedy)

    def _add_local(
        self,
        run: Callable[..., Any],
        args: Sequence[Value],
        layouts: Sequence[Layout],
        dtypes: Sequence[torch.dtype],
        partition_axes: frozenset[int],
        has_several_results: bool = False,
        is_partial: bool = False,
        at: PlaceFunction | None = None,
    ) -> list[Value]:
        inputs = [self.sum_gradient(value, partition_axes) for value in args]
        is_constant = all(value.kind == "constant" for value in inputs)
        if not (is_partial or is_constant) and any(partition_axes - axes_of(layout) for layout in layouts):
            self.refuse("ranks would compute the same values from different parts")  # gradients would add up
        results = [
            self._new_value(
                local_shape(layout, self._place),
                axes_of(layout),
                dtype,
                "constant" if is_constant or not supports_gradients(dtype) else "value",
                layout,
            )
            for layout, dtype in zip(layouts, dtypes, strict=True)
        ]
        self._add_local_step(inputs, results, run if has_several_results else _wrap_result_in_tuple(run), at)
        return results

    def _add_local_step(
        self, inputs: Sequence[Value], results: Sequence[Value], run: Callable[..., Any], at: PlaceFunction | None
    ) -> None:
        """Add local work on tensors; `at`, if given, maps a place to the first argument of `run`."""
        for device in self.where.own_autocast:
            run = partial(_run_without_autocast, device, run)
        bind = None if at is None else lambda place: partial(run, at(place))
        bound = run if bind is None else bind(self._place)
        self._add_step("local", inputs, results, run=bound, bind_to_place=bind, kind_args=shapes_if_empty(results))

    def _new_value(
        self,
        local: Shape,
        axes: frozenset[int],
        dtype: torch.dtype,
        kind: str,
        layout: Layout | None = None,
        shape_at: Callable[[Place], Shape] | None = None,
    ) -> Value:
        layout_axes = [atom.axis for dim in layout or () for atom in dim if atom.axis is not None]
        if len(layout_axes) != len(set(layout_axes)):  # ranks would have only the diagonal blocks
            self.refuse("two dimensions would be partitioned over the same grid axis")
        self.values.append(Value(len(self.values), local, axes, dtype, kind, layout, shape_at))
        return self.values[-1]

    def _add_step(self, kind: str, inputs: Sequence[Value], outputs: Sequence[Value], **fields: Any) -> None:
        ids = tuple(value.id for value in inputs), tuple(value.id for value in outputs)
        self.steps.append(Step(kind, self.where.name, *ids, **fields))


def shapes_if_empty(results: Sequence[Value]) -> tuple[Shape, ...] | None:
    """Return the shapes of the results on this rank if one is empty here but not globally; otherwise None."""
    # results may have no elements globally, such as the moments of batch norm in evaluation
    values_with_layout = [value for value in results if value.layout_or_none is not None]
    is_any_empty = any(not prod(value.local) and prod(value.shape) for value in values_with_layout)
    return tuple(value.local for value in results) if is_any_empty else None


def _run_without_autocast(device: str, run: Callable[..., Any], *tensors: Any) -> Any:
    with torch.autocast(device, enabled=False):
        return run(*tensors)


def _wrap_result_in_tuple(run: Callable[..., Any]) -> Callable[..., tuple[Any]]:
    return lambda *tensors: (run(*tensors),)


def _pass_none_for_missing(run: Callable[..., Any], are_present: Sequence[bool]) -> Callable[..., Any]:
    """Return a function of the arguments that are present; it passes None for the others."""

    def run_with_none(*tensors: torch.Tensor) -> Any:
        remaining_tensors = iter(tensors)
        return run(*(next(remaining_tensors) if is_present else None for is_present in are_present))

    return run if all(are_present) else run_with_none


class OperatorPosition(NamedTuple):
    """Source position of an operator in the user's program.

    Attributes
    ----------
    operator : str
    module : str
        Path of the enclosing module.
    source : str
        The user's file and line.
    own_autocast : tuple of str
        Device types for which autocast around a pass does not apply, because the module sets it itself.
    """

    operator: str
    module: str = ""
    source: str = ""
    own_autocast: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The module's path and the operator."""
        return f"{self.module}:{self.operator}" if self.module else self.operator
