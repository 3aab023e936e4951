"""Conversion of values to the form that a rule needs: views of windows, gathered, repartitioned or reshaped values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import prod

from ...geometry import Atom, DimRequest, ViewTransfer
from ..ir.graph import DimPart, Pads, Value
from ..ir.layout import (
    Dim,
    Layout,
    Mesh,
    UnalignedPartitionError,
    axes_of,
    local_shape,
    replicated_along,
    reshape_layout,
    shape_of,
    whole_if_partitioned_along,
)
from ..ir.reach import Reach, dim_request_of
from .steps import StepListBuilder

ReachByDim = Mapping[int, Reach]
"""The reach of results along some dimensions of an argument; along others, results depend on the same indices."""


class PlanBuilder(StepListBuilder):
    """Builder of plans, used by rules."""

    def view(
        self,
        value: Value,
        reaches: ReachByDim,
        partition_axes: Iterable[int] | None = None,
        fill: float = 0.0,
        has_sliding_windows: bool = False,
    ) -> Value:
        """Return the view of a value that each rank needs for its part of the results.

        Gradients of indices in several views are summed.

        Parameters
        ----------
        partition_axes : iterable of int
            Axes that partition the result computed from the view; default: the axes of the value and of `reaches`.
        fill : float
            Value of the cells outside the tensor.
        has_sliding_windows : bool
            Whether windows slide over the view, so that a border scheme may replace the exact exchange.
        """
        axes = axes_of((reach.out_partition,) for reach in reaches.values())
        work_axes = value.axes | axes if partition_axes is None else frozenset(partition_axes)
        lost_axes = axes_of(value.layout) - work_axes  # the result is replicated along these axes
        if lost_axes:
            value = self.gather(value, [dim for dim, cut in enumerate(value.layout) if axes_of((cut,)) & lost_axes])
        requests, pads, moved_requests = [], [], []
        for dim, reach in sorted(reaches.items()):
            request, paddings = dim_request_of(reach, dim, self.single_atom(value, dim))
            requests.append(request)
            pads.append((dim, *paddings[request.part(self._place)]))
            if any(map(any, paddings)) or not request.requests_only_own_cells:
                moved_requests.append(request)
        if not moved_requests:
            return self.sum_gradient(value, work_axes)
        requests = [request for request in requests if request in moved_requests or request.used is not None]
        view = self.transfer(value, requests, work_axes, tuple(pad for pad in pads if any(pad[1:])), fill)
        if has_sliding_windows and all(each.axis == each.source.axis and each.dim > 1 for each in moved_requests):
            view_step = self.steps[-1]
            view_step.is_window_view = view_step.transfer is not None and not view_step.transfer.needs_no_messages
        return view

    def transfer(
        self,
        value: Value,
        requests: Sequence[DimRequest],
        partition_axes: frozenset[int],
        pads: Pads = (),
        fill: float = 0.0,
    ) -> Value:
        """Return the view of a value with the requested indices, and with padding on this rank."""
        source, transfer = self.sum_gradient(value, partition_axes), ViewTransfer(self.mesh.parts, tuple(requests))
        shape = list(transfer.shape(source.local, self._rank))
        for dim, before, after in pads:
            shape[dim] += before + after
        result = self._new_value(tuple(shape), partition_axes, value.dtype, source.kind)
        self._add_step("view", [source], [result], transfer=transfer, pads=pads, fill=fill)
        return result

    def gather(self, value: Value, dims: Iterable[int] | None = None) -> Value:
        """Return a value with all indices (along `dims`, if given) on every rank, for replicated work."""
        ndim = len(value.layout)
        gathered_dims = set(range(ndim)) if dims is None else {dim % ndim for dim in dims}
        axes = axes_of(value.layout[dim] for dim in gathered_dims)
        if not axes:
            return value
        split_value = self._split_to_atoms(value)
        requests = tuple(
            DimRequest(at, atom, None, (((0, atom.extent),),))
            for at, (atom,) in enumerate(split_value.layout)
            if atom.axis in axes
        )
        layout = tuple((Atom(dim[0].extent),) if dim[0].axis in axes else dim for dim in split_value.layout)
        result = self._new_value(local_shape(layout, self._place), value.axes - axes, value.dtype, value.kind, layout)
        self._add_step("gather", [split_value], [result], transfer=ViewTransfer(self.mesh.parts, requests))
        return self.reshape_local(result, replicated_along(value.layout, gathered_dims))

    def reshard(self, value: Value, layout: Layout) -> Value:
        """Return a value repartitioned as `layout`, whose atoms differ only in their axes and bounds."""
        if value.layout == layout:
            return value
        split_value = self._split_to_atoms(value)
        target_atoms = [atom for dim in layout for atom in dim]
        target_atoms = _insert_unit_atoms([dim[0] for dim in split_value.layout], target_atoms)
        pairs = enumerate(zip(target_atoms, split_value.layout, strict=True))
        reaches = {dim: Reach(new) for dim, (new, (old,)) in pairs if new != old}
        view = self.view(split_value, reaches, axes_of(layout))
        return self.reshape_local(view, layout)

    def reshape(self, value: Value, shape: Sequence[int]) -> Value:
        """Return a value of another global shape; partition boundaries that do not fit are first moved or removed."""
        if prod(shape) == 0:
            self.refuse("a tensor without elements is reshaped")
        for _ in range(2 * len(value.layout) + 2):
            try:
                return self.reshape_local(value, reshape_layout(value.layout, shape))
            except UnalignedPartitionError as error:
                if error.required_multiple:
                    value = self.reshard(value, tuple(_align_bounds(dim, error, self.mesh) for dim in value.layout))
                else:  # no partition fits: gather the value
                    dims = [d for d, dim in enumerate(value.layout) if error.atom in dim]
                    value = self.gather(value, dims if axes_of(value.layout[d] for d in dims) else None)
        return self.refuse(f"a reshape of {value.shape} to {tuple(shape)} splits a partitioned dimension")

    def reshape_local(self, value: Value, layout: Layout) -> Value:
        """Return a value whose local part is reshaped as `layout`, without data movement."""
        if value.layout_or_none == layout:
            return value
        return self.local(lambda shape, x: x.reshape(shape), [value], layout, at=partial(local_shape, layout))

    def align_for_broadcast(self, value: Value, target: Layout, partition_axes: Iterable[int]) -> Value:
        """Return a value for a pointwise operation with results of layout `target`; dimensions of size 1 broadcast."""
        partition_axes = frozenset(partition_axes)
        if value.layout_or_none is None:
            return value
        offset = len(target) - len(value.layout)
        value = self.gather(
            value, [at for at, dim in enumerate(value.layout) if not _has_same_atoms(dim, target[offset + at])]
        )
        aligned_dims = [
            dim if shape_of((dim,)) == (1,) != shape_of((target[offset + at],)) else target[offset + at]
            for at, dim in enumerate(value.layout)
        ]
        atoms: list[Atom] = []
        for dim, new in zip(value.layout, aligned_dims, strict=True):
            is_whole = dim != new and all(atom.axis is None for atom in dim)
            atoms += [Atom(atom.extent) for atom in new] if is_whole else dim
        if all(dim == new for dim, new in zip(value.layout, aligned_dims, strict=True)):
            return self.sum_gradient(value, partition_axes)
        split_value = self._reshape_to_atoms(value, atoms)
        new_atoms = [atom for dim in aligned_dims for atom in dim]
        reaches = {dim: Reach(new) for dim, (old, new) in enumerate(zip(atoms, new_atoms, strict=True)) if old != new}
        view = self.view(split_value, reaches, partition_axes)
        return self._merge_view_dims(view, tuple(aligned_dims))

    def align_pointwise(self, values: Sequence[Value]) -> tuple[list[Value], Layout]:
        """Return values aligned for a pointwise operation, and the layout of its results."""
        layout = self.pointwise_layout([value.layout for value in values])
        return [self.align_for_broadcast(value, layout, axes_of(layout)) for value in values], layout

    def partition_as(self, value: Value, layout: Layout) -> Value:
        """Return a value partitioned as `layout`; partitioned dimensions with other atoms are gathered first."""
        if value.kind in ("parameter", "constant") and not value.axes and value.shape == shape_of(layout):
            dim_part = self.dim_parts_of_tiles(layout)
            if dim_part is not None:
                return self.own_part(value, layout, dim_part)
        aligned = self.align_for_broadcast(value, layout, axes_of(layout))
        return aligned if aligned.layout_or_none == layout else self.local(lambda x: x, [aligned], layout)

    def dim_parts_of_tiles(self, layout: Layout) -> DimPart | None:
        """Return the parts of a tensor of this layout if they are ranges of one dimension that differ between tiles."""
        axes = self.mesh.axes - {0}
        return DimPart.from_layout(layout) if axes and axes_of(layout) == axes else None

    def reshard_away_from(self, layout: Layout, dims: Iterable[int]) -> Layout:
        """Return a layout with these dimensions whole; their axes partition other dimensions that are long enough.

        Each rank then has these dimensions whole for a part of the tensor, instead of having the whole tensor.
        """
        whole_dims = {dim % len(layout) for dim in dims}
        resharded = list(replicated_along(layout, whole_dims))
        for axis in sorted(axes_of(layout[dim] for dim in whole_dims) - axes_of(resharded)):
            free_dims = [dim for dim, cut in enumerate(resharded) if dim not in whole_dims and not axes_of((cut,))]
            extent, dim = max(((shape_of((resharded[dim],))[0], -dim) for dim in free_dims), default=(0, 0))
            if extent >= self.mesh.parts[axis]:
                resharded[-dim] = (self.mesh.even_atom(extent, axis),)
        return tuple(resharded)

    def view_whole_along(self, value: Value, dims: Iterable[int], partition_axes: Iterable[int]) -> Value:
        """Return a value with these dimensions whole, for work partitioned over `partition_axes`."""
        dims = set(dims)
        layout = replicated_along(value.layout, dims)
        if layout == value.layout:
            return self.sum_gradient(value, partition_axes)
        atoms = [(atom, at in dims and atom.axis is not None) for at, dim in enumerate(value.layout) for atom in dim]
        reaches = {at: Reach(Atom(atom.extent)) for at, (atom, expanding) in enumerate(atoms) if expanding}
        view = self.view(self._split_to_atoms(value), reaches, partition_axes)
        return self._merge_view_dims(view, layout)

    def gather_as(self, value: Value, target: Layout, partition_axes: Iterable[int]) -> Value:
        """Return a value aligned to a layout, gathered along the dimensions that are whole in that layout."""
        offset = len(target) - len(value.layout)
        dims = [
            at
            for at, dim in enumerate(value.layout)
            if axes_of([dim]) and not axes_of([target[offset + at]]) and value.shape[at] != 1
        ]
        if axes_of([value.layout[at] for at in dims]) & axes_of(target):  # an axis would partition the value twice
            value, dims = self.gather(value, dims), []
        if not dims:
            return self.align_for_broadcast(value, target, partition_axes)
        kept_dims = {*dims, *(at for at, n in enumerate(value.shape) if n == 1)}
        layout = [dim if at in kept_dims else target[offset + at] for at, dim in enumerate(value.layout)]
        value = self.reshard(value, tuple(layout))
        return self.view_whole_along(value, dims, partition_axes)

    def co_align(self, values: Sequence[Value], dims: Iterable[int]) -> tuple[list[Value], Layout]:
        """Return values with these dimensions whole and the others partitioned alike, and the layout for the results.

        Along these dimensions, results are partitioned like the first value, unless the same axes partition others.
        """
        dims = set(dims)
        other_dims = self.pointwise_layout(
            [tuple((Atom(1),) if at in dims else dim for at, dim in enumerate(v.layout)) for v in values]
        )
        used_axes = axes_of(other_dims)
        final_layout = tuple(
            whole_if_partitioned_along(dim, used_axes) if at in dims else other_dims[at]
            for at, dim in enumerate(values[0].layout)
        )
        resharded = self.reshard_away_from(final_layout, dims)
        layouts = [tuple((Atom(n),) if at in dims else resharded[at] for at, n in enumerate(v.shape)) for v in values]
        return [self.partition_as(value, layout) for value, layout in zip(values, layouts, strict=True)], final_layout

    def gather_into_single_atoms(self, value: Value, dims: Iterable[int]) -> Value:
        """Return the value, gathered along those of the dimensions that consist of several atoms."""
        return self.gather(value, [dim for dim in dims if len(value.layout[dim]) > 1])

    def pointwise_layout(self, layouts: Sequence[Layout]) -> Layout:
        """Return the layout of a pointwise result: each dimension as in one of the values, preferably split evenly."""
        ndim = max(len(layout) for layout in layouts)
        common_dims: list[Dim] = []
        used_axes: set[int] = set()
        for at in range(-ndim, 0):
            dims = [layout[at] for layout in layouts if len(layout) >= -at]
            extent = max((shape_of((dim,))[0] for dim in dims), default=1)
            if any(shape_of((dim,))[0] == 0 for dim in dims):
                extent = 0
            full_dims = [dim for dim in dims if shape_of((dim,))[0] == extent]
            partitioned_dims = [dim for dim in full_dims if axes_of((dim,))]
            partitioned_dims.sort(key=lambda dim: dim != tuple(self.mesh.even_atom(a.extent, a.axis) for a in dim))
            chosen_dim = next((dim for dim in partitioned_dims if not axes_of((dim,)) & used_axes), (Atom(extent),))
            used_axes |= axes_of((chosen_dim,))
            common_dims.append(chosen_dim)
        return tuple(common_dims)

    def _merge_view_dims(self, view: Value, layout: Layout) -> Value:
        """Return a view, which has one dimension per atom, with its dimensions merged as in a layout."""
        if len(view.local) == len(layout):
            return view
        shape_at = partial(local_shape, layout)
        result = self._new_value(shape_at(self._place), view.axes, view.dtype, view.kind, shape_at=shape_at)
        self._add_local_step([view], [result], lambda shape, x: (x.reshape(shape),), shape_at)
        return result

    def _split_to_atoms(self, value: Value) -> Value:
        return self._reshape_to_atoms(value, [atom for dim in value.layout for atom in dim])

    def _reshape_to_atoms(self, value: Value, atoms: Sequence[Atom]) -> Value:
        return self.reshape_local(value, tuple((atom,) for atom in atoms))


def _has_same_atoms(dim: Dim, target: Dim) -> bool:
    """Return whether a dimension is whole, or has atoms of the same extents as `target`."""
    return not axes_of((dim,)) or [a.extent for a in dim] == [a.extent for a in target]


def _align_bounds(dim: Dim, error: UnalignedPartitionError, mesh: Mesh) -> Dim:
    """Return the dimension with the bounds of the error's atom at multiples of `error.required_multiple`."""
    atoms = []
    for atom in dim:
        if atom == error.atom:
            major = mesh.even_atom(atom.extent // error.required_multiple, atom.axis)
            atom = major.scaled(error.required_multiple)
        atoms.append(atom)
    return tuple(atoms)


def _insert_unit_atoms(old_atoms: Sequence[Atom], new_atoms: Sequence[Atom]) -> list[Atom]:
    """Return a new atom for each old atom: the next of the same extent, or an atom of one index."""
    if len(old_atoms) == len(new_atoms):
        return list(new_atoms)
    matched, remaining = [], list(new_atoms)
    for atom in old_atoms:
        matched.append(remaining.pop(0) if remaining and remaining[0].extent == atom.extent else Atom(1))
    return matched
