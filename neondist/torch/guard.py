"""Checks of `--debug-halo` in a module: errors of users' rules and border schemes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..errors import HaloError
from .graph import IN_PLACE, Step, Value, autocast


def guarded(
    rank: int,
    run: Callable[[Step, list[torch.Tensor]], Sequence[torch.Tensor]],
    values: Sequence[Value],
    step: Step,
    tensors: list[torch.Tensor],
) -> Sequence[torch.Tensor]:
    """Run a step; raise HaloError if it writes into what it is given, or gives another part than its rule has said.

    Parameters
    ----------
    run : callable
        What runs it.
    values : sequence of Value
        Those of the plan.
    """
    before = [tensor.detach().clone() for tensor in tensors]
    found = run(step, tensors)
    if step.run not in IN_PLACE.values():  # those write to memory without other readers
        for at, (tensor, copy) in enumerate(zip(tensors, before, strict=True)):
            if not _is_alike(tensor.detach(), copy):
                raise _problem(
                    rank, step, f"modified its argument {at} in place, which others may read; work on a copy"
                )
    for at, (tensor, value) in enumerate(zip(found, (values[out] for out in step.outputs), strict=True)):
        dtype = tensor.dtype if any(autocast()) else value.dtype
        if (tuple(tensor.shape), tensor.dtype) != (value.local, dtype):
            raise _problem(
                rank,
                step,
                f"returned {tensor.dtype} of shape {tuple(tensor.shape)} as result {at}, but its rule declares"
                f" {value.dtype} of"
                f" shape {value.local} on this rank",
            )
    return found


def _is_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors hold the same numbers, NaN where the other has it included."""
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def _problem(rank: int, step: Step, what: str) -> HaloError:
    return HaloError(f"rank {rank}: step '{step.name}', forward: {what}")
