"""Operators that move cells: padding, slicing, concatenation, flips, rolls."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from ...geometry import Atom, GradientWindow, IndexMap, Place, Window, fold
from ..ir.graph import Value
from ..ir.layout import axes_of, local_shape, replaced, whole
from ..ir.reach import Reach
from ..ir.registry import rule
from ..lowering.lower import Lowering


def remapped(lowering: Lowering, x: Value, dim: int, extent: int, source: Callable[[int], int]) -> Any:
    """Return x with one dimension resized, whose index i is index source(i) of x."""
    x = lowering.single(x, dim)
    out = lowering.mesh.atom(extent, lowering.cut(x, dim))
    reach = Reach(out, IndexMap(lambda lo, hi: map(source, range(lo, hi))))
    view = lowering.view(x, {dim: reach})
    atom = x.layout[dim][0]

    def picks(place: Place) -> torch.Tensor | int:
        first = reach.first(atom, place)
        indices = [source(i) - first for i in range(*out.range(place))]
        in_order = indices == list(range(len(indices)))
        return len(indices) if in_order else torch.tensor(indices, dtype=torch.int64)

    def run(index: torch.Tensor | int, a: torch.Tensor) -> torch.Tensor:
        return a.narrow(dim, 0, index) if isinstance(index, int) else a.index_select(dim, index.to(a.device))

    return lowering.local(run, [view], replaced(x.layout, dim, out), at=picks)


def rotated(lowering: Lowering, x: Value, dim: int, extent: int, shift: int) -> Any:
    """Return x with one dimension resized, whose index i is index i - shift of x, modulo its extent."""
    return _shifted(lowering, x, dim, extent, Window(1, padding=((shift, 0),), mode="wrap"))


def _shifted(lowering: Lowering, x: Value, dim: int, extent: int, window: Window, fill: float = 0.0) -> Any:
    """Return x with one dimension resized, whose index i is the only one in the window at i, or `fill`."""
    x = lowering.single(x, dim)
    out = lowering.mesh.atom(extent, lowering.cut(x, dim))
    view = lowering.view(x, {dim: Reach(out, window, padded=True)}, None, fill)
    return lowering.local(lambda a: a, [view], replaced(x.layout, dim, out))


@rule("aten.slice.Tensor")
def slices(
    lowering: Lowering, x: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    """Redistribution: slicing."""
    dim %= len(x.shape)
    picked = range(x.shape[dim])[slice(start, end, step)]
    if len(picked) == x.shape[dim]:
        return x
    if lowering.is_whole(x, dim):
        layout = replaced(x.layout, dim, Atom(len(picked)))
        return lowering.local(lambda a: a[(slice(None),) * dim + (slice(start, end, step),)], [x], layout)
    if not picked:
        layout = replaced(x.layout, dim, Atom(0))
        device = pytree.tree_leaves(lowering.out)[0].device  # a split has several
        empty = partial(torch.empty, dtype=x.dtype, device=device)
        return lowering.local(empty, [], layout, x.dtype, at=partial(local_shape, layout))
    return remapped(lowering, x, dim, len(picked), lambda i: picked[i])


@rule("aten.select.int")
def select(lowering: Lowering, x: Value, dim: int, index: int) -> Any:
    """Reduction: one index of a dimension; from a partitioned one, the rank that owns it sends it to all."""
    dim %= len(x.shape)
    x = lowering.single(x, dim)
    layout = (*x.layout[:dim], *x.layout[dim + 1 :])
    if lowering.is_whole(x, dim):
        return lowering.local(lambda a: a.select(dim, index), [x], layout)
    axis = lowering.cut(x, dim)
    lo, hi = x.layout[dim][0].range(lowering.place)
    at = index % x.shape[dim] - lo
    mine = (at, 1) if 0 <= at < hi - lo else (0, 0)

    def run(a: torch.Tensor) -> torch.Tensor:  # of no index: zeros, which hang together with a all the same
        return a.narrow(dim, *mine).sum(dim).to(a.dtype)

    return lowering.reduced(run, [x], [] if axis is None else [axis], layout)


@rule("aten.narrow.default")
def narrow(lowering: Lowering, x: Value, dim: int, start: int, length: int) -> Any:
    """Redistribution: slicing."""
    return slices(lowering, x, dim, start, start + length)


@rule("aten.split.Tensor", "aten.split.sizes", "aten.split_with_sizes.default", "aten.chunk.default",
      "aten.split_with_sizes_copy.default")  # fmt: skip
def split(
    lowering: Lowering, x: Value, split_size: Any = None, split_sizes: Any = None, dim: int = 0, chunks: Any = None
) -> Any:
    """Redistribution: consecutive slices."""
    parts, at = [], 0
    for out in lowering.out:
        n = out.shape[dim % len(x.shape)]
        parts.append(slices(lowering, x, dim, at, at + n))
        at += n
    return tuple(parts)


@rule("aten.unbind.int")
def unbind(lowering: Lowering, x: Value, dim: int = 0) -> Any:
    """Reduction: every index of a dimension."""
    return tuple(select(lowering, x, dim, at) for at in range(x.shape[dim]))


@rule("aten.slice_scatter.default", always=True)
def slice_scatter(
    lowering: Lowering,
    x: Value,
    src: Value,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Any:
    """Redistribution: new values in a slice."""
    dim %= len(x.shape)
    picked = range(x.shape[dim])[slice(start, end, step)]
    if len(picked) == x.shape[dim]:
        return src
    rest = lowering.common([replaced(value.layout, dim, Atom(1)) for value in (x, src)])
    x, src = (_clear(lowering, value, dim, rest) for value in (x, src))
    if lowering.is_whole(x, dim) and x.kind == "constant" and not lowering.is_whole(src, dim):
        atom = lowering.mesh.atom(x.shape[dim], lowering.cut(src, dim))  # zeros that are written into become cut
        x = lowering.cut_as(x, replaced(x.layout, dim, atom))
    if lowering.is_whole(x, dim):
        src = lowering.gathered(src, [dim])
    x, src = (lowering.cut_as(v, replaced(rest, dim, *v.layout[dim])) for v in (x, src))
    if lowering.is_whole(x, dim):
        at = (slice(None),) * dim + (slice(start, end, step),)
        return lowering.local(lambda a, b: _written(a, at, b), [x, src], x.layout)
    x = lowering.cut_as(x, lowering.common([x.layout]))
    out = x.layout[dim][0]
    window = Window(1, picked.step, ((-picked.start, 0),))
    view = lowering.view(src, {dim: Reach(out, GradientWindow(window, (len(picked),)))}, x.axes | src.axes)

    def written(place: Place) -> torch.Tensor:
        lo, hi = out.range(place)
        return torch.tensor([i - lo for i in range(lo, hi) if i in picked], dtype=torch.int64)

    run = lambda at, a, b: a.index_copy(dim, at.to(a.device), b.to(a.device))  # noqa: E731
    return lowering.local(run, [x, view], x.layout, at=written)


def _written(a: torch.Tensor, at: tuple[slice, ...], b: torch.Tensor) -> torch.Tensor:
    """Return a copy of a with b at some places; torch.slice_scatter has no gradient for complex numbers."""
    copy = a.clone()
    copy[at] = b
    return copy


@rule("aten.flip.default")
def flip(lowering: Lowering, x: Value, dims: Sequence[int]) -> Any:
    """Redistribution: cells in reverse order."""
    for dim in (d % len(x.shape) for d in dims):
        n = x.shape[dim]
        if lowering.is_whole(x, dim):
            x = lowering.local(partial(torch.flip, dims=(dim,)), [x], x.layout)
        else:
            x = remapped(lowering, x, dim, n, partial(operator.sub, n - 1))
    return x


@rule("aten.roll.default")
def roll(lowering: Lowering, x: Value, shifts: Sequence[int], dims: Sequence[int]) -> Any:
    """Redistribution: cyclic shift."""
    if not dims:
        lowering.refuse("rolls the flattened tensor")
    for shift, dim in zip(shifts, (d % len(x.shape) for d in dims), strict=True):
        n = x.shape[dim]
        if lowering.is_whole(x, dim):
            x = lowering.local(partial(torch.roll, shifts=shift, dims=dim), [x], x.layout)
        else:
            x = rotated(lowering, x, dim, n, shift)
    return x


_MODES = {"reflection": "reflect", "replication": "replicate", "circular": "circular"}


@rule("aten.pad.default", "aten.constant_pad_nd.default", "aten.reflection_pad1d.default",
      "aten.reflection_pad2d.default", "aten.reflection_pad3d.default", "aten.replication_pad1d.default",
      "aten.replication_pad2d.default", "aten.replication_pad3d.default", "aten._pad_circular.default")  # fmt: skip
def pad(
    lowering: Lowering,
    x: Value,
    pad: Sequence[int] | None = None,
    mode: str | None = None,
    value: float | None = None,
    padding: Sequence[int] = (),
) -> Any:
    """Redistribution: padding in every mode; negative amounts crop."""
    name = str(lowering.target)
    mode = mode or next((mode for word, mode in _MODES.items() if word in name), "constant")
    amounts = list(padding if pad is None else pad)
    for at in range(len(amounts) // 2):
        dim, before, after = len(x.shape) - 1 - at, amounts[2 * at], amounts[2 * at + 1]
        if mode == "circular" and min(before, after) < 0:  # what is left goes around
            x = slices(lowering, x, dim, max(0, -before), x.shape[dim] - max(0, -after))
            before, after = max(0, before), max(0, after)
            if max(before, after) > x.shape[dim]:
                lowering.refuse("it would wrap more cells than remain, where PyTorch 2.13 returns arbitrary values")
        if before or after:
            x = _padded(lowering, x, dim, before, after, mode, float(value or 0.0))
    return x


def _padded(lowering: Lowering, x: Value, dim: int, before: int, after: int, mode: str, value: float) -> Any:
    n, mode = x.shape[dim], "wrap" if mode == "circular" else mode
    extent = n + before + after
    whole_here = lowering.is_whole(x, dim)
    if whole_here and mode == "constant":
        around_it = [0, 0] * (len(x.shape) - 1 - dim) + [before, after]
        return lowering.local(lambda a: F.pad(a, around_it, value=value), [x], replaced(x.layout, dim, Atom(extent)))
    if mode == "wrap" and not whole_here:
        return rotated(lowering, x, dim, extent, before)
    if mode != "constant":
        return remapped(lowering, x, dim, extent, lambda i: fold(i - before, n, mode))
    return _shifted(lowering, x, dim, extent, Window(1, padding=((before, after),)), value)


@rule("aten.cat.default")
def cat(lowering: Lowering, tensors: Sequence[Any], dim: int = 0) -> Any:
    """Local; redistributed along a partitioned dimension."""
    tensors = [t for t in tensors if not (len(t.shape) == 1 and t.shape[0] == 0)]
    dim %= len(tensors[0].shape)
    tensors = [t for t in tensors if t.shape[dim]] or tensors[:1]
    rest = lowering.common([replaced(t.layout, dim, Atom(1)) for t in tensors])
    extent = sum(t.shape[dim] for t in tensors)
    dtype = lowering.out.dtype
    if all(lowering.is_whole(t, dim) for t in tensors):
        context = axes_of(rest)
        aligned = [lowering.aligned(t, replaced(rest, dim, Atom(t.shape[dim])), context) for t in tensors]
        return lowering.local(lambda *ts: torch.cat(ts, dim), aligned, replaced(rest, dim, Atom(extent)), dtype)
    tensors = [_clear(lowering, t, dim, rest) for t in tensors]
    axis = next((lowering.cut(t, dim) for t in tensors if not lowering.is_whole(t, dim)), None)
    out = lowering.mesh.atom(extent, axis)
    seen, at = [], 0
    for t in tensors:
        n = t.shape[dim]
        there = lowering.cut_as(t, replaced(rest, dim, *t.layout[dim]))
        reach = Reach(out, Window(1, padding=((at, extent - at - n),)))
        seen.append(lowering.view(there, {dim: reach}, axes_of((*rest, (out,)))))
        at += n
    return lowering.local(lambda *ts: torch.cat(ts, dim), seen, replaced(rest, dim, out), dtype)


def _clear(lowering: Lowering, value: Value, dim: int, rest: Sequence[Any]) -> Any:
    """Return the value such that no mesh axis of other dimensions partitions this one, which has one atom."""
    cut = value.layout[dim]
    return lowering.gathered(value, [dim] if len(cut) > 1 or axes_of([cut]) & axes_of(rest) else [])


@rule("aten.stack.default")
def stack(lowering: Lowering, tensors: Sequence[Any], dim: int = 0) -> Any:
    """Local: concatenation along a new dimension."""
    dim %= len(tensors[0].shape) + 1
    shape = (*tensors[0].shape[:dim], 1, *tensors[0].shape[dim:])
    return cat(lowering, [lowering.reshape(t, shape) for t in tensors], dim)


@rule("aten.select_scatter.default", always=True)
def select_scatter(lowering: Lowering, x: Value, src: Value, dim: int, index: int) -> Any:
    """Redistribution: new values at one index of a dimension."""
    dim, index = dim % len(x.shape), index % x.shape[dim]
    there = lowering.reshape(src, (*x.shape[:dim], 1, *x.shape[dim + 1 :]))
    return slice_scatter(lowering, x, there, dim, index, index + 1)


@rule("aten.index_select.default")
def index_select(lowering: Lowering, x: Value, dim: int, index: Value) -> Any:
    """Redistribution: the index tensor is replicated, and the dimension gathered."""
    dim %= len(x.shape)
    x, index = lowering.gathered(x, [dim]), lowering.gathered(index)
    layout = replaced(x.layout, dim, Atom(lowering.out.shape[dim]))
    return lowering.local(lambda a, i: a.index_select(dim, i), [x, index], layout)


@rule("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index(lowering: Lowering, x: Value, indices: Sequence[Any]) -> Any:
    """Redistribution: index tensors are replicated, and the indexed dimensions gathered."""
    given = [(dim, lowering.gathered(value)) for dim, value in enumerate(indices) if value is not None]
    if any(value.dtype == torch.bool for _, value in given):
        lowering.refuse("the shape of a selection by a mask depends on values")
    dims = [dim for dim, _ in given]
    x = lowering.gathered(x, dims)
    new = whole(torch.broadcast_shapes(*(value.shape for _, value in given)))
    rest = [cut for dim, cut in enumerate(x.layout) if dim not in dims]
    first = first_of(dims)
    layout = (*rest[:first], *new, *rest[first:])

    def run(a: torch.Tensor, *at: torch.Tensor) -> torch.Tensor:
        which = dict(zip(dims, at, strict=True))
        return a[tuple(which.get(dim, slice(None)) for dim in range(a.dim()))]

    return lowering.local(run, [x, *(value for _, value in given)], layout)


def first_of(dims: Sequence[int]) -> int:
    """Return the position of the indexed dimensions in the result: in place if adjacent, else in front."""
    return dims[0] if list(dims) == list(range(dims[0], dims[-1] + 1)) else 0


@rule("aten.fill.Tensor", "aten.fill.Scalar")
def fill(lowering: Lowering, x: Value, value: Value | float) -> Any:
    """Local: a constant."""
    dtype, device, at = x.dtype, lowering.out.device, partial(local_shape, x.layout)
    if isinstance(value, Value):
        run = lambda shape, v: v.to(dtype).expand(shape).clone()  # noqa: E731
        return lowering.local(run, [value], x.layout, dtype, x.axes, at)
    full = partial(torch.full, fill_value=value, dtype=dtype, device=device)
    return lowering.local(full, [], x.layout, dtype, at=at)
