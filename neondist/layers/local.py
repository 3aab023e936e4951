"""Convolution with unshared weights."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from ..errors import ConfigError
from ..geometry import Window
from ..halo import ExchangePolicy
from ..initializers import FanInUniform, Initializer
from ..registry.ranges import Count
from .base import Dist, Layer, Parameter, Shape
from .context import StepContext
from .filters import FilterOperator, PerBlockFilters, PerCellFilters, orthonormalise
from .functions import Activation
from .layout import Replicate, Tiled


class LocalFilteringLayer(Layer):
    """Locally connected layer: every output cell has its own filter (Le et al. 2012, "untied weights").

    Input (N, *spatial, C), output (N, *spatial', out_channels), both local. Parameter 'weights' (*spatial', *kernel, C,
    out_channels): each rank stores only the part for its own output tile, and gradients are not summed over tiles. With
    `shared`, (*blocks, *kernel, C, out_channels): replicated on every rank, gradients summed over all ranks.

    Parameters
    ----------
    out_channels : int
    kernel_size, stride : int or one per axis
    padding : int, one per axis, or ((before, after), ...) per axis
    bias : bool
        Whether to add 'bias' (*spatial', out_channels), which is unshared even with `shared`.
    activation : Activation, optional
    weights_init : Initializer, optional
        Default FanInUniform.
    scheme : ExchangePolicy or str, optional
        Border scheme, such as 'tower' or Tower(fill='reflect'). Default: the scheme of the model.
    shared : bool, int or one per axis
        False: every cell has its own filter. True: all cells share one filter (a convolution). Integers: extents
        of blocks whose cells share a filter.
    """

    needs_image = True

    window: Window
    is_pretrained_as_autoencoder = True
    saves_output = False
    saved_bytes_and_elements = (0, 0)

    def __init__(
        self,
        out_channels: Count,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[Any] = 0,
        *,
        shared: bool | int | Sequence[int] = False,
        bias: bool = False,
        activation: Activation | None = None,
        weights_init: Initializer | None = None,
        scheme: ExchangePolicy | str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name, scheme=scheme)
        self.out_channels, self.kernel_size, self.stride, self.padding = out_channels, kernel_size, stride, padding
        self.bias, self.activation, self.weights_init = bias, activation, weights_init or FanInUniform()
        if not isinstance(shared, bool) and any(b < 1 for b in ([shared] if isinstance(shared, int) else shared)):
            raise ConfigError(f"shared: expected true, false, or block sizes of at least 1 cell, got {shared}")
        self.shared, self.position_dependent = shared, shared is not True or bias

    def window_for(self, input_shape: Shape) -> Window:
        """Return the window."""
        return Window(self.kernel_size, self.stride, self.padding, ndim=len(input_shape) - 1)

    def output_channels_for(self, input_shape: Shape) -> int:
        """Return out_channels."""
        return self.out_channels

    def parameters_for(self, input_shape: Shape) -> dict[str, Parameter]:
        """Return 'weights', divided like the output unless `shared`, and 'bias', if any, divided like the output."""
        window, channels = self.window_for(input_shape), input_shape[-1]
        out_extent = window.output_extent(input_shape[:-1])
        fan_in, fan_out = prod(window.kernel) * channels, prod(window.kernel) * self.out_channels
        block = self.shared_filter_extent_for(out_extent)
        num_blocks = out_extent if block is None else tuple(-(-n // b) for n, b in zip(out_extent, block, strict=True))
        shape = (*num_blocks, *window.kernel, channels, self.out_channels)
        tiled = Tiled(len(out_extent))
        layout = tiled if block is None else Replicate()
        parameters = {"weights": Parameter(shape, self.weights_init, fan_in, fan_out, layout)}
        bias = {"bias": Parameter((*out_extent, self.out_channels), layout=tiled, decays=False)} if self.bias else {}
        return parameters | bias

    def shared_filter_extent_for(self, outputs: Shape) -> Shape | None:
        """Return the number of cells that share a filter along each axis for an output of this extent, or None."""
        if self.shared is False:
            return None
        if self.shared is True:
            return tuple(max(1, n) for n in outputs)
        block = (self.shared,) * len(outputs) if isinstance(self.shared, int) else tuple(self.shared)
        if len(block) != len(outputs):
            raise ConfigError(
                f"shared {self.shared}: expected one number, or {len(outputs)} numbers, one per spatial axis"
            )
        return block

    def prepare_for_tile(self) -> None:
        """Determine the filters of this rank's cells."""
        block, kernels = self.shared_filter_extent_for(self.output_shape[:-1]), self.kernels
        self.filters: FilterOperator = PerCellFilters(kernels, self.window)
        if block is not None:
            self.filters = PerBlockFilters(kernels.exact, self.window, self.output_tile, block)

    def forward(self, ctx: StepContext, view: Any) -> Any:
        """Apply every cell's filter to its window."""
        ctx.save(view=view)
        y = self.filters.correlate(view, ctx.params["weights"])
        if self.bias:
            y += ctx.params["bias"]
        return y

    def backward(self, ctx: StepContext, dy: Any) -> Any:
        """Return the gradient of the view; fill the gradients of this tile's weights."""
        weights = ctx.params["weights"]
        ctx.grads["weights"] = self.filters.weights_gradient(ctx.view, dy, weights)
        if self.bias:
            ctx.grads["bias"] = dy.sum(axis=0)
        return self.filters.correlate_adjoint(dy, weights, ctx.view.shape[1:-1]) if ctx.needs_input_gradient else None

    def orthonormalise(self) -> None:
        """Make the filters of each cell orthonormal up to a common scale.

        The scale is chosen so that WᵀW, a sum over overlapping windows, can be the identity on average over the input's
        cells.
        """
        num_outputs = prod(self.output_shape)
        scale = min(1.0, prod(self.input_shape) / num_outputs) ** 0.5 if num_outputs else 1.0
        weights = self.params["weights"]
        weights[...] = orthonormalise(weights, len(self.window.kernel), scale)


class LocalFilteringLayerDist(Dist, LocalFilteringLayer):
    """Locally connected layer over tiles; each rank stores the unshared weights of its own tile."""
