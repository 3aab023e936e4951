"""Lowering of a captured module for blocks, each computed from all cells that it depends on, without messages.

The rules that distribute the module lower it once, for a single rank that has only a block of every value. The cells of
a block follow from the reaches that the rules declare (`ir/range_tracing.py`); steps are bound to the block's place.
Zero padding is added only at the borders of the whole image, so that each block equals a part of the whole result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from ...geometry import Atom, Place, Range
from ..exchange.normalisation import MomentsSpec
from ..ir.errors import UnsupportedOperator
from ..ir.graph import Step, Value
from ..ir.layout import Layout, Mesh, Shape, axes_of, is_box, local_shape, replicated, shape_of
from ..ir.range_tracing import Dependence, SymbolRanges, extend_symbol_range, trace_ranges
from ..ir.reach import Reach
from ..lowering.builder import ReachByDim
from ..lowering.lowering import Lowering
from ..lowering.plan import TorchPlan
from ..lowering.steps import shapes_if_empty

AxisRanges = tuple[tuple[Range, ...], ...]
"""For each of several values, the range along each dimension."""
_REFUSAL_REASON_BY_STEP_KIND = {
    "gather": "it needs the whole image",
    "ring": "it needs the whole image",
    "sum": "it sums over the whole image",
    "max": "it compares the whole image",
    "norm": "it normalises by sums over the whole image",
}


@dataclass(frozen=True)
class BlockMesh(Mesh):
    """Mesh of a single rank with a block of every value."""

    blocked_axes: frozenset[int]
    symbol_ids: Iterator[int] = field(default_factory=count)

    @property
    def axes(self) -> frozenset[int]:
        """Axes along which a block has only some of the indices; the other indices are on no rank."""
        return self.blocked_axes

    def even_atom(self, extent: int, axis: int | None) -> Atom:
        """Return an atom, with a new symbol along a blocked axis: its range may be smaller than the arguments'."""
        return Atom(extent, axis, (0, extent), (next(self.symbol_ids), 1)) if axis in self.axes else Atom(extent)


class InputNorm(NamedTuple):
    """Normalisation with statistics of its own input; `mean`, `variance`: (N·groups,) or (C,); `y`: the result."""

    x: Value
    mean: Value
    variance: Value
    moments: MomentsSpec
    y: Value


class _BlockView(NamedTuple):
    """View of a value that a block needs; `dims`: dimensions, each with the results' reach and the value's atom."""

    layout: Layout
    dims: Sequence[tuple[int, Reach, Atom]]
    fill: float

    def shape(self, place: Place) -> Shape:
        shape = list(local_shape(self.layout, place))
        for dim, reach, atom in self.dims:
            view = reach.view(*reach.out_partition.range(place), atom.extent)
            shape[dim] = sum(hi - lo for lo, hi in view.ranges) + sum(view.pads)
        return tuple(shape)

    def slicer_at(self, place: Place) -> Callable[..., Any]:
        """Return the function from a value to the view that the block at a place of the mesh needs."""
        slices_by_dim, padding = [], [0] * (2 * len(self.layout))
        for dim, reach, atom in self.dims:
            first, last = atom.range(place)
            view = reach.view(*reach.out_partition.range(place), atom.extent)
            pad_index = 2 * (len(self.layout) - 1 - dim)
            if view.ranges != ((first, last),):
                slices_by_dim.append((dim, tuple((lo - first if lo < hi else 0, hi - lo) for lo, hi in view.ranges)))
            padding[pad_index : pad_index + 2] = view.pads
        if not slices_by_dim and not any(padding):
            return identity_view
        return _Slicer(tuple(slices_by_dim), tuple(padding), self.fill)


@dataclass(frozen=True)
class _Slicer:
    """Function from a value to a view of it; equal for equal views, so that blocks share compiled functions."""

    slices_by_dim: Sequence[tuple[int, Sequence[Range]]]
    padding: Sequence[int]
    fill: float

    def __call__(self, a: torch.Tensor) -> tuple[torch.Tensor]:
        for dim, parts in self.slices_by_dim:
            narrowed_parts = [_narrow_checked(a, dim, *part) for part in parts]
            a = narrowed_parts[0] if len(narrowed_parts) == 1 else torch.cat(narrowed_parts, dim)
        return (F.pad(a, self.padding, value=self.fill) if any(self.padding) else a,)


