"""Elementwise operators; most are recognised by PyTorch's own tag."""

from __future__ import annotations

from functools import partial
from math import prod

import torch

from ..ir.graph import Value
from ..ir.layout import local_shape
from ..ir.registry import POINTWISE_OPS, rule
from ..lowering.lowering import Lowering

POINTWISE_OPS.update((
    "aten.clone.default", "aten._to_copy.default", "aten.alias.default", "aten.contiguous.default",
    "aten.lift_fresh_copy.default", "aten.to.dtype", "aten.to.dtype_layout", "aten.to.device",
    "aten.masked_fill.Scalar", "aten.masked_fill.Tensor", "aten.where.self", "aten.where.ScalarSelf",
    "aten.where.ScalarOther", "aten.where.Scalar", "aten.rsub.Scalar", "aten.rsub.Tensor", "aten.relu6.default",
    "aten.conj.default", "aten._conj.default", "aten.real.default", "aten.imag.default", "aten.complex.default",
    "aten.polar.default", "aten.resolve_conj.default", "aten.resolve_neg.default", "aten._neg_view.default",
    "aten.fake_quantize_per_tensor_affine_cachemask.default",
))  # fmt: skip


@rule("aten.prelu.default", whole=("weight",))
def prelu(lowering: Lowering, x: Value, weight: Value) -> Value:
    """Compute locally, with one slope per channel."""
    shape = [1] * len(x.shape)
    if len(shape) > 1:
        shape[1] = prod(weight.shape)
    slope = lowering.reshape(weight, shape)
    args = [x, lowering.align_for_broadcast(slope, x.layout, x.axes)]
    return lowering.local(lambda a, w: torch.where(a > 0, a, w * torch.where(a > 0, 0, a)), args, x.layout)


@rule("aten.type_as.default", "aten.to.other", applies_if_replicated=True)
def type_as(lowering: Lowering, x: Value, other: Value, **_: object) -> Value:
    """Convert locally to the dtype of the second argument."""
    return lowering.convert_dtype(x, lowering.fake_out.dtype)


@rule("aten.detach.default", applies_if_replicated=True)
def detach(lowering: Lowering, x: Value) -> Value:
    """Detach locally."""
    return lowering.detach(x)


@rule("aten.copy.default", applies_if_replicated=True)
def copy(lowering: Lowering, x: Value, src: Value, non_blocking: bool = False) -> Value:
    """Align the second argument with the first, and copy it with the shape and dtype of the first."""
    layout, axes, dtype = lowering.pointwise_layout([x.layout]), x.axes, x.dtype
    run = lambda shape, a: a.to(dtype).expand(shape).clone()  # noqa: E731
    src = lowering.align_for_broadcast(src, layout, axes)
    return lowering.local(run, [src], layout, dtype, axes, at=partial(local_shape, layout))
