"""Operators that move cells: padding, slicing, concatenation, flips, rolls."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from ...geometry import Atom, GradientWindow, IndexMap, Place, Window, fold_index
from ..ir.graph import Value
from ..ir.layout import Layout, axes_of, local_shape, replace_dim, replicated
from ..ir.reach import Reach
from ..ir.registry import rule
from ..lowering.lowering import Lowering


def remap_dim(lowering: Lowering, x: Value, dim: int, extent: int, source_index: Callable[[int], int]) -> Value:
    """Return x with one dimension resized, so that its index i is index source_index(i) of x."""
    x = lowering.gather_into_single_atoms(x, [dim])
    out_atom = lowering.mesh.even_atom(extent, lowering.axis_of(x, dim))
    reach = Reach(out_atom, IndexMap(lambda lo, hi: map(source_index, range(lo, hi))))
    view = lowering.view(x, {dim: reach})
    atom = x.layout[dim][0]

    def local_indices(place: Place) -> torch.Tensor | int:
        first = reach.first_index(atom, place)
        indices = [source_index(i) - first for i in range(*out_atom.range(place))]
        is_in_order = indices == list(range(len(indices)))
        return len(indices) if is_in_order else torch.tensor(indices, dtype=torch.int64)

    def run(index: torch.Tensor | int, a: torch.Tensor) -> torch.Tensor:
        return a.narrow(dim, 0, index) if isinstance(index, int) else a.index_select(dim, index.to(a.device))

    return lowering.local(run, [view], replace_dim(x.layout, dim, out_atom), at=local_indices)


def roll_dim_to_extent(lowering: Lowering, x: Value, dim: int, extent: int, shift: int) -> Value:
    """Return x with one dimension resized, so that its index i is index i - shift of x, modulo the extent of x."""
    return _shift_dim(lowering, x, dim, extent, Window(1, padding=((shift, 0),), mode="wrap"))


def _shift_dim(lowering: Lowering, x: Value, dim: int, extent: int, window: Window, fill: float = 0.0) -> Value:
    """Return x with one dimension resized, so that its index i is the only index in the window at i, or `fill`."""
    x = lowering.gather_into_single_atoms(x, [dim])
    out_atom = lowering.mesh.even_atom(extent, lowering.axis_of(x, dim))
    view = lowering.view(x, {dim: Reach(out_atom, window, with_padding=True)}, None, fill)
    return lowering.local(lambda a: a, [view], replace_dim(x.layout, dim, out_atom))


@rule("aten.slice.Tensor")
def slice_dim(
    lowering: Lowering, x: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Value:
    """Select a slice, and redistribute it."""
    dim %= len(x.shape)
    indices = range(x.shape[dim])[slice(start, end, step)]
    if len(indices) == x.shape[dim]:
        return x
    if lowering.is_whole(x, dim):
        layout = replace_dim(x.layout, dim, Atom(len(indices)))
        return lowering.local(lambda a: a[(slice(None),) * dim + (slice(start, end, step),)], [x], layout)
    if not indices:
        layout = replace_dim(x.layout, dim, Atom(0))
        device = pytree.tree_leaves(lowering.fake_out)[0].device  # a split has several results
        empty = partial(torch.empty, dtype=x.dtype, device=device)
        return lowering.local(empty, [], layout, x.dtype, at=partial(local_shape, layout))
    return remap_dim(lowering, x, dim, len(indices), lambda i: indices[i])


@rule("aten.select.int")
def select(lowering: Lowering, x: Value, dim: int, index: int) -> Value:
    """Select an index; along a partitioned dimension, the rank that owns the index sends its cells to the others."""
    dim %= len(x.shape)
    x = lowering.gather_into_single_atoms(x, [dim])
    layout = (*x.layout[:dim], *x.layout[dim + 1 :])
    if lowering.is_whole(x, dim):
        return lowering.local(lambda a: a.select(dim, index), [x], layout)
    axis, (atom,) = lowering.axis_of(x, dim), x.layout[dim]

    def own_start_and_length(place: Place) -> tuple[int, int]:
        lo, hi = atom.range(place)
        local_index = index % atom.extent - lo
        return (local_index, 1) if 0 <= local_index < hi - lo else (0, 0)

    def run(span: tuple[int, int], a: torch.Tensor) -> torch.Tensor:
        return a.narrow(dim, *span).sum(dim).to(a.dtype)  # without the index: zeros that depend on `a`, for autograd

    return lowering.allreduce_local_result(run, [x], [] if axis is None else [axis], layout, at=own_start_and_length)


@rule("aten.split.Tensor", "aten.split.sizes", "aten.split_with_sizes.default", "aten.chunk.default",
      "aten.split_with_sizes_copy.default")  # fmt: skip
def split(lowering: Lowering, x: Value, dim: int = 0, **_: object) -> tuple[Value, ...]:
    """Select consecutive slices, and redistribute them."""
    slices, start = [], 0
    for out in lowering.fake_out:
        n = out.shape[dim % len(x.shape)]
        slices.append(slice_dim(lowering, x, dim, start, start + n))
        start += n
    return tuple(slices)


@rule("aten.unbind.int")
def unbind(lowering: Lowering, x: Value, dim: int = 0) -> tuple[Value, ...]:
    """Select every index; along a partitioned dimension, the rank that owns an index sends its cells to the others."""
    return tuple(select(lowering, x, dim, at) for at in range(x.shape[dim]))


@rule("aten.slice_scatter.default", applies_if_replicated=True)
def slice_scatter(
    lowering: Lowering, x: Value, src: Value, dim: int = 0, start: int | None = None, end: int | None = None,
    step: int = 1,
) -> Value:  # fmt: skip
    """Redistribute the new values of a slice to the ranks that own it."""
    dim %= len(x.shape)
    indices = range(x.shape[dim])[slice(start, end, step)]
    if len(indices) == x.shape[dim]:
        return src
    other_dims = lowering.pointwise_layout([replace_dim(value.layout, dim, Atom(1)) for value in (x, src)])
    x, src = (_gather_if_axis_reused(lowering, value, dim, other_dims) for value in (x, src))
    if lowering.is_whole(x, dim) and x.kind == "constant" and not lowering.is_whole(src, dim):
        # partition the constant, such as zeros that are to be overwritten
        atom = lowering.mesh.even_atom(x.shape[dim], lowering.axis_of(src, dim))
        x = lowering.partition_as(x, replace_dim(x.layout, dim, atom))
    if lowering.is_whole(x, dim):
        src = lowering.gather(src, [dim])
    x, src = (lowering.partition_as(v, replace_dim(other_dims, dim, *v.layout[dim])) for v in (x, src))
    if lowering.is_whole(x, dim):
        slices = (slice(None),) * dim + (slice(start, end, step),)
        return lowering.local(lambda a, b: _with_slice_replaced(a, slices, b), [x, src], x.layout)
    x = lowering.partition_as(x, lowering.pointwise_layout([x.layout]))
    out_atom = x.layout[dim][0]
    window = Window(1, indices.step, ((-indices.start, 0),))
    view = lowering.view(src, {dim: Reach(out_atom, GradientWindow(window, (len(indices),)))}, x.axes | src.axes)

    def written_indices(place: Place) -> torch.Tensor:
        lo, hi = out_atom.range(place)
        return torch.tensor([i - lo for i in range(lo, hi) if i in indices], dtype=torch.int64)

    run = lambda at, a, b: a.index_copy(dim, at.to(a.device), b.to(a.device))  # noqa: E731
    return lowering.local(run, [x, view], x.layout, at=written_indices)


def _with_slice_replaced(a: torch.Tensor, slices: tuple[slice, ...], new_values: torch.Tensor) -> torch.Tensor:
    """Return a copy with new values in a slice; torch.slice_scatter has no gradient for complex numbers."""
    copy = a.clone()
    copy[slices] = new_values
    return copy


@rule("aten.flip.default")
def flip(lowering: Lowering, x: Value, dims: Sequence[int]) -> Value:
    """Reverse the order of cells, and redistribute them."""
    for dim in (d % len(x.shape) for d in dims):
        n = x.shape[dim]
        if lowering.is_whole(x, dim):
            x = lowering.local(partial(torch.flip, dims=(dim,)), [x], x.layout)
        else:
            x = remap_dim(lowering, x, dim, n, partial(operator.sub, n - 1))
    return x


@rule("aten.roll.default")
def roll(lowering: Lowering, x: Value, shifts: Sequence[int], dims: Sequence[int]) -> Value:
    """Shift cells cyclically, and redistribute them."""
    if not dims:
        lowering.refuse("it rolls the flattened tensor; pass dims")
    for shift, dim in zip(shifts, (d % len(x.shape) for d in dims), strict=True):
        n = x.shape[dim]
        if lowering.is_whole(x, dim):
            x = lowering.local(partial(torch.roll, shifts=shift, dims=dim), [x], x.layout)
        else:
            x = roll_dim_to_extent(lowering, x, dim, n, shift)
    return x


_MODE_BY_OPERATOR_WORD = {"reflection": "reflect", "replication": "replicate", "circular": "circular"}


@rule("aten.pad.default", "aten.constant_pad_nd.default", "aten.reflection_pad1d.default",
      "aten.reflection_pad2d.default", "aten.reflection_pad3d.default", "aten.replication_pad1d.default",
      "aten.replication_pad2d.default", "aten.replication_pad3d.default", "aten._pad_circular.default")  # fmt: skip
def pad(
    lowering: Lowering, x: Value, pad: Sequence[int] | None = None, mode: str | None = None, value: float | None = None,
    padding: Sequence[int] = (),
) -> Value:  # fmt: skip
    """Pad in any mode, or crop by negative amounts, and redistribute the cells."""
    name = str(lowering.target)
    mode = mode or next((mode for word, mode in _MODE_BY_OPERATOR_WORD.items() if word in name), "constant")
    amounts = list(padding if pad is None else pad)
    for at in range(len(amounts) // 2):
        dim, before, after = len(x.shape) - 1 - at, amounts[2 * at], amounts[2 * at + 1]
        if mode == "circular" and min(before, after) < 0:  # the remaining cells wrap around
            x = slice_dim(lowering, x, dim, max(0, -before), x.shape[dim] - max(0, -after))
            before, after = max(0, before), max(0, after)
            if max(before, after) > x.shape[dim]:
                lowering.refuse("it would wrap more cells than remain: PyTorch 2.13 returns arbitrary values")
        if before or after:
            x = _pad_dim(lowering, x, dim, before, after, mode, float(value or 0.0))
    return x


def _pad_dim(lowering: Lowering, x: Value, dim: int, before: int, after: int, mode: str, value: float) -> Value:
    n, mode = x.shape[dim], "wrap" if mode == "circular" else mode
    extent = n + before + after
    is_whole = lowering.is_whole(x, dim)
    if is_whole and mode == "constant":
        pads = [0, 0] * (len(x.shape) - 1 - dim) + [before, after]
        return lowering.local(lambda a: F.pad(a, pads, value=value), [x], replace_dim(x.layout, dim, Atom(extent)))
    if mode == "wrap" and not is_whole:
        return roll_dim_to_extent(lowering, x, dim, extent, before)
    if mode != "constant":
        return remap_dim(lowering, x, dim, extent, lambda i: fold_index(i - before, n, mode))
    return _shift_dim(lowering, x, dim, extent, Window(1, padding=((before, after),)), value)


@rule("aten.cat.default")
def cat(lowering: Lowering, tensors: Sequence[Value], dim: int = 0) -> Value:
    """Concatenate locally, or along a partitioned dimension with a redistribution."""
    tensors = [t for t in tensors if not (len(t.shape) == 1 and t.shape[0] == 0)]
    dim %= len(tensors[0].shape)
    tensors = [t for t in tensors if t.shape[dim]] or tensors[:1]
    other_dims = lowering.pointwise_layout([replace_dim(t.layout, dim, Atom(1)) for t in tensors])
    extent = sum(t.shape[dim] for t in tensors)
    run = lambda *ts: torch.cat(ts, dim)  # noqa: E731
    dtype = lowering.fake_out.dtype
    if all(lowering.is_whole(t, dim) for t in tensors):
        axes = axes_of(other_dims)
        aligned = [
            lowering.align_for_broadcast(t, replace_dim(other_dims, dim, Atom(t.shape[dim])), axes) for t in tensors
        ]
        return lowering.local(run, aligned, replace_dim(other_dims, dim, Atom(extent)), dtype)
    tensors = [_gather_if_axis_reused(lowering, t, dim, other_dims) for t in tensors]
    axis = next((lowering.axis_of(t, dim) for t in tensors if not lowering.is_whole(t, dim)), None)
    out_atom = lowering.mesh.even_atom(extent, axis)
    views, first = [], 0
    for t in tensors:
        n = t.shape[dim]
        repartitioned = lowering.partition_as(t, replace_dim(other_dims, dim, *t.layout[dim]))
        reach = Reach(out_atom, Window(1, padding=((first, extent - first - n),)))
        views.append(lowering.view(repartitioned, {dim: reach}, axes_of((*other_dims, (out_atom,)))))
        first += n
    return lowering.local(run, views, replace_dim(other_dims, dim, out_atom), dtype)


def _gather_if_axis_reused(lowering: Lowering, value: Value, dim: int, other_dims: Layout) -> Value:
    """Return the value, gathered if this dimension has several atoms or shares a mesh axis with other dimensions."""
    atoms = value.layout[dim]
    return lowering.gather(value, [dim] if len(atoms) > 1 or axes_of([atoms]) & axes_of(other_dims) else [])


@rule("aten.stack.default")
def stack(lowering: Lowering, tensors: Sequence[Value], dim: int = 0) -> Value:
    """Concatenate along a new dimension locally."""
    dim %= len(tensors[0].shape) + 1
    shape = (*tensors[0].shape[:dim], 1, *tensors[0].shape[dim:])
    return cat(lowering, [lowering.reshape(t, shape) for t in tensors], dim)


@rule("aten.select_scatter.default", applies_if_replicated=True)
def select_scatter(lowering: Lowering, x: Value, src: Value, dim: int, index: int) -> Value:
    """Send the new values of an index to the rank that owns it."""
    dim, index = dim % len(x.shape), index % x.shape[dim]
    unsqueezed_src = lowering.reshape(src, (*x.shape[:dim], 1, *x.shape[dim + 1 :]))
    return slice_scatter(lowering, x, unsqueezed_src, dim, index, index + 1)


@rule("aten.index_select.default")
def index_select(lowering: Lowering, x: Value, dim: int, index: Value) -> Value:
    """Gather the indexed dimension, and replicate the index tensor."""
    dim %= len(x.shape)
    x, index = lowering.gather(x, [dim]), lowering.gather(index)
    layout = replace_dim(x.layout, dim, Atom(lowering.fake_out.shape[dim]))
    return lowering.local(lambda a, i: a.index_select(dim, i), [x, index], layout)


@rule("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index(lowering: Lowering, x: Value, indices: Sequence[Value | None]) -> Value:
    """Gather the indexed dimensions, and replicate the index tensors."""
    index_by_dim = {dim: lowering.gather(value) for dim, value in enumerate(indices) if value is not None}
    if any(value.dtype == torch.bool for value in index_by_dim.values()):
        lowering.refuse("the shape of a selection by a mask depends on the mask's values")
    x = lowering.gather(x, index_by_dim)

    def run(a: torch.Tensor, *at: torch.Tensor) -> torch.Tensor:
        tensor_by_dim = dict(zip(index_by_dim, at, strict=True))
        return a[tuple(tensor_by_dim.get(dim, slice(None)) for dim in range(a.dim()))]

    return lowering.local(run, [x, *index_by_dim.values()], indexed_layout(x.layout, index_by_dim))


def indexed_layout(layout: Layout, index_by_dim: Mapping[int, Value]) -> Layout:
    """Return the layout after indexing by tensors: new dimensions replace adjacent indexed dimensions or come first."""
    indexed_dims = list(index_by_dim)
    new_dims = replicated(torch.broadcast_shapes(*(value.shape for value in index_by_dim.values())))
    other_dims = [atoms for dim, atoms in enumerate(layout) if dim not in indexed_dims]
    new_dims_start = indexed_dims[0] if indexed_dims == list(range(indexed_dims[0], indexed_dims[-1] + 1)) else 0
    return (*other_dims[:new_dims_start], *new_dims, *other_dims[new_dims_start:])
