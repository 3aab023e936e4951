"""Where in a step a number first was not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..comm import Transport
from ..errors import NonFiniteError
from ..layers import Layer
from .wrapping import wrapped

if TYPE_CHECKING:
    from .autoencoder import Autoencoder
    from .model import Model

REMEDY = "lower the learning rate, look at the data, or set nonfinite: skip"
PATIENCE = 100
"""Steps in a row that may be skipped."""

Note = Callable[[str, Iterable[Any]], None]


@dataclass
class Trouble:
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
            error.agreed = True
            raise error


def finite(array: Any) -> bool:
    """Tell whether all numbers of an array are finite; one pass over it, if they are."""
    with np.errstate(all="ignore"):
        return bool(np.isfinite(array.sum())) or bool(np.isfinite(array).all())  # a sum of finite ones may overflow


class SchemeMemory:
    """What border schemes remember before a step, to be put back where the step is skipped.

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


def locate(model: Model, x: Any, targets: Any, batch: int) -> str:
    """Return in words where a step first meets what is not finite; it is run again, without an update; collective."""
    notes: list[tuple[str, bool]] = []

    def note(what: str, arrays: Iterable[Any]) -> None:
        notes.append((what, not all(finite(array) for array in arrays if array is not None)))

    with np.errstate(all="ignore"), wrapped(model.leaves, _noting(note)):
        note("the images", [x])
        y = model.fprop(x, training=True, batch_size=batch)
        local = model.local_targets(targets, batch)
        note("the cost", [np.array([model.cost.value(y, local, model.output.total)])])
        dy = model.cost.gradient(y, local, model.output.total)
        note("the gradient of the cost", [dy])
        model.fill_gradients((dy / batch).astype(model.dtype))
    return first(model.grid.world, notes) or "the sum of the gradients over all ranks"


def locate_in_stage(stage: Autoencoder, x: Any, batch: int) -> str:
    """Return the same for a step of pretraining; collective."""
    notes: list[tuple[str, bool]] = []

    def note(what: str, arrays: Iterable[Any]) -> None:
        notes.append((what, not all(finite(array) for array in arrays)))

    name, weights = stage.name, stage.layer.params.values()
    with np.errstate(all="ignore"), wrapped(stage.before.leaves, _noting(note)):
        note("the images", [x])
        y = stage.fprop(x, training=True)
        note(f"the weights of layer '{name}'", weights)
        note(f"the output of layer '{name}'", [stage.z])
        note(f"the reconstruction of the input of layer '{name}'", [y.residual])
        note(f"the cost of {stage}", [np.array([stage.cost.value(y)])])
        stage.bprop(y, 1 / batch)
        note(f"the gradients of the weights of layer '{name}'", stage.layer.grads.values())
    return first(stage.grid.world, notes) or f"the cost of {stage}"


def first(world: Transport, notes: list[tuple[str, bool]]) -> str | None:
    """Return the first of the notes, made in the same order on all ranks, that is bad on a rank; collective."""
    found = world.allgather([bad for _, bad in notes])
    for (what, _), everywhere in zip(notes, zip(*found, strict=True), strict=True):
        ranks = [str(rank) for rank, bad in enumerate(everywhere) if bad]
        if ranks:
            on = f" on rank{'s'[: len(ranks) > 1]} {', '.join(ranks[:4])}{' ...' if len(ranks) > 4 else ''}"
            return what + on * (world.size > 1)
    return None


def _noting(note: Note) -> Callable[[Layer, str, Any], Any]:
    """Return what makes of a layer's pass one that notes what it returns."""
    return lambda layer, name, method: (_forward if name == "fprop" else _backward)(layer, method, note)


def _forward(layer: Layer, fprop: Any, note: Note) -> Any:
    def watched(x: Any, phase: Any) -> Any:
        note(f"the weights of layer '{layer.name}'", layer.params.values())
        y = fprop(x, phase)
        note(f"the output of layer '{layer.name}'", [y])
        return y

    return watched


def _backward(layer: Layer, bprop: Any, note: Note) -> Any:
    def watched(dy: Any) -> Any:
        dx = bprop(dy)
        note(f"the gradients of the weights of layer '{layer.name}'", layer.grads.values())
        note(f"the gradient of the input of layer '{layer.name}'", [dx])
        return dx

    return watched
