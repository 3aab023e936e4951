"""Hashes of a module's program and weights, and checks that they agree on all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...comm import Transport
from ...errors import ConfigError
from .tracing import suspend_hooks_and_modes

MAX_RELATIVE_WEIGHT_DRIFT = 1e-4
"""Tolerance of sums of weights, relative to sums of absolute values, since rounding depends on the processor."""


def program_digest(plan: Any, program: Any) -> str:
    """Return a hash of a program, constants included, and of the steps of its plan."""
    digest = hashlib.sha256(plan.digest.encode())
    digest.update(program.graph_module.code.encode())
    for name, value in sorted(program.constants.items()):
        if isinstance(value, torch.Tensor):
            digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            digest.update(as_bytes_tensor(value).cpu().numpy().data)
    return digest.hexdigest()[:16]


def as_bytes_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor's values, in order, as uint8 on its device; a view if it is contiguous."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def version_counters(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return the version counter of each tensor; -1 for inference tensors, which have none."""
    return tuple(-1 if tensor.is_inference() else tensor._version for tensor in tensors)


@suspend_hooks_and_modes()  # modes must not see operators that only some passes run
def check_weight_drift(world: Transport, parameters: Mapping[str, torch.Tensor], step: int) -> None:
    """Raise ConfigError on all ranks if their weights have diverged. Collective.

    One number, computed from sums over each tensor, is compared. Gradients are reduced over all ranks, so weights
    diverge only through different updates.
    """
    tensors = {name: p.detach() for name, p in parameters.items() if p.is_floating_point() and not p.is_meta}
    if world.size == 1 or not tensors:
        return
    float_tensors = [p.float() if p.dtype.itemsize < 4 else p for p in tensors.values()]
    sums, norms = (
        torch.stack([value.double().cpu() for value in values]).numpy()
        for values in ([p.sum() for p in float_tensors], torch._foreach_norm(float_tensors, 1))
    )
    norms = np.maximum(norms, np.finfo(float).tiny)
    factors = 1 + np.sqrt(np.arange(1, len(norms) + 1)) % 1  # so that differences in two tensors do not cancel
    fingerprint = factors @ (sums / norms + np.log(norms))
    extremes = np.array([fingerprint, -fingerprint])
    world.allreduce(extremes, "max")
    if extremes.sum() > MAX_RELATIVE_WEIGHT_DRIFT:
        sums_by_rank = np.array(world.allgather(sums.tolist()))
        differences = np.abs(sums_by_rank - sums_by_rank[0]).max(0) / norms
        worst = int(differences.argmax())
        rank = int(np.abs(sums_by_rank[:, worst] - sums_by_rank[0, worst]).argmax())
        raise ConfigError(
            f"rank {rank}: after {step} steps the sum of {list(tensors)[worst]!r} is {sums_by_rank[rank, worst]:.6g},"
            f" but {sums_by_rank[0, worst]:.6g} on rank 0; update the weights identically on all ranks, with the same"
            " optimiser settings and state_dict"
        ).mark_raised_on_all_ranks()
