"""A training step of a PyTorch module: in one process, with torch.compile, or distributed over ranks."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean, median
from typing import Any, Literal

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..comm import ProcessGrid, Transport, all_or_none
from ..errors import ConfigError, NeondistError
from ..terminal.progress_line import ProgressLine, SilentProgress
from ..torch.module.distributing import distribute
from . import memory
from .module_profile import TimeShares, measure_time_shares
from .public_models import DEFAULT_EXTENTS
from .sleeping_barrier import sleeping_barrier
from .step import ROUND_SECONDS

LEARNING_RATE = 1e-6
"""small, because the loss with random targets would otherwise diverge to NaN"""


class TimedModuleStep:
    """A module that is trained on one batch with random targets: mean squared error, SGD with momentum.

    Parameters
    ----------
    variant : 'ranks', 'eager' or 'compile'
    factory : callable
        Returns the module.
    shape : (N, C, *spatial), optional
        Default: from the module's first convolution.
    world : Transport
        One rank, except for 'ranks'.
    compiled : bool or 'auto'
        For 'ranks': the option `compile` of `distribute`.

    Raises
    ------
    UserError
        The factory or its module fails, or the module cannot be distributed.
    """

    def __init__(
        self,
        variant: str,
        factory: Callable[[], Any],
        shape: Sequence[int] | None,
        world: Transport,
        compiled: bool | Literal["auto"] = False,
    ) -> None:
        self.grid = ProcessGrid(world)
        with all_or_none(world):
            torch.manual_seed(0)
            module = _create_module(factory)
            self.shape = tuple(shape or default_shape(module))
            image = torch.randn(self.shape)
        self.executed_module: Any = torch.compile(module) if variant == "compile" else module
        self.optimizer = torch.optim.SGD(module.parameters(), LEARNING_RATE, momentum=0.9)
        self.compute_loss: Any = _mean_square
        self.scatter_target: Any = lambda tensor: tensor
        self.targets: list[torch.Tensor] = []
        begin = time.perf_counter()
        if variant == "ranks":
            self.executed_module = distribute(module, self.shape, self.grid, compile=compiled)
            image = self.executed_module.scatter(image)
            self.compute_loss = partial(self.executed_module.loss, _mean_square)
            self.scatter_target = self.executed_module.scatter_target
        self.x = image
        with all_or_none(world):
            self._run_first_step()
        self.first_step_seconds = time.perf_counter() - begin

    def __call__(self) -> None:
        """Run one training step."""
        self.optimizer.zero_grad(set_to_none=True)
        self.compute_loss(flatten_output_tensors(self.executed_module(self.x)), self.targets).backward()
        self.optimizer.step()

    def _run_first_step(self) -> None:
        try:
            outputs = flatten_output_tensors(self.executed_module(self.x))
            source = torch.Generator().manual_seed(1)
            shapes = getattr(self.executed_module, "output_shapes", [y.shape for y in outputs])
            self.targets = [self.scatter_target(torch.randn(tuple(shape), generator=source)) for shape in shapes]
            self.compute_loss(outputs, self.targets).backward()
        except NeondistError:
            raise
        except Exception as error:  # from the module or a compiler
            lines = str(error).strip().splitlines() or [""]
            raise ConfigError(
                f"a training step for an input of {'×'.join(map(str, self.shape))} failed: {type(error).__name__}:"
                f" {lines[0]}; give the input shape that the module expects with --input N,C,H,W"
            ) from error
        self.optimizer.step()

    def time_steps(self, steps: int, progress: ProgressLine) -> list[float]:
        """Return the seconds of each step, of the slowest rank. Collective."""
        taken = []
        sleeping_barrier(self.grid.world)
        for _ in range(steps):
            begin = time.perf_counter()
            self()
            taken.append(time.perf_counter() - begin)
            progress.add_done_parts(1)
        return [max(times) for times in zip(*self.grid.world.allgather(taken), strict=True)]

    def time_shares(self) -> TimeShares:
        """Return the breakdown of a step's time, the mean over the ranks. Collective."""
        sleeping_barrier(self.grid.world)
        by_rank = self.grid.world.allgather(measure_time_shares(self, self.grid))
        kinds, operators = ([shares[name] for shares in by_rank] for name in ("kinds", "operators"))
        means = {name: fmean(shares.get(name, 0.0) for shares in operators) for names in operators for name in names}
        return {
            "kinds": {kind: fmean(shares[kind] for shares in kinds) for kind in kinds[0]},
            "operators": dict(sorted(means.items(), key=lambda item: -item[1])),
        }


