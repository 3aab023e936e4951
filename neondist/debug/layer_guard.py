"""A decorator of one layer: it sees nothing but its view, writes nothing but its outputs, and is named if it does."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..comm import Transport
from ..errors import HaloError
from ..layers import Layer
from .array_guard import ArrayGuard
from .mark import mark, marked
from .shadow import Shadow, shadow_of


def guard_layer(layer: Layer, tiles: Transport) -> None:
    """Guard a layer, whose messages `tiles` carries; what is guarded already stays so."""
    guard = vars(layer).get("halo_guard") or LayerGuard(layer)
    for array in layer.arrays:
        if array not in [known.array for known in guard.arrays]:
            guard.arrays.append(ArrayGuard(array, tiles, guard.problem))


class LayerGuard:
    """Stands before `forward` and `backward` of one layer, and before what it may use."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.arrays: list[ArrayGuard] = []
        self.dy: Shadow | None = None
        self._forward, self._backward = layer.forward, layer.backward
        self._new_output, self._new_dview = layer.new_output, layer.new_dview
        vars(layer).update(
            halo_guard=self,
            forward=self.forward,
            backward=self.backward,
            new_output=lambda samples: _fresh(self._new_output(samples)),
            new_dview=lambda samples: _fresh(self._new_dview(samples)),
        )

    def forward(self, view: Any) -> Any:
        """Return the layer's outputs."""
        y = self._forward(view)
        self._check_views("forward", "wrote into its view; work on a copy")
        self._check_marks("forward", "outputs", y)
        return y

    def backward(self, dy: Any) -> Any:
        """Return the layer's gradient of the view."""
        self._check_views("backward", "finds that its view has been written to since its forward; work on a copy")
        self.dy = shadow_of(dy, self.dy)
        dview = self._backward(self.dy.array)
        if self.dy.changed:
            raise self.problem("backward", "wrote into the gradient of its outputs; work on a copy")
        self._check_views("backward", "wrote into its view; work on a copy")
        for name, gradient in self.layer.grads.items():
            self._check_marks("backward", f"gradients of '{name}'", gradient)
        if dview is not None:
            self._check_marks("backward", "gradients of its view", dview)
        return dview

    def problem(self, direction: str, what: str) -> HaloError:
        """Return the error that names the layer, the direction and the step."""
        layer = self.layer
        kind, step = type(layer).__name__, layer.input.border.phase.step
        error = HaloError(f"layer '{layer.name}' ({kind}), {direction}, step {step}: {what}")
        error.subject = layer
        return error

    def _check_views(self, direction: str, what: str) -> None:
        if any(guard.changed for guard in self.arrays):
            raise self.problem(direction, what)

    def _check_marks(self, direction: str, what: str, array: Any) -> None:
        found = marked(array)
        if found.any():
            raise self.problem(
                direction,
                f"{found.sum()} of its {what} were computed from cells beyond what it was given, or never written, the"
                f" first at index {tuple(map(int, np.argwhere(found)[0]))}; its window may be too small",
            )


def _fresh(array: Any) -> Any:
    mark(array)
    return array
