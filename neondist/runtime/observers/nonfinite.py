"""Search for the first non-finite value in a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...arrays.precision import LossScaler
from ...comm import ProcessGrid, Transport
from ...errors import NonFiniteError
from ...layers import Layer
from ...observer import Observer
from ...parallel import are_all_finite
from ...system.lazy import LazyTile

NONFINITE_REMEDY = "lower the learning rate, check the data, or set nonfinite to skip"
MAX_CONSECUTIVE_SKIPS = 100  # maximum number of consecutive skipped steps


@dataclass
class NonFiniteMonitor:
    """Record of the last skipped step and of the number of consecutive skips.

    Attributes
    ----------
    last_skipped_step, consecutive_skips : int
        Number of the last skipped step, from 0 (-1: none), and number of consecutive steps skipped so far.
    nonfinite_value : str
        Description of the value that caused the last skip.
    """

    last_skipped_step: int = -1
    nonfinite_value: str = ""
    consecutive_skips: int = 0

    def record_step_finiteness(self, step: int, policy: str, where: str | None) -> None:
        """Record a step and its non-finite value, if any; raise NonFiniteError if the run must stop."""
        if where is None:
            self.consecutive_skips = 0
            return
        self.last_skipped_step, self.nonfinite_value, self.consecutive_skips = step, where, self.consecutive_skips + 1
        error = NonFiniteError(f"step {step + 1}: first non-finite value: {where}; {NONFINITE_REMEDY}")
        if self.consecutive_skips > MAX_CONSECUTIVE_SKIPS:
            error = NonFiniteError(
                f"step {step + 1}: the last {MAX_CONSECUTIVE_SKIPS} steps were skipped; first non-finite value:"
                f" {where}; lower the learning rate, or check the data"
            )
        if policy == "stop" or self.consecutive_skips > MAX_CONSECUTIVE_SKIPS:
            raise error.mark_raised_on_all_ranks()

    def record_skip_by_overflow(self, step: int, scaler: LossScaler) -> None:
        """Record a step skipped because 16-bit gradients overflow, and lower the loss scale."""
        scaler.update(overflow=True)
        self.last_skipped_step = step
        self.nonfinite_value = f"the gradients in float16; the loss scale is {scaler.scale:g} from now on"


class _FinitenessLog(Observer):
    """Log of the finiteness of values, in the order of a step."""

    def __init__(self) -> None:
        self.nonfinite_by_name: dict[str, bool] = {}

    def record(self, name: str, array: Any) -> None:
        """Record whether an array has non-finite values."""
        self.nonfinite_by_name[name] = self.nonfinite_by_name.get(name, False) or (
            array is not None and not are_all_finite(array)
        )

    def on_value(self, layer: Layer | None, name: str, array: Any) -> None:
        self.record(f"the {name}" if layer is None else f"the {name} of layer '{layer.name}'", array)


def find_first_nonfinite(grid: ProcessGrid, x: Any, recompute: Callable[[], object]) -> str:
    """Rerun a step's passes by `recompute`, and return the name of the first non-finite value. Collective."""
    log = _FinitenessLog()
    with np.errstate(all="ignore"), grid.observers.add_temporarily(log):
        if not isinstance(x, LazyTile):
            log.record("the images", x)
        recompute()
    name = first_nonfinite_on_any_rank(grid.world, log.nonfinite_by_name)
    return name or "the sum of the cost or the gradients over all ranks"


def first_nonfinite_on_any_rank(world: Transport, nonfinite_by_name: dict[str, bool]) -> str | None:
    """Return the first name of a non-finite value; names must be in the same order on all ranks. Collective."""
    flags_of_ranks = world.allgather(list(nonfinite_by_name.values()))
    for name, flags in zip(nonfinite_by_name, zip(*flags_of_ranks, strict=True), strict=True):
        ranks = [str(rank) for rank, bad in enumerate(flags) if bad]
        if ranks:
            suffix = f" on rank{'s'[: len(ranks) > 1]} {', '.join(ranks[:4])}{' ...' if len(ranks) > 4 else ''}"
            return name + suffix * (world.size > 1)
    return None
