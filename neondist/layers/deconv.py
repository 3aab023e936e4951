"""Transposed convolution."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from ..backends import Normalisation
from ..errors import ConfigError
from ..geometry import GradientWindow, GridShape, Window
from ..halo import ExchangePolicy
from ..initializers import FanInUniform, Initializer
from ..registry.ranges import Count
from ..terminal.console import counted
from .base import Dist, Layer, Parameter, Shape
from .context import StepContext
from .functions import Activation


class DeconvLayer(Layer):
    """Transposed convolution, the adjoint of a convolution from the output to the input (Zeiler et al. 2010).

    The window slides over the OUTPUT: in fprop, values in the halo are added to those of their owners; in bprop, the
    halo is gathered. Input (N, *spatial, C) and output (N, *spatial', out_channels), per tile. The global output extent
    is (n - 1) stride - both paddings + dilation (kernel - 1) + 1 + output_padding, as in torch.nn.ConvTranspose2d.
    Parameters 'weights' (*kernel, C / groups, out_channels) and 'bias' (out_channels,).

    Parameters
    ----------
    out_channels : int
    kernel_size, stride, dilation : int or one per axis
    padding : int, one per axis, or ((before, after), ...) per axis
        Cells removed from the output's sides.
    output_padding : int or one per axis
        Cells added at the output's end; less than the stride.
    groups, bias, activation, weights_init, scheme
        As in ConvLayer.
    """

    needs_image = tolerates_rounded_view = True

    adds_output_halo = True
    saves_output = False
    in_place = True
    saved_bytes_and_elements = (0, 0)
    recompute_blocker = "its windows slide over the output"

    def __init__(
        self,
        out_channels: Count,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[Any] = 0,
        *,
        output_padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: Count = 1,
        bias: bool = True,
        activation: Activation | None = None,
        weights_init: Initializer | None = None,
        scheme: ExchangePolicy | str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name, scheme=scheme)
        if out_channels % groups:
            raise ConfigError(f"groups {groups} must divide out_channels {out_channels}")
        self.out_channels, self.kernel_size, self.stride, self.padding = out_channels, kernel_size, stride, padding
        self.output_padding, self.dilation, self.groups = output_padding, dilation, groups
        self.bias, self.activation, self.weights_init = bias, activation, weights_init or FanInUniform()

    def output_window_for(self, input_shape: Shape) -> Window:
        """Return the window that slides over the output."""
        return Window(self.kernel_size, self.stride, self.padding, dilation=self.dilation, ndim=len(input_shape) - 1)

    def output_shape_for(self, input_shape: Shape) -> Shape:
        """Return an extent that the corresponding convolution maps to the input's extent, and out_channels."""
        window = self.output_window_for(input_shape)
        output_padding = self.output_padding
        axis_paddings = (output_padding,) * window.ndim if isinstance(output_padding, int) else tuple(output_padding)
        if len(axis_paddings) != window.ndim:
            raise ConfigError(f"output_padding {output_padding}: expected an integer, or one per axis ({window.ndim})")
        if any(not 0 <= e < s for e, s in zip(axis_paddings, window.stride, strict=True)):
            raise ConfigError(f"output_padding {output_padding} must be at least 0 and less than stride {self.stride}")
        extent = tuple(
            (n - 1) * s - sum(p) + span + e
            for n, s, p, span, e in zip(
                input_shape[:-1], window.stride, window.padding, window.span, axis_paddings, strict=True
            )
        )
        if min(extent) < 1:
            raise ConfigError(f"padding {self.padding} leaves no output (extent {extent}); use less padding")
        return *extent, self.out_channels

    def receptive_window_for(self, input_shape: Shape) -> Window:
        """Return the window of the inputs whose windows contain an output."""
        return GradientWindow(self.output_window_for(input_shape), self.output_shape_for(input_shape)[:-1])

    def halos_for(self, input_shape: Shape, grid: GridShape) -> list[tuple[Shape, Window]]:
        """Return the output's halo."""
        return [(self.output_shape_for(input_shape), self.output_window_for(input_shape))]

    def parameters_for(self, input_shape: Shape) -> dict[str, Parameter]:
        """Return 'weights' and 'bias'."""
        kernel, channels = self.output_window_for(input_shape).kernel, input_shape[-1]
        if channels % self.groups:
            raise ConfigError(f"groups {self.groups} must divide the input's {counted(channels, 'channel')}")
        shape = (*kernel, channels // self.groups, self.out_channels)
        fans = prod(shape[:-1]), prod(kernel) * self.out_channels
        bias_parameter = {"bias": Parameter((self.out_channels,))} if self.bias else {}
        return {"weights": Parameter(shape, self.weights_init, *fans)} | bias_parameter

    def adjust_for_dist(self) -> None:
        """Also create the array of outputs, whose halo is exchanged."""
        super().adjust_for_dist()
        self.output_window = self.output_window_for(self.input_shape)
        self.scattered_output_array = self.register_array(self.output_shape, self.output_window)
        self.scattered_output_array.swaps_directions = self.adds_output_halo
        inputs, outputs = self.regions
        if inputs is not None and outputs is not None:
            self.scattered_output_array.repartition(outputs, inputs)

    def forward(self, ctx: StepContext, view: Any) -> Any:
        """Return the contributions of this rank's windows to the outputs, including outputs of other tiles."""
        assert self.scattered_output_array is not None
        ctx.save(view=view)
        shape = len(view), *self.scattered_output_array.need.shape, self.out_channels
        y = ctx.out if self.scattered_output_array.plan.trivial else ctx.xp.empty(shape, view.dtype)
        weights, kernels = self._swap_channels(ctx.params["weights"]), self.kernels
        kernels.conv_backward_into(
            y, y, view, weights, *self._stride_dilation_groups, lambda part: kernels.contiguous(view[part]), None, False
        )
        return y

    def output_from_summed_contributions(self, ctx: StepContext, y: Any) -> Any:
        """Return the sum of all contributions plus bias."""
        out = ctx.out if ctx.accessed_out is None else ctx.accessed_out  # y may be the same array
        if self.bias:
            shift = ctx.params["bias"][None]
            self.kernels.normalise(y, Normalisation(ctx.xp.zeros_like(shift), ctx.xp.ones_like(shift), shift), out)
        elif out is not y:
            self.kernels.copy(y, out)
        return out

    def gradient_to_gather(self, ctx: StepContext, dy: Any) -> Any:
        """Fill the gradient of the bias; return dy."""
        if self.bias:
            ctx.grads["bias"] = self.kernels.channel_sum(dy)
        return dy

    def backward(self, ctx: StepContext, dy: Any) -> Any:
        """Return the gradient of the view: a convolution of dy, which includes its halo."""
        weights = self.kernels.conv_backward_weights(
            dy, ctx.view, self.output_window.kernel, *self._stride_dilation_groups
        )
        ctx.grads["weights"] = self._swap_channels(weights)
        if not ctx.needs_input_gradient:
            return None
        dview, weights = ctx.out, self._swap_channels(ctx.params["weights"])
        self.kernels.conv_into(dview, dy, weights, *self._stride_dilation_groups, None, self.kernels.copy)
        return dview

    @property
    def _stride_dilation_groups(self) -> tuple[Shape, Shape, int]:
        return self.output_window.stride, self.output_window.dilation, self.groups

    def _swap_channels(self, weights: Any) -> Any:
        """Return (*kernel, a / groups, b) as (*kernel, b / groups, a): the weights of the opposite direction."""
        kernel, inner, outer = weights.shape[:-2], weights.shape[-2], weights.shape[-1] // self.groups
        grouped = weights.reshape(*kernel, inner, self.groups, outer).swapaxes(-3, -1)
        return grouped.reshape(*kernel, outer, self.groups * inner)


class DeconvLayerDist(Dist, DeconvLayer):
    """Transposed convolution over tiles."""
