"""Tensors that are made of nothing, or of the shape of another; every rank has them whole."""

from __future__ import annotations

from typing import Any

import torch

from ..layout import whole
from ..registry import rule


@rule("aten.new_zeros.default", "aten.new_ones.default", "aten.new_empty.default", "aten.new_full.default",
      always=True)  # fmt: skip
def new(lowering: Any, x: Any, size: Any, fill_value: Any = None, **_: Any) -> Any:
    """Whole on every rank."""
    out, name = lowering.out, str(lowering.target)
    value = fill_value if "full" in name else 1 if "ones" in name else 0
    shape, dtype, device = tuple(out.shape), out.dtype, out.device
    return lowering.local(lambda: torch.full(shape, value, dtype=dtype, device=device), [], whole(shape), dtype)


@rule("aten.empty_like.default", "aten.zeros_like.default", "aten.ones_like.default", "aten.full_like.default",
      always=True)  # fmt: skip
def like(lowering: Any, x: Any, fill_value: Any = None, **_: Any) -> Any:
    """Cut as what it is like."""
    name, dtype = str(lowering.target), lowering.out.dtype
    value = fill_value if "full" in name else 1 if "ones" in name else 0
    found = lowering.local(lambda a: torch.full_like(a, value, dtype=dtype), [x], x.layout, dtype)
    found.kind = "constant"
    return found


@rule("aten._assert_tensor_metadata.default", "aten._assert_scalar.default", always=True)
def asserted(lowering: Any, *_: Any, **more: Any) -> None:
    """Nothing; shapes and types are known."""
