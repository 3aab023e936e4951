"""Convolution with unshared weights."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from ..errors import ConfigError
from ..geometry import Window
from ..initializers import FanInUniform, Initializer
from ..schemes import Scheme
from .base import Dist, Layer, Parameter, Shape
from .functions import Activation


class LocalFilteringLayer(Layer):
    """Every output cell has a filter of its own (Le et al. 2012, "untied weights").

    Input (N, *spatial, C), output (N, *spatial', out_channels), both local. Parameter 'weights' (*spatial', *kernel, C,
    out_channels): each rank keeps the part of its own output tile alone, and gradients are not summed over tiles.

    Parameters
    ----------
    out_channels : int
    kernel_size, stride : int or one per axis
    padding : int, one per axis, or ((before, after), ...) per axis
    bias : bool
        Adds 'bias' (*spatial', out_channels), unshared too.
    activation : Activation, optional
    weights_init : Initializer, optional
        Default FanInUniform.
    scheme : Scheme or str, optional
        How cells of other tiles reach a view, such as 'tower' or Tower(fill='reflect'); default what the model says.
    """

    window: Window

    def __init__(
        self,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[Any] = 0,
        bias: bool = False,
        activation: Activation | None = None,
        name: str | None = None,
        weights_init: Initializer | None = None,
        scheme: Scheme | str | None = None,
    ) -> None:
        super().__init__(name, scheme)
        if out_channels < 1:
            raise ConfigError(f"out_channels {out_channels}: needs at least 1")
        self.out_channels, self.kernel_size, self.stride, self.padding = out_channels, kernel_size, stride, padding
        self.bias, self.activation, self.weights_init = bias, activation, weights_init or FanInUniform()

    def window_for(self, input_shape: Shape) -> Window:
        """Return the window."""
        return Window(self.kernel_size, self.stride, self.padding, ndim=len(input_shape) - 1)

    def channels_for(self, input_shape: Shape) -> int:
        """Return out_channels."""
        return self.out_channels

    def parameters_for(self, input_shape: Shape) -> dict[str, Parameter]:
        """Return 'weights' and 'bias', both cut like the output."""
        window, channels = self.window_for(input_shape), input_shape[-1]
        out = window.output_extent(input_shape[:-1])
        fan_in, fan_out = prod(window.kernel) * channels, prod(window.kernel) * self.out_channels
        shape = (*out, *window.kernel, channels, self.out_channels)
        found = {"weights": Parameter(shape, self.weights_init, fan_in, fan_out, tiled=True)}
        return found | ({"bias": Parameter((*out, self.out_channels), tiled=True)} if self.bias else {})

    def forward(self, view: Any) -> Any:
        """Return every cell's filter on its window."""
        self.view = view
        y = self.kernels.local_forward(view, self.params["weights"], self.window.stride)
        if self.bias:
            y += self.params["bias"]
        return y

    def backward(self, dy: Any) -> Any:
        """Return the gradient of the view; fill those of this tile's weights."""
        weights, stride = self.params["weights"], self.window.stride
        self.grads["weights"] = self.kernels.local_backward_weights(self.view, dy, weights, stride)
        if self.bias:
            self.grads["bias"] = dy.sum(axis=0)
        return self.kernels.local_backward_input(dy, weights, self.view.shape[1:-1], stride)


class LocalFilteringLayerDist(Dist, LocalFilteringLayer):
    """Unshared convolution over tiles; each rank stores the weights of its own tile."""
