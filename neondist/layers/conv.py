"""Convolution."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from ..errors import ConfigError
from ..geometry import GradientWindow, GridShape, Window, same_padding, total_halo_volume
from ..halo import ExchangePolicy
from ..initializers import FanInUniform, Initializer
from ..registry.ranges import Count
from ..terminal.console import counted
from .base import Dist, Layer, Parameter, Shape
from .context import StepContext
from .functions import Activation


class ConvLayer(Layer):
    """Convolution (cross-correlation) with shared weights.

    Input (N, *spatial, C), output (N, *spatial', out_channels), both local to this rank. Parameters 'weights'
    (*kernel, C / groups, out_channels) and 'bias' (out_channels,).

    Parameters
    ----------
    out_channels : int
    kernel_size, stride, dilation : int or one per axis
    padding : int, one per axis, ((before, after), ...) per axis, or 'same' (output extent ceil(extent / stride))
    groups : int
        Number of groups; must divide the input's channels and out_channels.
    bias : bool
    activation : Activation, optional
    padding_mode : {'zeros', 'reflect', 'replicate', 'wrap'}, or one per axis
        For example ['zeros', 'wrap'] for latitude and longitude on the globe.
    scheme : ExchangePolicy or str, optional
        Border scheme, such as 'tower' or Tower(fill='reflect'). Default: the scheme of the model.
    weights_init : Initializer, optional
        Default FanInUniform.
    """

    needs_image = tolerates_rounded_view = True
    fusible_activation_kind = "elementwise"
    can_apply_input_relu_gradient = in_place = True
    saves_output = False
    saved_bytes_and_elements = (0, 0)
    window: Window

    def __init__(
        self,
        out_channels: Count,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | str | Sequence[Any] = 0,
        dilation: int | Sequence[int] = 1,
        groups: Count = 1,
        bias: bool = True,
        activation: Activation | None = None,
        padding_mode: str | Sequence[str] = "zeros",
        scheme: ExchangePolicy | str | None = None,
        name: str | None = None,
        *,
        weights_init: Initializer | None = None,
    ) -> None:
        super().__init__(name=name, scheme=scheme)
        if out_channels % groups:
            raise ConfigError(f"groups {groups} must divide out_channels {out_channels}")
        if isinstance(padding, str) and padding != "same":
            raise ConfigError(f"padding '{padding}': expected integers, or 'same'")
        self.out_channels, self.kernel_size, self.stride = out_channels, kernel_size, stride
        self.padding, self.dilation, self.groups, self.bias = padding, dilation, groups, bias
        self.activation, self.padding_mode = activation, padding_mode
        self.weights_init = weights_init or FanInUniform()

    def window_for(self, input_shape: Shape) -> Window:
        """Return the window; padding 'same' depends on the extent."""
        ndim, padding = len(input_shape) - 1, self.padding
        if isinstance(padding, str):
            unpadded = Window(self.kernel_size, self.stride, 0, dilation=self.dilation, ndim=ndim)
            padding = same_padding(input_shape[:-1], unpadded.kernel, unpadded.stride, unpadded.dilation)
        return Window(self.kernel_size, self.stride, padding, dilation=self.dilation, mode=self.padding_mode, ndim=ndim)

    def output_channels_for(self, input_shape: Shape) -> int:
        """Return out_channels."""
        return self.out_channels

    def parameters_for(self, input_shape: Shape) -> dict[str, Parameter]:
        """Return 'weights' and 'bias'."""
        kernel, channels = self.window_for(input_shape).kernel, input_shape[-1]
        if channels % self.groups:
            raise ConfigError(f"groups {self.groups} must divide the input's {counted(channels, 'channel')}")
        shape = (*kernel, channels // self.groups, self.out_channels)
        fan_in, fan_out = prod(shape[:-1]), prod(kernel) * self.out_channels // self.groups
        parameters = {"weights": Parameter(shape, self.weights_init, fan_in, fan_out)}
        if self.bias:
            parameters["bias"] = Parameter((self.out_channels,))
        return parameters

    def gathered_gradient_shape_and_window(self, input_shape: Shape, grid: GridShape) -> tuple[Shape, Window] | None:
        """Return the output array and its gathering window if the scheme gathers gradients."""
        method = self.scheme.gradients if self.scheme else "scatter"
        if method == "scatter":
            return None
        window = self.window_for(input_shape)
        if window.mode != "zeros":
            return None if method == "auto" else super().gathered_gradient_shape_and_window(input_shape, grid)
        shape, gradient_window = self._gradient_shape_and_window(input_shape)
        gathered_volume = total_halo_volume(grid.partition(shape[:-1]), gradient_window) * shape[-1]
        scattered_volume = total_halo_volume(grid.partition(input_shape[:-1]), window) * input_shape[-1]
        return (shape, gradient_window) if method == "gather" or gathered_volume < scattered_volume else None

    def gradient_shape_and_window_if_gathered(self, input_shape: Shape) -> tuple[Shape, Window] | None:
        """Return the output array and its gathering window, for zero padding."""
        return self._gradient_shape_and_window(input_shape) if self.window_for(input_shape).mode == "zeros" else None

    def _gradient_shape_and_window(self, input_shape: Shape) -> tuple[Shape, Window]:
        return self.output_shape_for(input_shape), GradientWindow(self.window_for(input_shape), input_shape[:-1])

    def adjust_for_dist(self) -> None:
        """Also create the array of output gradients, if they are gathered."""
        super().adjust_for_dist()
        shape_and_window = self.gathered_gradient_shape_and_window(self.input_shape, self.context.grid.shape)
        self.gathered_gradient_array = None if shape_and_window is None else self.register_array(*shape_and_window)
        if self.gathered_gradient_array is not None:
            self.gathered_gradient_array.swaps_directions = True

    def forward(self, ctx: StepContext, view: Any) -> Any:
        """Return the convolution plus bias, after the activation."""
        y, bias = ctx.out, ctx.params["bias"] if self.bias else None
        zero_padding, weights = self.input.zero_padding_cells, ctx.params["weights"]
        self.kernels.conv_into(y, view, weights, *self._stride_dilation_groups, bias, ctx.activate, zero_padding)
        ctx.save(view=view, y=None if ctx.activation is None or ctx.relu_gradient_left_to_next_layer else y)
        return y

    def backward(self, ctx: StepContext, dy: Any) -> Any:
        """Return the gradient of the view; fill the gradients of weights and bias."""
        dview = ctx.out if ctx.needs_input_gradient else None
        dweights, dbias = self.kernels.conv_backward_into(
            dview,
            ctx.view,
            dy,
            ctx.params["weights"],
            *self._stride_dilation_groups,
            lambda part: ctx.activation_gradient(None if ctx.y is None else ctx.y[part], dy[part]),
            self.input.zero_padding_cells,
            ctx.needs_weight_gradients,
            ctx.applies_input_relu_gradient,
            self.bias,
        )
        ctx.grads["weights"] = dweights
        if self.bias:
            ctx.grads["bias"] = dbias
        return dview

    def gradient_to_gather(self, ctx: StepContext, dy: Any) -> Any:
        """Return the gradient of the convolution's result, before the activation."""
        return ctx.activation_gradient(ctx.y, dy)

    def input_gradient(self, ctx: StepContext, gathered_dy: Any) -> Any:
        """Return the gradient of the tile, given the gradient of all outputs whose windows overlap the tile."""
        assert self.gathered_gradient_array is not None
        region, own = self.window.needs(self.gathered_gradient_array.need), self.input.own
        array = self.kernels.conv_backward_input(
            gathered_dy, ctx.params["weights"], region.shape, *self._stride_dilation_groups
        )
        overlap, dx = own.intersect(region), ctx.xp.zeros((len(array), *own.shape, array.shape[-1]), array.dtype)
        dx[(slice(None), *overlap.relative_to(own).slices)] = array[(slice(None), *overlap.relative_to(region).slices)]
        return dx

    @property
    def _stride_dilation_groups(self) -> tuple[Shape, Shape, int]:
        return self.window.stride, self.window.dilation, self.groups


class ConvLayerDist(Dist, ConvLayer):
    """Convolution over tiles."""
