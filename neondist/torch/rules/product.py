"""Matrix products and attention."""

from __future__ import annotations

from functools import partial
from math import prod

import torch
import torch.nn.functional as F

from ...geometry import Atom
from ..exchange.ring import RingPlan
from ..ir.graph import Value
from ..ir.layout import axes_of, local_indices, replace_dim, replicated, whole_if_partitioned_along
from ..ir.registry import rule
from ..lowering.lowering import Lowering
from .channels import partition_channel_operands


@rule("aten.linear.default", whole=("weight", "bias"))
def linear(lowering: Lowering, x: Value, weight: Value, bias: Value | None = None) -> Value:
    """Multiply locally; over a partitioned dimension, sum the partial products of all ranks."""
    layout = (*x.layout[:-1], (Atom(weight.shape[0]),)) if len(weight.shape) > 1 else x.layout[:-1]
    dtype = lowering.fake_out.dtype
    if lowering.is_whole(x, -1):
        if lowering.partitions_channels and len(x.shape) == len(weight.shape) == 2:
            x, weight, bias, channels, _ = partition_channel_operands(lowering, x, weight, bias)
            layout = (*x.layout[:-1], channels)
        return lowering.local(F.linear, [x, weight, bias], layout, dtype)
    weight_columns = lowering.partition_as(weight, replace_dim(replicated(weight.shape), -1, *x.layout[-1]))
    product = lowering.allreduce_local_result(F.linear, [x, weight_columns], axes_of(x.layout[-1:]), layout, dtype)
    return product if bias is None else lowering.local(torch.add, [product, bias], layout, dtype)


@rule("aten.bilinear.default", whole=("weight", "bias"))
def bilinear(lowering: Lowering, input1: Value, input2: Value, weight: Value, bias: Value | None = None) -> Value:
    """Gather the features of both inputs, and compute locally."""
    inputs = [lowering.gather(value, [-1]) for value in (input1, input2)]
    other_dims = lowering.pointwise_layout([value.layout[:-1] for value in inputs])
    args = [lowering.partition_as(value, (*other_dims, value.layout[-1])) for value in inputs]
    layout = (*other_dims, (Atom(weight.shape[0]),))
    return lowering.local(F.bilinear, [*args, weight, bias], layout, lowering.fake_out.dtype)


@rule("aten.cdist.default", "aten._cdist_forward.default", "aten._euclidean_dist.default")
def cdist(lowering: Lowering, x1: Value, x2: Value, **other_args: object) -> Value:
    """Gather the rows of the second argument. Not decomposed: decompositions have NaN gradients at distance 0."""
    x1, x2 = lowering.gather(x1, [-1]), lowering.gather(x2, [-1])
    batch = lowering.pointwise_layout([x1.layout[:-2], x2.layout[:-2]]) if len(lowering.fake_out.shape) > 2 else ()
    layout = (*batch, x1.layout[-2], (Atom(x2.shape[-2]),))
    left = lowering.gather_as(x1, (*batch, *x1.layout[-2:]), axes_of(layout))
    right = lowering.gather_as(x2, (*batch, (Atom(x2.shape[-2]),), x2.layout[-1]), axes_of(layout))
    target, options = lowering.target, list(other_args.values())
    return lowering.local(lambda a, b: target(a, b, *options), [left, right], layout, lowering.fake_out.dtype)


@rule("aten.pdist.default", "aten._pdist_forward.default")
def pdist(lowering: Lowering, x: Value, p: float = 2) -> Value:
    """Gather all rows; every rank computes the distances of all pairs."""
    return lowering.local(lambda a: F.pdist(a, p), [lowering.gather(x)], replicated(lowering.fake_out.shape))


@rule("aten.addmm.default")
def addmm(lowering: Lowering, x: Value, mat1: Value, mat2: Value, beta: float = 1, alpha: float = 1) -> Value:
    """Compute the product and the sum by simpler operators."""
    product = matmul(lowering, mat1, mat2)
    x = lowering.align_for_broadcast(x, product.layout, product.axes)
    return lowering.local(lambda p, a: beta * a + alpha * p, [product, x], product.layout, lowering.fake_out.dtype)


