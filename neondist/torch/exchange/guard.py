"""Runtime checks of users' rules in a module, for `--debug-halo`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...errors import HaloError
from ..ir.autocast import autocast_dtypes
from ..ir.graph import IN_PLACE_VARIANTS, Step, Value


def run_step_with_checks(
    rank: int,
    run: Callable[[Step, list[torch.Tensor]], Sequence[torch.Tensor]],
    values: Sequence[Value],
    step: Step,
    tensors: list[torch.Tensor],
) -> Sequence[torch.Tensor]:
    """Run a step; raise HaloError if it modifies its arguments or returns an undeclared shape or dtype."""
    originals = [tensor.detach().clone() for tensor in tensors]
    results = run(step, tensors)
    if step.run not in IN_PLACE_VARIANTS.values():  # no other step reads what in-place variants modify
        for index, (tensor, copy) in enumerate(zip(tensors, originals, strict=True)):
            if not _is_equal(tensor.detach(), copy):
                raise _step_check_error(
                    rank, step, f"modified its argument {index} in place, which other steps may read; modify a copy"
                )
    for index, (tensor, value) in enumerate(zip(results, (values[out] for out in step.outputs), strict=True)):
        dtype = tensor.dtype if any(autocast_dtypes()) else value.dtype
        if (tuple(tensor.shape), tensor.dtype) != (value.local, dtype):
            raise _step_check_error(
                rank,
                step,
                f"returned {tensor.dtype} of shape {tuple(tensor.shape)} as result {index}, but its rule declares"
                f" {value.dtype} of shape {value.local} on this rank",
            )
    return results


def _is_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have equal values, NaN included."""
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def _step_check_error(rank: int, step: Step, message: str) -> HaloError:
    return HaloError(f"rank {rank}: step '{step.name}', forward: {message}")
