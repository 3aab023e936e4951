"""An activation function as a layer of its own."""

from __future__ import annotations

from typing import Any

from .base import Dist, Layer
from .context import StepContext
from .functions import Activation
from .layout import declared_with


class ActivationLayer(Layer):
    """Applies `activation` to every cell: input and output (N, *spatial, C), local."""

    saves_input = saves_output = False
    extra_saves = (0, 0)
    only_activates = True

    def __init__(self, activation: Activation, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self.activation = activation

    def forward(self, ctx: StepContext, view: Any) -> Any:
        """Return a copy activated in place, or the activation of the view without modifying it."""
        y = ctx.out
        if declared_with(self.activation, "clips", "fprop"):
            ctx.activate(view, y)
            ctx.save(y=None if ctx.cleared else y)
        else:
            self.kernels.copy(view, y)
        return y

    def backward(self, ctx: StepContext, dy: Any) -> Any:
        """Return dy, already multiplied by the activation's gradient where `forward` left that to another layer."""
        return self.kernels.relu_backward(ctx.y, dy, ctx.out) if ctx.activated and not ctx.cleared else dy


class ActivationLayerDist(Dist, ActivationLayer):
    """An activation over tiles."""
