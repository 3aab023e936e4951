"""Changes of a module between its passes, as far as what its steps are depends on them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch


def digest_of(plan: Any, program: Any) -> str:
    """Return a hash of what is computed, constants included, and of the steps."""
    found = hashlib.sha256(plan.digest.encode())
    found.update(program.graph_module.code.encode())
    for name, value in sorted(program.constants.items()):
        if isinstance(value, torch.Tensor):
            found.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            found.update(bits_of(value).cpu().numpy().data)
    return found.hexdigest()[:16]


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor's values, in order, as uint8 on its device; without a copy where they lie so."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def versions(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return how often each tensor was written to, and which those are that cannot tell."""
    return tuple(-1 if tensor.is_inference() else tensor._version for tensor in tensors)
