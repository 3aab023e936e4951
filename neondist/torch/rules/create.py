"""Tensor creation from a shape, or like another tensor; replicated on every rank."""

from __future__ import annotations

from typing import Any

import torch

from ..ir.graph import Value
from ..ir.layout import whole
from ..ir.registry import rule
from ..lowering.lower import Lowering


@rule("aten.new_zeros.default", "aten.new_ones.default", "aten.new_empty.default", "aten.new_full.default",
      always=True)  # fmt: skip
def new(lowering: Lowering, x: Value, size: Any, fill_value: Any = None, **_: Any) -> Any:
    """Replicated on every rank."""
    out, name = lowering.out, str(lowering.target)
    value = fill_value if "full" in name else 1 if "ones" in name else 0
    shape, dtype, device = tuple(out.shape), out.dtype, out.device
    return lowering.local(lambda: torch.full(shape, value, dtype=dtype, device=device), [], whole(shape), dtype)


@rule("aten.empty_like.default", "aten.zeros_like.default", "aten.ones_like.default", "aten.full_like.default",
      always=True)  # fmt: skip
def like(lowering: Lowering, x: Value, fill_value: Any = None, **_: Any) -> Any:
    """Local: partitioned like the given tensor."""
    name, dtype = str(lowering.target), lowering.out.dtype
    value = fill_value if "full" in name else 1 if "ones" in name else 0
    filled = lowering.local(lambda a: torch.full_like(a, value, dtype=dtype), [x], x.layout, dtype)
    filled.kind = "constant"
    return filled


@rule("aten._assert_tensor_metadata.default", "aten._assert_scalar.default", always=True)
def asserted(lowering: Lowering, *_: Any, **more: Any) -> None:
    """Assertion, dropped: shapes and dtypes are known."""
