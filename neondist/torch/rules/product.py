"""Matrix products and attention."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from ..layout import Atom, Dim, Layout, axes_of, indices, whole
from ..registry import rule
from ..ring import Ring


@rule("aten.linear.default", whole=("weight", "bias"))
def linear(lowering: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    """Local; over a cut dimension, each rank has the columns of its cells, and their sums are added."""
    weight, bias = (None if value is None else lowering.gathered(value) for value in (weight, bias))
    layout = (*x.layout[:-1], (Atom(weight.shape[0]),)) if len(weight.shape) > 1 else x.layout[:-1]
    dtype = lowering.out.dtype
    if lowering.is_whole(x, -1):
        return lowering.local(F.linear, [x, weight, bias], layout, dtype)
    columns = lowering.aligned(weight, ((Atom(weight.shape[0]),), x.layout[-1]), x.axes)
    found = lowering.reduced(F.linear, [x, columns], axes_of(x.layout[-1:]), layout, dtype)
    return found if bias is None else lowering.local(torch.add, [found, bias], layout, dtype)


@rule("aten.bilinear.default", whole=("weight", "bias"))
def bilinear(lowering: Any, input1: Any, input2: Any, weight: Any, bias: Any = None) -> Any:
    """Local, along whole features."""
    one, two = (lowering.gathered(value, [-1]) for value in (input1, input2))
    rest = lowering.common([one.layout[:-1], two.layout[:-1]])
    args = [lowering.cut_as(value, (*rest, value.layout[-1])) for value in (one, two)]
    layout = (*rest, (Atom(weight.shape[0]),))
    return lowering.local(F.bilinear, [*args, weight, bias], layout, lowering.out.dtype)


@rule("aten.cdist.default", "aten._cdist_forward.default", "aten._euclidean_dist.default")
def distances(lowering: Any, x1: Any, x2: Any, **more: Any) -> Any:
    """Redistribution: every rank sees all rows of the second; taken apart, the gradient of distance 0 is NaN."""
    one, two = lowering.gathered(x1, [-1]), lowering.gathered(x2, [-1])
    batch = lowering.common([one.layout[:-2], two.layout[:-2]]) if len(lowering.out.shape) > 2 else ()
    layout = (*batch, one.layout[-2], (Atom(two.shape[-2]),))
    left = lowering.seen_as(one, (*batch, *one.layout[-2:]), axes_of(layout))
    right = lowering.seen_as(two, (*batch, (Atom(two.shape[-2]),), two.layout[-1]), axes_of(layout))
    target, how = lowering.target, list(more.values())
    return lowering.local(lambda a, b: target(a, b, *how), [left, right], layout, lowering.out.dtype)


@rule("aten.pdist.default", "aten._pdist_forward.default")
def pairs(lowering: Any, x: Any, p: float = 2) -> Any:
    """Redistribution: every rank has all rows, and computes the distances of all pairs."""
    return lowering.local(lambda a: F.pdist(a, p), [lowering.gathered(x)], whole(lowering.out.shape))


@rule("aten.addmm.default")
def addmm(lowering: Any, x: Any, mat1: Any, mat2: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    """A product and a sum."""
    product = matmul(lowering, mat1, mat2)
    there = lowering.aligned(x, product.layout, product.axes)
    return lowering.local(lambda p, a: beta * a + alpha * p, [product, there], product.layout, lowering.out.dtype)


@rule("aten.matmul.default", "aten.bmm.default", "aten.mm.default",
      "aten.mv.default", "aten.dot.default")  # fmt: skip
def matmul(lowering: Any, x: Any, other: Any = None, mat2: Any = None, vec: Any = None, tensor: Any = None) -> Any:
    """Local; over a dimension that is cut alike in both, sums are added; else the second is seen whole along it."""
    a, b = x, next(value for value in (other, mat2, vec, tensor) if value is not None)
    if len(a.shape) < 2 or len(b.shape) < 2:
        one, two = a, b
        if len(a.shape) == 1:
            one = lowering.reshape(a, (1, *a.shape))
        if len(b.shape) == 1:
            two = lowering.reshape(b, (*b.shape, 1))
        return lowering.reshape(matmul(lowering, one, two), lowering.out.shape)
    batch = lowering.common([a.layout[:-2], b.layout[:-2]]) if max(len(a.shape), len(b.shape)) > 2 else ()
    rows, columns = _apart(a, batch), b.layout[-1]
    busy = axes_of(batch) | axes_of([rows])
    if axes_of([columns]) & busy:
        columns = (Atom(b.shape[-1]),)
    (inner,) = lowering.common([a.layout[-1:], b.layout[-2:-1]])
    if axes_of([inner]) & (busy | axes_of([columns])):
        inner = (Atom(a.shape[-1]),)
    context = axes_of((*batch, rows, inner, columns))
    left = lowering.seen_as(a, (*batch, rows, inner), context)
    right = lowering.seen_as(b, (*batch, inner, columns), context)
    layout = (*batch, rows, columns)
    return lowering.reduced(torch.matmul, [left, right], axes_of([inner]), layout, a.dtype)


def _apart(value: Any, batch: Layout) -> Dim:
    """Return how the rows of a product's first factor are cut, whole where an axis cuts the batch of the other."""
    rows = value.layout[-2]
    return (Atom(value.shape[-2]),) if axes_of([rows]) & axes_of(batch) else rows


