"""An activation function as a layer of its own."""

from __future__ import annotations

from typing import Any

from .base import Dist, Layer
from .context import StepContext
from .functions import Activation
from .layout import declared_with


class ActivationLayer(Layer):
    """Activation function of every cell; input and output (N, *spatial, C) per tile."""

    saves_input = saves_output = False
    saved_bytes_and_elements = (0, 0)
    is_activation_only = True

    def __init__(self, activation: Activation, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self.activation = activation

    def forward(self, ctx: StepContext, view: Any) -> Any:
        """Return the activated view; without a fused kernel, a copy, which the executor activates."""
        y = ctx.out
        if declared_with(self.activation, "is_relu", "fprop"):
            ctx.activate(view, y)
            ctx.save(y=None if ctx.relu_gradient_left_to_next_layer else y)
        else:
            self.kernels.copy(view, y)
        return y

    def backward(self, ctx: StepContext, dy: Any) -> Any:
        """Return the gradient of the view: dy if the executor or the next layer applies the activation's gradient."""
        applies_gradient = ctx.activated and not ctx.relu_gradient_left_to_next_layer
        return self.kernels.relu_backward(ctx.y, dy, ctx.out) if applies_gradient else dy


class ActivationLayerDist(Dist, ActivationLayer):
    """Activation over tiles."""
