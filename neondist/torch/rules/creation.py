"""Creation of tensors: replicated if created from a shape, or partitioned like the tensor that they resemble."""

from __future__ import annotations

import torch

from ..ir.graph import Value
from ..ir.layout import replicated
from ..ir.registry import rule
from ..lowering.lowering import Lowering


@rule("aten.new_zeros.default", "aten.new_ones.default", "aten.new_empty.default", "aten.new_full.default",
      applies_if_replicated=True)  # fmt: skip
def new_filled(lowering: Lowering, fill_value: float = 0, **_: object) -> Value:
    """Create the same tensor on every rank."""
    out, name = lowering.fake_out, str(lowering.target)
    value = 1 if "ones" in name else fill_value
    shape, dtype, device = tuple(out.shape), out.dtype, out.device
    return lowering.local(lambda: torch.full(shape, value, dtype=dtype, device=device), [], replicated(shape), dtype)


@rule("aten.empty_like.default", "aten.zeros_like.default", "aten.ones_like.default", "aten.full_like.default",
      applies_if_replicated=True)  # fmt: skip
def filled_like(lowering: Lowering, x: Value, fill_value: float = 0, **_: object) -> Value:
    """Create a tensor that is partitioned like the given one."""
    name, dtype = str(lowering.target), lowering.fake_out.dtype
    value = 1 if "ones" in name else fill_value
    run = lambda a: torch.full_like(a, value, dtype=dtype)  # noqa: E731
    return lowering.without_gradient(lowering.local(run, [x], x.layout, dtype))


@rule("aten._assert_tensor_metadata.default", "aten._assert_scalar.default", applies_if_replicated=True)
def drop_assertion(lowering: Lowering, *_: object, **options: object) -> None:
    """Drop the assertion: shapes and dtypes are known."""


@rule("aten._assert_async.default", "aten._assert_async.msg", applies_if_replicated=True)
def assertion(lowering: Lowering, x: Value, assert_msg: str = "assertion failed", **_: object) -> None:
    """Check the condition on every rank."""

    def check(condition: torch.Tensor) -> torch.Tensor:
        torch._assert_async(condition, assert_msg)
        return condition

    lowering.local(check, [lowering.gather(x)], replicated(x.shape), x.dtype)
    lowering.steps[-1].is_check = True
