"""Changes of a module between its passes, as far as what its steps are depends on them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..comm import Transport
from ..errors import ConfigError

DRIFT = 1e-4
"""By so much of the sum of a tensor's absolute values ranks may differ: processors of several kinds round otherwise."""


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


def check_drift(world: Transport, parameters: Mapping[str, torch.Tensor], step: int) -> None:
    """Raise ConfigError on all ranks if they have come to have different weights; collective.

    Sums over each tensor are compared. Gradients are those of all ranks: what differs is how each rank has updated.
    """
    tensors = {name: p.detach() for name, p in parameters.items() if p.is_floating_point() and not p.is_meta}
    if world.size == 1 or not tensors:
        return
    sums = [torch.stack([p.sum(dtype=torch.float64), p.abs().sum(dtype=torch.float64)]) for p in tensors.values()]
    mine = torch.stack(sums).cpu().numpy()
    ends = np.concatenate([mine, -mine]).reshape(-1)
    world.allreduce(ends, "max")
    largest, smallest = ends.reshape(2, -1, 2) * [[[1.0]], [[-1.0]]]
    apart = (largest - smallest > DRIFT * np.abs(largest[:, 1:])).any(1)
    if apart.any():
        at = int(apart.argmax())
        every = world.allgather(float(mine[at, 0]))
        rank = max(range(world.size), key=lambda other: abs(every[other] - every[0]))
        raise ConfigError(
            f"rank {rank}: after {step} steps the sum of {list(tensors)[at]!r} is {every[rank]:.6g}, but {every[0]:.6g}"
            " on rank 0; update the weights alike on all ranks, with the same optimiser settings and state_dict"
        ).on_all_ranks()
