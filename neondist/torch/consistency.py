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
"""By so much, relative to absolute values, sums over weights may differ: processors round in several ways."""


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

    One number is compared, made of sums over each tensor. Gradients are those of all ranks: what differs is how each
    rank has updated.
    """
    tensors = {name: p.detach() for name, p in parameters.items() if p.is_floating_point() and not p.is_meta}
    if world.size == 1 or not tensors:
        return
    sums = [torch.stack([p.sum(dtype=torch.float64), p.abs().sum(dtype=torch.float64)]) for p in tensors.values()]
    totals, sizes = torch.stack([pair.cpu() for pair in sums]).numpy().T
    sizes = np.maximum(sizes, np.finfo(float).tiny)
    factors = 1 + np.sqrt(np.arange(1, len(sizes) + 1)) % 1  # so that two tensors do not make up for each other
    number = factors @ (totals / sizes + np.log(sizes))
    ends = np.array([number, -number])
    world.allreduce(ends, "max")
    if ends.sum() > DRIFT:
        every = np.array(world.allgather(totals.tolist()))
        apart = np.abs(every - every[0]).max(0) / sizes
        at = int(apart.argmax())
        rank = int(np.abs(every[:, at] - every[0, at]).argmax())
        raise ConfigError(
            f"rank {rank}: after {step} steps the sum of {list(tensors)[at]!r} is {every[rank, at]:.6g}, but"
            f" {every[0, at]:.6g} on rank 0; update the weights alike on all ranks, with the same optimiser settings"
            " and state_dict"
        ).on_all_ranks()
