"""Reshaping; data are moved only if a partition boundary has to move."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import NoReturn

from ...geometry import Atom
from ..ir.errors import UnsupportedOperator
from ..ir.graph import Value
from ..ir.layout import axes_of, local_shape
from ..ir.registry import rule
from ..lowering.lowering import Lowering
from .index import remap_dim, roll_dim_to_extent


@rule("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.view_copy.default",
      "aten._reshape_copy.default", "aten.flatten.using_ints", "aten.unflatten.int", "aten.unsqueeze.default",
      "aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims")  # fmt: skip
def reshape(lowering: Lowering, x: Value, **_: object) -> Value:
    """Reshape locally if partition boundaries allow it; otherwise redistribute."""
    return lowering.reshape(x, lowering.fake_out.shape)


@rule("aten.as_strided.default", "aten.as_strided_copy.default", "aten.as_strided_scatter.default",
      applies_if_replicated=True)  # fmt: skip
def as_strided(lowering: Lowering, **_: object) -> NoReturn:
    """Reject the operator, which addresses elements by memory offsets."""
    why, remedy = "its memory layout differs from that in one process", "select cells with view, unfold or an index"
    raise UnsupportedOperator(lowering.where, why, remedy=remedy)


@rule("aten.permute.default", "aten.permute_copy.default")
def permute(lowering: Lowering, x: Value, dims: Sequence[int]) -> Value:
    """Permute dimensions with their partitions."""
    order = [dim % len(x.shape) for dim in dims]
    return lowering.local(lambda a: a.permute(order), [x], tuple(x.layout[dim] for dim in order))


@rule("aten.transpose.int")
def transpose(lowering: Lowering, x: Value, dim0: int, dim1: int) -> Value:
    """Swap two dimensions with their partitions."""
    order = list(range(len(x.shape)))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return permute(lowering, x, order)


def broadcast_tensors(lowering: Lowering, tensors: Sequence[Value]) -> list[Value]:
    """Expand each tensor locally."""
    aligned, layout = lowering.align_pointwise(tensors)
    axes, shape_at = axes_of(layout), partial(local_shape, layout)
    return [lowering.local(lambda shape, a: a.expand(shape), [x], layout, x.dtype, axes, shape_at) for x in aligned]


@rule("aten.meshgrid.default", "aten.meshgrid.indexing")
def meshgrid(lowering: Lowering, tensors: Sequence[Value], indexing: str = "ij") -> list[Value]:
    """Repeat each tensor locally along the dimensions of the others."""
    order = list(range(len(tensors)))
    if indexing == "xy" and len(tensors) > 1:
        order[:2] = 1, 0
    reshaped = []
    for at, x in enumerate(tensors):
        shape = [1] * len(tensors)
        shape[order.index(at)] = -1 if x.shape else 1
        shape = [prod(x.shape) if n < 0 else n for n in shape]
        reshaped.append(lowering.reshape(x, shape))
    return broadcast_tensors(lowering, reshaped)


@rule("aten.expand.default", "aten.expand_copy.default")
def expand(lowering: Lowering, x: Value, **_: object) -> Value:
    """Repeat dimensions of size 1 locally, without partitioning them."""
    shape = lowering.fake_out.shape
    num_new = len(shape) - len(x.shape)
    repeated = [dim for dim, n in enumerate(x.shape) if n != shape[num_new + dim]]
    x = lowering.gather(x, repeated)
    old_layout = ((Atom(1),),) * num_new + x.layout
    dims_and_extents = enumerate(zip(old_layout, shape, strict=True))
    layout = tuple((Atom(n),) if at - num_new in repeated or at < num_new else dim for at, (dim, n) in dims_and_extents)
    return lowering.local(lambda own_shape, a: a.expand(own_shape), [x], layout, at=partial(local_shape, layout))


@rule("aten.repeat.default")
def repeat(lowering: Lowering, x: Value, repeats: Sequence[int]) -> Value:
    """Repeat locally; redistribute along a partitioned dimension."""
    dims = ((Atom(1),),) * (len(repeats) - len(x.shape)) + x.layout
    shape = lowering.fake_out.shape
    counts = [times if whole else 1 for times, whole in zip(repeats, (not axes_of([dim]) for dim in dims), strict=True)]
    layout = tuple(dim if times == 1 else (Atom(n),) for dim, times, n in zip(dims, counts, shape, strict=True))
    x = lowering.local(lambda a: a.repeat(*counts), [x], layout)
    for dim, n in enumerate(shape):
        if x.shape[dim] != n:
            x = roll_dim_to_extent(lowering, x, dim, n, 0)
    return x


@rule("aten.repeat_interleave.self_int")
def repeat_interleave(lowering: Lowering, x: Value, repeats: int, dim: int | None = None, **_: object) -> Value:
    """Repeat each index, and redistribute the result."""
    if dim is None:
        x, dim = lowering.reshape(x, (prod(x.shape),)), 0
    dim %= len(x.shape)
    return remap_dim(lowering, x, dim, x.shape[dim] * repeats, lambda i: i // repeats)


@rule("aten.pixel_shuffle.default")
def pixel_shuffle(lowering: Lowering, x: Value, upscale_factor: int) -> Value:
    """Move channels to cells locally."""
    r, (*batch, c, h, w) = upscale_factor, x.shape
    k = len(batch)
    split = lowering.reshape(x, [*batch, c // r**2, r, r, h, w])
    order = [*range(k), k, k + 3, k + 1, k + 4, k + 2]
    return lowering.reshape(permute(lowering, split, order), [*batch, c // r**2, h * r, w * r])


@rule("aten.pixel_unshuffle.default")
def pixel_unshuffle(lowering: Lowering, x: Value, downscale_factor: int) -> Value:
    """Move cells to channels; partition boundaries are moved to boundaries of groups of cells."""
    r, (*batch, c, h, w) = downscale_factor, x.shape
    k = len(batch)
    split = lowering.reshape(x, [*batch, c, h // r, r, w // r, r])
    order = [*range(k), k, k + 2, k + 4, k + 1, k + 3]
    return lowering.reshape(permute(lowering, split, order), [*batch, c * r**2, h // r, w // r])


@rule("aten.channel_shuffle.default")
def channel_shuffle(lowering: Lowering, x: Value, groups: int) -> Value:
    """Permute channels locally."""
    n, c, *cells = x.shape
    split = lowering.reshape(x, [n, groups, c // groups, *cells])
    return lowering.reshape(transpose(lowering, split, 1, 2), x.shape)


@rule("aten.expand_as.default", "aten.view_as.default", "aten.reshape_as.default", "aten.broadcast_tensors.default",
      applies_if_replicated=True)  # fmt: skip
def shape_as_other(lowering: Lowering, **_: object) -> Value | list[Value]:
    """Decompose into operators that take the shape itself."""
    return lowering.decompose()
