"""Deduplication of tensors saved for the backward pass.

A view (a tile with its halo) contains a copy of the tile. Autograd saves the view for the operator that reads it, and
often also the tile for the operator that computed the tile, such as a ReLU. Large saved tiles are therefore replaced by
slices of their views: keeping both would double the memory of saved tensors.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import ref

import torch
from torch.autograd.graph import saved_tensors_hooks

from ..lowering import training_memory
from ..lowering.plan import TorchPlan


class _SavedTensorHolder:
    """A tensor saved for the backward pass, or a copy of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class SavedTensors:
    """The large tensors that the current forward pass of a plan has saved."""

    def __init__(self, plan: TorchPlan) -> None:
        self._holders_by_address: dict[int, list[ref[_SavedTensorHolder]]] = {}
        views = (plan.values[step.inputs[0]] for step in plan.steps if step.kind == "view")
        self._has_large_views = any(value.nbytes >= training_memory.MIN_DEDUPLICATED_BYTES for value in views)

    def record_saved_tensors(self) -> AbstractContextManager[Any]:
        """Return a context that records saved tensors; a null context if other hooks are active or no view is large."""
        self._holders_by_address.clear()
        has_hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        if has_hooks or not (self._has_large_views and torch.is_grad_enabled()):
            return nullcontext()
        return saved_tensors_hooks(self._record_saved_tensor, _unpack)

    def includes(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor at this address has been saved."""
        return bool(self._holders_by_address) and tensor.data_ptr() in self._holders_by_address

    def replace(self, tensor: torch.Tensor, copy: torch.Tensor) -> None:
        """Replace a tensor with a copy, detached from the graph, wherever it has been saved."""
        for reference in self._holders_by_address.pop(tensor.data_ptr(), ()):
            saved = reference()
            if saved is not None and _is_same_memory(saved.tensor, tensor):
                saved.tensor = copy

    def _record_saved_tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.nbytes < training_memory.MIN_DEDUPLICATED_BYTES:
            return tensor
        saved = _SavedTensorHolder(tensor)
        self._holders_by_address.setdefault(tensor.data_ptr(), []).append(ref(saved))
        return saved


def _unpack(saved: Any) -> torch.Tensor:
    tensor: torch.Tensor = saved.tensor if type(saved) is _SavedTensorHolder else saved
    return tensor


def _is_same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.data_ptr(), a.shape, a.stride(), a.dtype) == (b.data_ptr(), b.shape, b.stride(), b.dtype)
