"""Indexing by the values of tensors: gather, scatter, embedding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from ...geometry import Atom
from ..ir.graph import Value
from ..ir.layout import axes_of, replaced, shape_of, whole, whole_along
from ..ir.registry import rule
from ..lowering.lower import Lowering
from .index import first_of, slices


@rule("aten.gather.default")
def gather(lowering: Lowering, x: Value, dim: int, index: Value, sparse_grad: bool = False) -> Any:
    """Redistribution: the dimension is gathered for the indices of each rank."""
    dim %= len(x.shape)
    x = _first(lowering, x, dim, index.shape)
    rest = lowering.common([replaced(value.layout, dim, Atom(1)) for value in (index, x)])
    picks = index.layout[dim]
    if axes_of([picks]) & axes_of(rest):
        picks = (Atom(index.shape[dim]),)
    layout = replaced(rest, dim, *picks)
    seen = lowering.seen_as(x, replaced(rest, dim, Atom(x.shape[dim])), axes_of(layout))
    return lowering.local(lambda a, i: a.gather(dim, i), [seen, lowering.cut_as(index, layout)], layout)


def _first(lowering: Lowering, x: Value, dim: int, shape: Sequence[int]) -> Any:
    """Return x cropped to `shape` along all dimensions but one."""
    for at, n in enumerate(shape):
        if at != dim and x.shape[at] != n:
            x = slices(lowering, x, at, 0, n)
    return x


@rule("aten.take.default")
def take(lowering: Lowering, x: Value, index: Value) -> Any:
    """Redistribution: the whole tensor is gathered for the indices of each rank."""
    flat = lowering.reshape(x, (prod(x.shape),))
    seen = lowering.seen_as(flat, whole(flat.shape), axes_of(index.layout))
    return lowering.local(torch.take, [seen, index], index.layout)


@rule("aten.embedding.default")
def embedding(
    lowering: Lowering, weight: Value, indices: Value, padding_idx: int = -1, scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:  # fmt: skip
    """Local: rows of a replicated table."""
    if scale_grad_by_freq:
        lowering.refuse("gradients scaled by how often all ranks pick a row")
    rows = lowering.gathered(weight)
    padding = padding_idx if padding_idx >= 0 else None
    layout = (*indices.layout, *whole(weight.shape[1:]))
    return lowering.local(lambda w, i: F.embedding(i, w, padding), [rows, indices], layout, weight.dtype)


@rule("aten.grid_sampler.default", "aten.grid_sampler_2d.default", "aten.grid_sampler_3d.default")
def grid_sampler(lowering: Lowering, x: Value, grid: Value, **how: Any) -> Any:
    """Redistribution: images are gathered for the sampling points of each rank."""
    n, (batch,) = len(x.shape) - 2, lowering.common([x.layout[:1], grid.layout[:1]])
    cells = tuple(
        dim if not axes_of([dim]) & axes_of([batch]) else whole_along((dim,), (0,))[0] for dim in grid.layout[1:-1]
    )
    layout = (batch, *whole(x.shape[1:2]), *cells)
    seen = lowering.seen_as(x, (batch, *whole(x.shape[1:])), axes_of(layout))
    places = lowering.cut_as(grid, (batch, *cells, *whole([n])))
    target, words = lowering.target, list(how.values())
    return lowering.local(lambda a, g: target(a, g, *words), [seen, places], layout)


@rule("aten.scatter.src", "aten.scatter.value", "aten.scatter.reduce", "aten.scatter.value_reduce",
      "aten.scatter_add.default", "aten.scatter_reduce.two")  # fmt: skip
def scatter(
    lowering: Lowering,
    x: Value,
    dim: int,
    index: Value,
    src: Value | None = None,
    value: Value | None = None,
    **how: Any,
) -> Any:
    """Redistribution: the dimension is gathered, and partitioned again."""
    dim %= len(x.shape)
    if src is not None:
        src = _first(lowering, src, -1, index.shape)
    fewer = [at for at, n in enumerate(index.shape) if n != x.shape[at]]
    (there, *given), back = lowering.co_align([v for v in (x, index, src) if v is not None], {dim, *fewer})
    target = partial(lowering.target, **how)

    def run(a: torch.Tensor, i: torch.Tensor, s: Any = value) -> torch.Tensor:
        return target(a, dim, i, s)

    return lowering.cut_as(lowering.local(run, [there, *given], there.layout), back)


@rule("aten.index_add.default", "aten.index_copy.default", "aten.index_reduce.default", "aten.index_fill.int_Scalar",
      "aten.index_fill.int_Tensor")  # fmt: skip
def index_add(
    lowering: Lowering,
    x: Value,
    dim: int,
    index: Value,
    source: Value | None = None,
    value: Value | float | None = None,
    reduce: str = "",
    **how: Any,
) -> Any:
    """Redistribution: the dimension is gathered, and partitioned again; the index tensor is replicated."""
    dim %= len(x.shape)
    (there, *given), back = lowering.co_align([v for v in (x, source) if v is not None], {dim})
    given += [value] if isinstance(value, Value) else []
    words = ([] if value is None or isinstance(value, Value) else [value]) + ([reduce] if reduce else [])
    target = partial(lowering.target, **how)

    def run(a: torch.Tensor, i: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return target(a, dim, i, *rest, *words)

    args = [there, lowering.gathered(index), *given]
    return lowering.cut_as(lowering.local(run, args, there.layout), back)


@rule("aten.index_put.default", "aten._unsafe_index_put.default")
def index_put(
    lowering: Lowering, x: Value, indices: Sequence[Any], values: Any, accumulate: bool = False, **_: Any
) -> Any:
    """Redistribution: indexed dimensions are gathered, and partitioned again; boolean masks are local."""
    given = {dim: value for dim, value in enumerate(indices) if value is not None}
    if any(value.dtype == torch.bool for value in given.values()):
        return _masked(lowering, x, given, values, accumulate)
    dims = list(given)
    (there,), back = lowering.co_align([x], dims)
    new = whole(torch.broadcast_shapes(*(value.shape for value in given.values())))
    first = first_of(dims)
    rest = [dim for at, dim in enumerate(there.layout) if at not in given]
    target = (*rest[:first], *new, *rest[first:])
    at, put = [lowering.gathered(value) for value in given.values()], lowering.target

    def run(a: torch.Tensor, v: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        which = dict(zip(dims, tensors, strict=True))
        return put(a, [which.get(dim) for dim in range(a.dim())], v, accumulate)

    args = [there, lowering.seen_as(values, target, there.axes), *at]
    return lowering.cut_as(lowering.local(run, args, there.layout), back)


def _masked(lowering: Lowering, x: Value, given: dict[int, Any], values: Any, accumulate: bool) -> Any:
    """Return x with one value per channel written where a mask is true."""
    ((dim, mask), *others) = given.items()
    rest = len(x.shape) - dim - len(mask.shape)
    shape = [1] * (dim + rest + 1 - len(values.shape)) + list(values.shape)
    if others or shape[dim] != 1:
        lowering.refuse("the assignment of values to cells depends on the values of a mask; use torch.where")
    mask = lowering.reshape(mask, (*[1] * dim, *mask.shape, *[1] * rest))
    values = lowering.reshape(values, (*shape[:dim], *[1] * (len(x.shape) - dim - rest), *shape[dim + 1 :]))
    layout = lowering.common([value.layout for value in (x, mask, values)])
    args = [lowering.aligned(value, layout, axes_of(layout)) for value in (x, mask, values)]
    return lowering.local(lambda a, m, v: torch.where(m, a + v if accumulate else v, a), args, layout)


@rule("aten.masked_scatter.default")
def masked_scatter(lowering: Lowering, **_: Any) -> Any:
    """Refused: the source of each cell depends on the values of the mask."""
    lowering.refuse("the assignment of values to cells depends on the values of the mask; use torch.where")


@rule("aten.searchsorted.Tensor", "aten.bucketize.Tensor")
def searchsorted(lowering: Lowering, x: Value, sorted_sequence: Any = None, boundaries: Any = None, **how: Any) -> Any:
    """Pointwise; the sorted sequence is replicated."""
    places = sorted_sequence if boundaries is None else boundaries
    sorter, dtype, layout = how.pop("sorter", None), lowering.out.dtype, x.layout
    target = lowering.target

    def run(a: torch.Tensor, s: torch.Tensor, *order: torch.Tensor) -> torch.Tensor:
        more = {"sorter": order[0]} if order else {}
        return target(a, s, **how) if boundaries is not None else target(s, a, **how, **more)

    rows = [value for value in (places, sorter) if value is not None]
    if len(places.shape) > 1:
        layout = (*lowering.common([layout[:-1], places.layout[:-1]]), layout[-1])
        if axes_of(layout[:-1]) & axes_of(layout[-1:]):
            layout = replaced(layout, -1 % len(layout), Atom(shape_of(layout)[-1]))
    whole_rows = (*layout[: len(places.shape) - 1], (Atom(places.shape[-1]),))
    args = [lowering.cut_as(x, layout), *(lowering.seen_as(row, whole_rows, axes_of(layout)) for row in rows)]
    return lowering.local(run, args, layout, dtype)