def measure_module(
    variant: str,
    factory: Callable[[], Any],
    shape: Sequence[int] | None,
    world: Transport,
    steps: int,
    compiled: bool | Literal["auto"] = False,
    profile: bool = False,
    progress: ProgressLine | None = None,
) -> dict[str, Any]:
    """Return the measurement of one turn of `bench_suite`; every rank gets the same result. Collective.

    Parameters
    ----------
    steps : int
        Minimum number of timed steps, which follow two steps that are not timed.
    profile : bool
        Add the breakdown of the time of one more step.
    progress : ProgressLine, optional
        On rank 0: counts the steps after the first one, which may include compilation.
    variant, factory, shape, world, compiled : as for TimedModuleStep
    """
    empty_bytes = memory.resident_bytes()
    memory.reset_peak_memory()
    step = TimedModuleStep(variant, factory, shape, world, compiled)
    progress = progress or SilentProgress()
    progress.set_total_parts(1 + steps + profile)
    (step_seconds,) = step.time_steps(1, progress)
    count = max(steps, round(ROUND_SECONDS / step_seconds))
    progress.change_parts(1 + count + profile)
    taken = step.time_steps(count, progress)
    peaks = world.allgather(memory.peak_bytes() - empty_bytes)
    details: dict[str, Any] = {"first_seconds": max(world.allgather(step.first_step_seconds))}
    if profile:
        details |= step.time_shares()
    return {
        "seconds": median(taken), "peak_bytes": max(peaks), "details": details, "batch_size": step.shape[0],
        "sample_shape": list(step.shape[1:]),
    }  # fmt: skip


def forward_flops(factory: Callable[[], Any], shape: Sequence[int] | None) -> float:
    """Return the number of floating-point operations of a forward pass, counted without computing; 0 if unknown."""
    from torch.utils.flop_counter import FlopCounterMode

    with warnings.catch_warnings(), contextlib.suppress(Exception), torch.device("meta"), torch.no_grad():
        warnings.simplefilter("ignore")
        module = factory()
        image = torch.empty(tuple(shape or default_shape(module)))
        with FlopCounterMode(display=False) as counter:
            module(image)
        return float(counter.get_total_flops())
    return 0.0


def default_shape(module: nn.Module) -> tuple[int, ...]:
    """Return an input shape that fits the module's first convolution."""
    part: Any
    for part in module.modules():
        if hasattr(part, "in_channels") and hasattr(part, "dilation"):
            return (1, part.in_channels, *DEFAULT_EXTENTS[len(part.dilation)])
    raise ConfigError(f"{type(module).__name__} has no convolution to infer the input shape from; give --input N,C,H,W")


def _create_module(factory: Callable[[], Any]) -> nn.Module:
    try:
        module = factory()
    except Exception as error:
        name = getattr(factory, "__name__", "the factory")
        text = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{name} failed: {text}; give a factory without required arguments") from error
    if not isinstance(module, nn.Module):
        raise ConfigError(f"the factory returned a {type(module).__name__}; it must return a torch.nn.Module")
    return module.float().train()


def flatten_output_tensors(outputs: Any) -> list[torch.Tensor]:
    """Return the tensors among the outputs."""
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


def _mean_square(outputs: list[torch.Tensor], targets: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([((y - t) ** 2).mean() for y, t in zip(outputs, targets, strict=True)]).sum()
