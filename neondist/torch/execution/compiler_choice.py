"""Choice by measurement of whether to compile the computation between messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import torch

from ...comm import Transport
from ..capture.tracing import leave_inference_mode
from ..ir.autocast import disable_autocast
from ..ir.graph import TorchGraph, Value

_ASSUMED_TRAINING_STEPS = 1000
_REPETITIONS = 3


def compilation_pays_off(
    plan: TorchGraph, compiler: Callable[..., Any], world: Transport, device: torch.device
) -> bool:
    """Return whether 1,000 training steps, including compilation, would take less time compiled. Collective.

    Each group of consecutive local steps is timed, forward and backward, on tensors of its shapes. Only the slowest
    group of each rank is compiled: its speedup is assumed for all, and its compilation time for each. Times are summed
    over the ranks, so all ranks decide alike; ranks without cells may have fewer groups than others.
    """
    rank_seconds = world.allgather(_time_groups(plan, compiler, device))
    total, slowest, compiled, compilation = (sum(seconds) for seconds in zip(*rank_seconds, strict=True))
    saved_in_slowest = slowest - compiled
    return saved_in_slowest > 0 and total * saved_in_slowest / slowest * _ASSUMED_TRAINING_STEPS > compilation


def _time_groups(
    plan: TorchGraph, compiler: Callable[..., Any], device: torch.device
) -> tuple[float, float, float, float]:
    """Return seconds of this rank: of all groups, of the slowest before and after compilation, and to compile all."""
    functions = set[Callable[..., Any]]()

    def keep_uncompiled(run: Callable[..., Any]) -> Callable[..., Any]:
        functions.add(run)
        return run

    segments = plan.executed_segments(keep_uncompiled)
    groups = [
        (step.run, [plan.values[value] for value in step.inputs])
        for segment in segments
        for step in segment.steps
        if step.run in functions
    ]
    if not groups:
        return 0.0, 0.0, 0.0, 0.0
    seconds = [(_time_passes(*group, device) or (0.0, 0.0))[1] for group in groups]
    slowest = max(range(len(groups)), key=seconds.__getitem__)
    run, inputs = groups[slowest]
    first_pass, later_pass = _time_passes(compiler(run), inputs, device) or (inf, inf)
    return sum(seconds), seconds[slowest], later_pass, first_pass * len(groups)


def _time_passes(
    run: Callable[..., Any] | None, inputs: Sequence[Value], device: torch.device
) -> tuple[float, float] | None:
    """Return the seconds of the first forward and backward pass of local steps, and of the fastest pass after it.

    The result is None if a pass fails, as for a matrix that is not positive definite, or without a C++ compiler, or if
    there is not enough memory.
    """
    assert run is not None
    generator = torch.Generator(device)  # PyTorch's own continues with the same numbers on every rank
    seconds = list[float]()
    with leave_inference_mode(), disable_autocast(), torch.enable_grad():
        try:
            tensors = [torch.zeros(value.local, dtype=value.dtype, device=device) for value in inputs]
            for tensor, value in zip(tensors, inputs, strict=True):
                if tensor.is_floating_point():
                    tensor.uniform_(0.5, 1, generator=generator).requires_grad_(value.kind != "constant")
            sources = [tensor for tensor in tensors if tensor.requires_grad]
            for _ in range(1 + _REPETITIONS):
                copies = [tensor.clone() for tensor in tensors]  # steps may overwrite their inputs
                _synchronise(device)
                start = time.perf_counter()
                outputs = [y for y in run(*copies) if y.requires_grad]
                if outputs:
                    torch.autograd.grad(outputs, sources, [torch.ones_like(y) for y in outputs], allow_unused=True)
                _synchronise(device)
                seconds.append(time.perf_counter() - start)
        except Exception:  # of any operator or compiler
            return None
    return seconds[0], min(seconds[1:])


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
