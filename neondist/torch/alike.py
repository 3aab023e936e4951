"""That all ranks are about to do the same: one small message before each pass, so that none waits for ever."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..comm.agree import agree
from ..comm.transport import Transport
from ..errors import ConfigError


def check_alike(
    world: Transport, facts: Mapping[str, Any], error: Exception | None = None, versions: Sequence[int] = ()
) -> bool:
    """Raise on all ranks if any has an error, or if one says other facts than rank 0; collective.

    Parameters
    ----------
    facts : dict of name to value
        What all ranks must say alike; values are compared as text.
    error : Exception, optional
        Of this rank.
    versions : sequence of int
        Numbers that may differ: whether all have the same is returned.
    """
    if world.size == 1:
        if error is not None:
            raise error
        return True
    said = {name: str(value) for name, value in facts.items()}
    digest = hashlib.sha256(repr((said, tuple(versions))).encode()).digest()
    number = int.from_bytes(digest[:7], "little")
    ends = np.array([number, -number] if error is None else [2**62, 2**62])
    world.allreduce(ends, "max")
    if ends[0] == -ends[1]:
        return True
    agree(world, error)
    every = world.allgather(said)
    for rank, other in enumerate(every):
        for name in (*every[0], *other):
            if every[0].get(name) != other.get(name):
                raise ConfigError(
                    f"rank {rank}: {name} is {_short(other.get(name))}, but {_short(every[0].get(name))} on rank 0;"
                    " every rank has to do the same"
                ).on_all_ranks()
    return False


def _short(value: str | None) -> str:
    if value is None:
        return "not there"
    return value if len(value) < 120 else f"{value[:50]}...{value[-50:]}"


def digest_of(plan: Any, program: Any) -> str:
    """Return a hash of what is computed, constants included, and of the steps."""
    found = hashlib.sha256(plan.digest.encode())
    found.update(program.graph_module.code.encode())
    for name, value in sorted(program.constants.items()):
        if isinstance(value, torch.Tensor):
            found.update(name.encode() + repr(value.tolist() if value.numel() < 1000 else tuple(value.shape)).encode())
    return found.hexdigest()[:16]


def versions(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return how often each tensor was written to, and which those are that cannot tell."""
    return tuple(-1 if tensor.is_inference() else tensor._version for tensor in tensors)