def identity_view(a: torch.Tensor) -> tuple[torch.Tensor]:
    """Return the value itself as its only view."""
    return (a,)


class BlockLowering(Lowering):
    """Lowering for blocks; rejects operators that need the whole image.

    Parameters
    ----------
    axes : frozenset of int, optional
        Axes that one pass divides into blocks; default: all spatial axes, and each block is a pass of its own.
    """

    mesh: BlockMesh

    def __init__(self, spatial_ndim: int, remedy: str = "", axes: frozenset[int] | None = None) -> None:
        self.remedy, self.spatial_ndim, self.block_axes = remedy, spatial_ndim, axes
        blocked_axes = frozenset(range(1, spatial_ndim + 1)) if axes is None else axes
        super().__init__(BlockMesh((1,) * (spatial_ndim + 1), blocked_axes), 0)
        self.dependences = list[Dependence]()
        self.input_norms = list[InputNorm]()
        self._first_symbol_id = 0

    @property
    def has_partial_gradients(self) -> bool:
        """Whether cells may be in several blocks of one pass, each of which computes a part of their gradients."""
        return self.block_axes is not None

    @property
    def can_add_input_norm(self) -> bool:
        """Whether a further norm may receive its statistics as inputs."""
        return False

    def lower_call(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Lower one call of an operator and return its values."""
        self._first_symbol_id = next(self.mesh.symbol_ids)
        return super().lower_call(target, args, kwargs)

    def view(
        self,
        value: Value,
        reaches: ReachByDim,
        partition_axes: Iterable[int] | None = None,
        fill: float = 0.0,
        has_sliding_windows: bool = False,
    ) -> Value:
        """Return the view of a value that a block needs, and record the reaches."""
        axes = axes_of((reach.out_partition,) for reach in reaches.values())
        result_axes = value.axes | axes if partition_axes is None else frozenset(partition_axes)
        dims = [(dim, reach, self.single_atom(value, dim)) for dim, reach in sorted(reaches.items())]
        if axes_of(value.layout) - result_axes or any(
            a.axis is not None and r.out_partition.axis is None for _, r, a in dims
        ):
            self.refuse(_REFUSAL_REASON_BY_STEP_KIND["gather"])
        dims = [(dim, reach, atom) for dim, reach, atom in dims if not reach.is_whole(atom)]
        if not dims:
            return value
        view = _BlockView(value.layout, dims, fill)
        result = self._new_value(view.shape(self._place), result_axes, value.dtype, value.kind, shape_at=view.shape)
        self._add_step("local", [value], [result], run=view.slicer_at(self._place), bind_to_place=view.slicer_at)
        reaches_and_atoms = ((reach, atom) for _, reach, atom in dims if atom.origin is not None)
        self.dependences += (Dependence(self._first_symbol_id, result.id, *each) for each in reaches_and_atoms)
        return result

    def dim_parts_of_tiles(self, layout: Layout) -> None:
        """Return None, since a block reads its part of a parameter through a view."""

    def pointwise_layout(self, layouts: Sequence[Layout]) -> Layout:
        """Return a layout with new symbols, as ranges of results may be smaller than those of all arguments."""
        layout = super().pointwise_layout(layouts)
        return tuple(tuple(self.mesh.even_atom(atom.extent, atom.axis) for atom in dim) for dim in layout)

    def sum_gradient(self, value: Value, partition_axes: Iterable[int]) -> Value:
        """Return the value unchanged: gradients are summed over blocks."""
        return value

    def normalise(
        self, x: Value, weight: Value | None, bias: Value | None, moments: MomentsSpec, groups: Layout
    ) -> tuple[Value, Value, Value]:
        """Return x, normalised with statistics that are inputs of the block, and these statistics."""
        if not (self.can_add_input_norm and is_box(x.layout, self.mesh.axes)):
            self.refuse(_REFUSAL_REASON_BY_STEP_KIND["norm"])
        shape = shape_of(groups)
        atom = self.single_atom(x, 0)
        kind = "constant" if x.kind == "constant" else "value"
        mean, variance = (self._new_value(shape, frozenset(), x.dtype, kind, replicated(shape)) for _ in range(2))

        def run(place: Place, a: torch.Tensor, m: torch.Tensor, v: torch.Tensor, w: Any, b: Any) -> Any:
            std = torch.rsqrt(v + moments.eps)
            if moments.groups is not None:
                m, std = (t.view(x.shape[0], -1)[slice(*atom.range(place))] for t in (m, std))
                m, std = (t.repeat_interleave(a.shape[1] // t.shape[1], 1) for t in (m, std))
            scale = std if w is None else std * w
            shift = -m * scale if b is None else b - m * scale
            shape = [-1, a.shape[1], *[1] * (a.dim() - 2)]
            return torch.addcmul(shift.view(shape), a, scale.view(shape)).to(a.dtype)

        args = [x, mean, variance, weight, bias]
        y = self.local(run, args, x.layout, at=lambda place: place)
        self.input_norms.append(InputNorm(x, mean, variance, moments, y))
        return y, mean, variance

    def random_key(self) -> Any:
        """Return a random key; reject random numbers if each block is a separate pass."""
        return self.refuse("it draws random numbers") if self.block_axes is None else super().random_key()

    def refuse(self, why: str = "", remedy: str = "") -> Any:
        """Raise UnsupportedOperator for the current operator."""
        raise UnsupportedOperator(self.where, why, action="be computed block by block", remedy=remedy or self.remedy)

    def _add_step(self, kind: str, inputs: Sequence[Value], outputs: Sequence[Value], **fields: Any) -> None:
        if kind != "local":
            self.refuse(_REFUSAL_REASON_BY_STEP_KIND[kind])
        super()._add_step(kind, inputs, outputs, **fields)


class TracedSubgraph:
    """Subgraph of a captured module that can be computed in blocks of some of its values.

    Parameters
    ----------
    lowering : BlockLowering
        Lowering of the subgraph for whole images.
    inputs : list of Value
        Values from outside the subgraph: images, parameters and others.
    outputs : list of Value
        Results of the subgraph; each of their dimensions must be a single atom.

    Attributes
    ----------
    inputs : list of Value
        Inputs on which the outputs depend.
    """

    def __init__(self, lowering: BlockLowering, inputs: Sequence[Value], outputs: Sequence[Value]) -> None:
        self.spatial_ndim, self.mesh, self.outputs = lowering.spatial_ndim, lowering.mesh, outputs
        plan = _single_rank_plan(lowering.mesh, lowering.steps, lowering.values, inputs, outputs)
        needed_ids = {value for step in plan.steps for value in step.outputs}  # only steps that the outputs depend on
        self.steps = [step for step in lowering.steps if not needed_ids.isdisjoint(step.outputs)]
        self.values = lowering.values
        self.dependences = [each for each in lowering.dependences if each.view_id in needed_ids]
        read_value_ids = {value for step in self.steps for value in step.inputs}.union(output.id for output in outputs)
        self.inputs = [value for value in inputs if value.id in read_value_ids]
        self.symbol_ranges = lru_cache(8)(self._find_symbol_ranges)
        self.plan_for = lru_cache(2)(self._plan_for)  # the planner asks for the same blocks forward and backward

    def differentiable_inputs(self) -> list[frozenset[int]]:
        """Return, for each output, the positions of the inputs to which its gradient propagates."""
        positions_by_id = {value.id: frozenset({at}) for at, value in enumerate(self.inputs)}
        for step in self.steps:
            positions = frozenset[int]().union(*(positions_by_id.get(value, ()) for value in step.inputs))
            positions_by_id |= {out: positions for out in step.outputs if self.values[out].kind != "constant"}
        return [positions_by_id.get(out.id, frozenset()) for out in self.outputs]

    def source_ranges(self, ranges: AxisRanges) -> AxisRanges:
        """Return the ranges of the inputs, along each dimension, on which ranges of the outputs depend."""
        symbol_ranges = self.symbol_ranges(ranges)
        return tuple(
            tuple(
                (0, a.extent) if a.origin is None else symbol_ranges.get(a.origin[0], (0, 0)) for (a,) in value.layout
            )
            for value in self.inputs
        )

    def steps_for(self, ranges: AxisRanges) -> tuple[list[Step], list[Value]]:
        """Return the steps that compute at least these ranges of the outputs from their sources, and all values."""
        symbol_ranges = self.symbol_ranges(ranges)
        values, steps = list(self.values), list[Step]()
        for value in self.inputs:
            values[value.id] = value.at_place(symbol_ranges)
        for step in self.steps:
            results = [values[out].at_place(symbol_ranges) for out in step.outputs]
            for value in results:
                values[value.id] = value
            run_function = step.run if step.bind_to_place is None else step.bind_to_place(symbol_ranges)
            steps.append(replace(step, run=run_function, bind_to_place=None, kind_args=shapes_if_empty(results)))
        return steps, values

    def _plan_for(self, ranges: AxisRanges) -> TorchPlan:
        """Return the plan that computes at least these ranges of the outputs from their sources."""
        steps, values = self.steps_for(ranges)
        aliased_ids = dict[int, int]()
        remaining_steps = list[Step]()
        for step in steps:
            inputs = tuple(aliased_ids.get(value, value) for value in step.inputs)
            if step.run is identity_view:
                aliased_ids[step.outputs[0]] = inputs[0]
            else:
                remaining_steps.append(replace(step, inputs=inputs))
        return _single_rank_plan(self.mesh, remaining_steps, values, self.inputs, self.outputs)

    def _find_symbol_ranges(self, ranges: AxisRanges) -> SymbolRanges:
        """Return the range of each symbol on which ranges of the outputs depend."""
        output_symbol_ranges: SymbolRanges = {}
        for output, box in zip(self.outputs, ranges, strict=True):
            for (atom,), indices in zip(output.layout, box, strict=True):
                extend_symbol_range(output_symbol_ranges, atom, *indices)
        return trace_ranges(self.dependences, output_symbol_ranges)


def _single_rank_plan(
    mesh: Mesh, steps: list[Step], values: list[Value], inputs: Sequence[Value], outputs: Sequence[Value]
) -> TorchPlan:
    return TorchPlan(mesh, 0, steps, values, {}, {}, value_ids_in(inputs), value_ids_in(outputs), {})


def crop_block(y: torch.Tensor, layout: Layout, ranges: Sequence[Range]) -> torch.Tensor:
    """Return the given ranges of an output, from a block that may have more cells."""
    return narrow_to_ranges(y, ranges, first_indices(layout))


def first_indices(layout: Layout) -> list[int]:
    """Return the first index of a block along each dimension."""
    return [0 if atom.bounds is None else atom.bounds[0] for (atom,) in layout]


def narrow_to_ranges(tensor: torch.Tensor, ranges: Iterable[Range], offsets: Iterable[int]) -> torch.Tensor:
    """Return ranges of a tensor whose indices start at `offsets`."""
    for dim, ((lo, hi), offset) in enumerate(zip(ranges, offsets, strict=True)):
        tensor = _narrow_checked(tensor, dim, lo - offset if lo < hi else 0, hi - lo)
    return tensor


def _narrow_checked(a: torch.Tensor, dim: int, start: int, length: int) -> torch.Tensor:
    if start < 0 or start + length > a.shape[dim]:
        raise RuntimeError("a block lacks cells that it depends on; this is a bug in neondist")
    return a.narrow(dim, start, length)


def pair_ids_with_values(old_tree: Any, new_tree: Any) -> Iterator[tuple[int, Any]]:
    """Yield the id of each old value with the corresponding new leaf."""
    for old, new in zip(pytree.tree_leaves(old_tree), pytree.tree_leaves(new_tree), strict=True):
        if isinstance(old, Value):
            yield old.id, new


def value_ids_in(tree: Any) -> list[int]:
    """Return the ids of the values in a tree."""
    return [value.id for value in pytree.tree_leaves(tree) if isinstance(value, Value)]
