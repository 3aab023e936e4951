"""Search for the first non-finite value in a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...arrays.precision import LossScaler
from ...comm import ProcessGrid, Transport
from ...errors import NonFiniteError
from ...layers import Layer
from ...observer import Observer
from ...parallel import finite
from ...system.lazy import LazyTile

REMEDY = "lower the learning rate, check the data, or set nonfinite: skip"
PATIENCE = 100
"""Maximum number of consecutive skipped steps."""


@dataclass
class NonFiniteMonitor:
    """The last skipped step.

    Attributes
    ----------
    step : its number, from 0; -1: none
    where : description of the non-finite value
    consecutive : number of consecutive skipped steps
    """

    step: int = -1
    where: str = ""
    consecutive: int = 0

    def after_step(self, step: int, nonfinite: str, where: str | None) -> None:
        """Record a step and its non-finite value, if any; raise NonFiniteError if the run must stop."""
        if where is None:
            self.consecutive = 0
            return
        self.step, self.where, self.consecutive = step, where, self.consecutive + 1
        error = NonFiniteError(f"step {step + 1}: not finite: {where} first; {REMEDY}")
        if self.consecutive > PATIENCE:
            error = NonFiniteError(
                f"step {step + 1}: the last {PATIENCE} steps were skipped; not finite: {where} first"
            )
        if nonfinite == "stop" or self.consecutive > PATIENCE:
            raise error.on_all_ranks()

    def overflowed(self, step: int, scaler: LossScaler) -> None:
        """Record a step skipped because 16-bit gradients overflow, and lower the loss scale."""
        scaler.update(overflow=True)
        self.step, self.where = step, f"the gradients in float16; the loss scale is {scaler.scale:g} from now on"


class SchemeMemory:
    """State of border schemes before a step, restored if the step is skipped.

    Parameters
    ----------
    layers : sequence of Layer
    kept : bool
        False: no state is saved or restored.
    """

    def __init__(self, layers: Sequence[Layer], kept: bool) -> None:
        arrays = [array for layer in layers for array in layer.arrays] if kept else []
        self.arrays = [(array, array.remembered()) for array in arrays]

    def restore(self) -> None:
        """Restore the state of the schemes; collective."""
        for array, memory in self.arrays:
            array.remember(memory)


class _FiniteLog(Observer):
    """Log of the finiteness of values, in the order of a step."""

    def __init__(self) -> None:
        self.notes: dict[str, bool] = {}

    def record(self, name: str, array: Any) -> None:
        """Record whether an array has non-finite values."""
        self.notes[name] = self.notes.get(name, False) or (array is not None and not finite(array))

    def value(self, layer: Layer | None, name: str, array: Any) -> None:
        """Record whether an array of a layer, or the cost, has non-finite values."""
        self.record(f"the {name}" if layer is None else f"the {name} of layer '{layer.name}'", array)


def locate(grid: ProcessGrid, x: Any, again: Callable[[], object]) -> str:
    """Return the name of the first non-finite value while `again` recomputes the gradients; collective."""
    log = _FiniteLog()
    with np.errstate(all="ignore"), grid.observers.watched_by(log):
        if not isinstance(x, LazyTile):
            log.record("the images", x)
        again()
    return first_nonfinite(grid.world, log.notes) or "the sum of the cost or the gradients over all ranks"


def first_nonfinite(world: Transport, notes: dict[str, bool]) -> str | None:
    """Return the first note that is bad on any rank; notes have the same order on all ranks; collective."""
    notes_of_ranks = world.allgather(list(notes.values()))
    for name, flags in zip(notes, zip(*notes_of_ranks, strict=True), strict=True):
        ranks = [str(rank) for rank, bad in enumerate(flags) if bad]
        if ranks:
            suffix = f" on rank{'s'[: len(ranks) > 1]} {', '.join(ranks[:4])}{' ...' if len(ranks) > 4 else ''}"
            return name + suffix * (world.size > 1)
    return None