@rule("aten.matmul.default", "aten.bmm.default", "aten.mm.default", "aten.mv.default", "aten.dot.default")
def matmul(
    lowering: Lowering, x: Value, other: Value | None = None, mat2: Value | None = None, vec: Value | None = None,
    tensor: Value | None = None,
) -> Value:  # fmt: skip
    """Sum partial products over a partitioned inner dimension; gather it if its axes also partition the result."""
    a, b = x, next(value for value in (other, mat2, vec, tensor) if value is not None)
    if len(a.shape) < 2 or len(b.shape) < 2:
        a_matrix, b_matrix = a, b
        if len(a.shape) == 1:
            a_matrix = lowering.reshape(a, (1, *a.shape))
        if len(b.shape) == 1:
            b_matrix = lowering.reshape(b, (*b.shape, 1))
        return lowering.reshape(matmul(lowering, a_matrix, b_matrix), lowering.fake_out.shape)
    batch = lowering.pointwise_layout([a.layout[:-2], b.layout[:-2]]) if max(len(a.shape), len(b.shape)) > 2 else ()
    rows = whole_if_partitioned_along(a.layout[-2], axes_of(batch))
    columns = whole_if_partitioned_along(b.layout[-1], axes_of((*batch, rows)))
    (inner_dim,) = lowering.pointwise_layout([a.layout[-1:], b.layout[-2:-1]])
    inner_dim = whole_if_partitioned_along(inner_dim, axes_of((*batch, rows, columns)))
    axes = axes_of((*batch, rows, inner_dim, columns))
    left = lowering.gather_as(a, (*batch, rows, inner_dim), axes)
    right = lowering.gather_as(b, (*batch, inner_dim, columns), axes)
    layout = (*batch, rows, columns)
    return lowering.allreduce_local_result(torch.matmul, [left, right], axes_of([inner_dim]), layout, a.dtype)


MIN_RING_BYTES = 2**24
"""Keys and values smaller than this are gathered: they are sent twice instead of three times, with fewer waits."""


def _uses_ring_attention(lowering: Lowering, query: Value, key: Value, value: Value, mask: Value | None) -> bool:
    """Return whether to use ring attention: keys are partitioned like queries, and too large to gather."""
    ring_axes = axes_of(key.layout[-2:-1])
    alike = key.layout[:-2] == value.layout[:-2] == query.layout[:-2] and key.layout[-2] == value.layout[-2]
    if not ring_axes or not alike or axes_of(query.layout[-2:-1]) != ring_axes or (mask and mask.kind != "constant"):
        return False
    num_parts = prod(lowering.mesh.parts[axis] for axis in axes_of(key.layout[:-2]))
    return prod(key.shape[:-1]) * (key.shape[-1] + value.shape[-1]) * key.dtype.itemsize // num_parts >= MIN_RING_BYTES


@rule("aten.scaled_dot_product_attention.default", applies_if_replicated=True)
def attention(
    lowering: Lowering, query: Value, key: Value, value: Value, attn_mask: Value | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Value:  # fmt: skip
    """Gather keys and values for each rank's queries or, if they are large, pass them around a ring."""
    if dropout_p:  # dropout of scores, each drawn by its global index
        return lowering.decompose() or lowering.refuse("it applies dropout inside attention")
    if enable_gqa:
        key, value = (_repeat_heads(lowering, t, query.shape[-3]) for t in (key, value))
    query, key, value = (lowering.gather(t, [-1]) for t in (query, key, value))
    batch = lowering.pointwise_layout([t.layout[:-2] for t in (query, key, value)])
    query_dim, key_dim = whole_if_partitioned_along(query.layout[-2], axes_of(batch)), (Atom(key.shape[-2]),)
    is_partitioned = bool(axes_of([query_dim]))
    axes, mask_layout = axes_of((*batch, query_dim)), (*batch, query_dim, key_dim)
    mask = None if attn_mask is None else lowering.gather_as(attn_mask, mask_layout, axes)
    layout = (*batch, query_dim, value.layout[-1])
    if _uses_ring_attention(lowering, query, key, value, mask):
        ring = RingPlan(lowering.mesh, query_dim, key.layout[-2], is_causal, scale or key.shape[-1] ** -0.5)
        return lowering.ring_attention([t for t in (query, key, value, mask) if t is not None], layout, ring)
    args = [
        lowering.gather_as(query, (*batch, query_dim, query.layout[-1]), axes),
        lowering.gather_as(key, (*batch, key_dim, key.layout[-1]), axes),
        lowering.gather_as(value, (*batch, key_dim, value.layout[-1]), axes),
        mask,
    ]

    def run(
        rows: list[int], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        if is_causal and is_partitioned:  # PyTorch would treat this rank's first query as the image's first
            causal_mask = torch.tensor(rows, device=q.device)[:, None] >= torch.arange(k.shape[-2], device=q.device)
            return F.scaled_dot_product_attention(q, k, v, causal_mask, 0.0, scale=scale)
        return F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=scale)

    return lowering.local(run, args, layout, lowering.fake_out.dtype, at=partial(local_indices, query_dim))


def _repeat_heads(lowering: Lowering, x: Value, num_heads: int) -> Value:
    """Return keys or values with each head repeated for all query heads that share it."""
    repeats = num_heads // x.shape[-3]
    result: Value = lowering.trace_and_lower([x], lambda a: a.repeat_interleave(repeats, -3))
    return result
