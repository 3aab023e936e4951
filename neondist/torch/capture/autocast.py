"""Autocast around captured modules and inside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..ir.autocast import AUTOCAST_DEVICES
from ..ir.graph import Value

_REGION_KEY = "autocast of the module on "
"""Metadata key, without the device type at its end, of operators in an autocast region of the module."""


def mark_autocast_regions(program: Any) -> None:
    """Mark a module's own autocast regions, since `run_decompositions` replaces them with casts."""
    for node in program.graph.nodes:
        if node.target is torch.ops.higher_order.wrap_with_autocast:
            node.meta["custom"] = (node.meta.get("custom") or {}) | {f"{_REGION_KEY}{node.args[0]}": True}


def devices_with_own_autocast(node: Any) -> tuple[str, ...]:
    """Return the device types for which the module itself sets autocast around an operator."""
    metadata = node.meta.get("custom") or {}
    return tuple(device for device in AUTOCAST_DEVICES if f"{_REGION_KEY}{device}" in metadata)


def floating_dtypes(values_by_node: Mapping[Any, Any]) -> dict[int, torch.dtype]:
    """Return the captured dtypes of the floating-point values of a plan, by id.

    Parameters
    ----------
    values_by_node : mapping of torch.fx.Node to values
        If several nodes have the same value, the first determines its dtype.
    """
    dtypes = dict[int, torch.dtype]()
    for node, result in values_by_node.items():
        values, fakes = (pytree.tree_leaves(tree, lambda leaf: leaf is None) for tree in (result, node.meta.get("val")))
        for value, fake in zip(values, fakes, strict=False):
            if isinstance(value, Value) and isinstance(fake, torch.Tensor) and fake.is_floating_point():
                dtypes.setdefault(value.id, fake.dtype)
    return dtypes
