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
"""Steps in a row that may be skipped."""


@dataclass
class NonFiniteMonitor:
    """The step that was skipped last.

    Attributes
    ----------
    step : its number, from 0; -1: none was
    where : what was not finite, in words
    in_a_row : how many were skipped up to now
    """

    step: int = -1
    where: str = ""
    in_a_row: int = 0

    def after_step(self, step: int, nonfinite: str, where: str | None) -> None:
        """Take note of a step, and of what was not finite in it; raise NonFiniteError if the run must not go on."""
        if where is None:
            self.in_a_row = 0
            return
        self.step, self.where, self.in_a_row = step, where, self.in_a_row + 1
        error = NonFiniteError(f"step {step + 1}: not finite: {where} first; {REMEDY}")
        if self.in_a_row > PATIENCE:
            error = NonFiniteError(
                f"step {step + 1}: the last {PATIENCE} steps were skipped; not finite: {where} first"
            )
        if nonfinite == "stop" or self.in_a_row > PATIENCE:
            raise error.on_all_ranks()

    def overflowed(self, step: int, scaler: LossScaler) -> None:
        """Take note of a step that is skipped since gradients of 16 bits overflow; the scale is lower for the next."""
        scaler.update(overflow=True)
        self.step, self.where = step, f"the gradients in float16; the loss scale is {scaler.scale:g} from now on"


class SchemeMemory:
    """State of border schemes before a step, restored if the step is skipped.

    Parameters
    ----------
    layers : sequence of Layer
    kept : bool
        False: nothing is kept, and nothing put back.
    """

    def __init__(self, layers: Sequence[Layer], kept: bool) -> None:
        arrays = [array for layer in layers for array in layer.arrays] if kept else []
        self.arrays = [(array, array.remembered()) for array in arrays]

    def put_back(self) -> None:
        """Let the schemes forget everything since; collective."""
        for array, memory in self.arrays:
            array.remember(memory)


class _Finite(Observer):
    """Takes note of what is finite, in the order of a step."""

    def __init__(self) -> None:
        self.notes: dict[str, bool] = {}

    def note(self, what: str, array: Any) -> None:
        """Look at an array."""
        self.notes[what] = self.notes.get(what, False) or (array is not None and not finite(array))

    def value(self, layer: Layer | None, name: str, array: Any) -> None:
        """Look at an array of a layer, or at the cost."""
        self.note(f"the {name}" if layer is None else f"the {name} of layer '{layer.name}'", array)


def locate(grid: ProcessGrid, x: Any, again: Callable[[], object]) -> str:
    """Return in words what first is not finite while the gradients are computed `again`; collective."""
    found = _Finite()
    with np.errstate(all="ignore"), grid.observers.watched_by(found):
        if not isinstance(x, LazyTile):
            found.note("the images", x)
        again()
    return first(grid.world, found.notes) or "the sum of the cost or the gradients over all ranks"


def first(world: Transport, notes: dict[str, bool]) -> str | None:
    """Return the first of the notes, made in the same order on all ranks, that is bad on a rank; collective."""
    found = world.allgather(list(notes.values()))
    for what, everywhere in zip(notes, zip(*found, strict=True), strict=True):
        ranks = [str(rank) for rank, bad in enumerate(everywhere) if bad]
        if ranks:
            on = f" on rank{'s'[: len(ranks) > 1]} {', '.join(ranks[:4])}{' ...' if len(ranks) > 4 else ''}"
            return what + on * (world.size > 1)
    return None