RING_BYTES = 2**24
"""Keys and values that take less are gathered: they travel twice so, and not three times, with fewer waits."""


def _by_ring(lowering: Any, query: Any, key: Any, value: Any, mask: Any) -> bool:
    """Return whether keys and values go around a ring: where they are cut as queries are, and too large to gather."""
    around = axes_of(key.layout[-2:-1])
    alike = key.layout[:-2] == value.layout[:-2] == query.layout[:-2] and key.layout[-2] == value.layout[-2]
    if not around or not alike or axes_of(query.layout[-2:-1]) != around or (mask and mask.kind != "constant"):
        return False
    samples = prod(lowering.mesh.parts[axis] for axis in axes_of(key.layout[:-2]))
    return prod(key.shape[:-1]) * (key.shape[-1] + value.shape[-1]) * key.dtype.itemsize // samples >= RING_BYTES


@rule("aten.scaled_dot_product_attention.default", always=True)
def attention(
    lowering: Any, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: Any = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Redistribution: every rank sees all keys and values, for the queries of its own cells; large ones one by one."""
    if dropout_p:  # of scores, each by its global index
        return lowering.apart() or lowering.refuse("dropout inside of attention")
    query, key, value = (lowering.gathered(t, [-1]) for t in (query, key, value))
    batch = lowering.common([t.layout[:-2] for t in (query, key, value)])
    queries, every = _apart(query, batch), (Atom(key.shape[-2]),)
    cut = bool(axes_of([queries]))
    rows = indices(queries, lowering.place) if is_causal and cut else []
    context, rows_and_keys = axes_of((*batch, queries)), (*batch, queries, every)
    mask = None if attn_mask is None else lowering.seen_as(attn_mask, rows_and_keys, context)
    layout = (*batch, queries, value.layout[-1])
    if _by_ring(lowering, query, key, value, mask):
        ring = Ring(lowering.mesh, queries, key.layout[-2], is_causal, scale or key.shape[-1] ** -0.5)
        return lowering.ring_attention([t for t in (query, key, value, mask) if t is not None], layout, ring)
    args = [
        lowering.seen_as(query, (*batch, queries, query.layout[-1]), context),
        lowering.seen_as(key, (*batch, every, key.layout[-1]), context),
        lowering.seen_as(value, (*batch, every, value.layout[-1]), context),
        mask,
    ]

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        if is_causal and cut:  # PyTorch would take this rank's first query for that of the image
            here = torch.tensor(rows, device=q.device)[:, None] >= torch.arange(k.shape[-2], device=q.device)
            return F.scaled_dot_product_attention(q, k, v, here, 0.0, scale=scale, enable_gqa=enable_gqa)
        return F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)

    return lowering.local(run, args, layout, lowering.out.dtype)
