"""Fully connected layer."""

from __future__ import annotations

from math import prod
from typing import Any

from ..errors import ConfigError
from ..initializers import FanInUniform, Initializer
from .base import Dist, Layer, Parameter, Shape
from .context import StepContext
from .functions import Activation
from .layout import Shard
from .reduction import Reduction


class FCLayer(Layer):
    """Fully connected: flattens (*spatial, C) row-major and multiplies by 'weights' (inputs, out_features).

    Each rank multiplies what it has - its tile, or its range of a vector's features - by the rows of the weights for
    that, which it alone keeps, and one sum over the tiles joins the products. Input
    (N, *spatial, C) local or (N, C) whole; output (N, out_features) whole.

    Parameters
    ----------
    out_features : int
    bias : bool
    activation : Activation, optional
    weights_init : Initializer, optional
        Default FanInUniform.
    """

    saves_output = False

    def __init__(
        self,
        out_features: int,
        bias: bool = True,
        activation: Activation | None = None,
        name: str | None = None,
        weights_init: Initializer | None = None,
    ) -> None:
        super().__init__(name)
        if out_features < 1:
            raise ConfigError(f"out_features {out_features}: needs at least 1")
        self.out_features, self.bias, self.activation = out_features, bias, activation
        self.weights_init = weights_init or FanInUniform()

    def output_shape_for(self, input_shape: Shape) -> Shape:
        """Return (out_features,)."""
        return (self.out_features,)

    def reductions_for(self, input_shape: Shape) -> list[Reduction]:
        """Return the sum that joins the outputs, and for a vector the one that joins its gradient."""
        back = [Reduction("backward", "tiles", each=input_shape[0])] if len(input_shape) == 1 else []
        return [Reduction("forward", "tiles", each=self.out_features), *back]

    def parameters_for(self, input_shape: Shape) -> dict[str, Parameter]:
        """Return 'weights' and 'bias'."""
        inputs = prod(input_shape)
        shape = (inputs, self.out_features)
        found = {"weights": Parameter(shape, self.weights_init, *shape, Shard(input_shape))}
        if self.bias:
            found["bias"] = Parameter((self.out_features,))
        return found

    def reduce(self, ctx: StepContext, view: Any) -> Any:
        """Return the products of this rank's inputs; those of all tiles add up."""
        mine = view[(slice(None), *self._part)]
        ctx.save(view=mine.reshape(len(view), prod(mine.shape[1:])))  # -1 fails where there are no samples
        return self.kernels.matmul(ctx.view, ctx.params["weights"])

    def forward(self, ctx: StepContext, view: Any) -> Any:
        """Return the products plus bias."""
        return ctx.reduced + ctx.params["bias"] if self.bias else ctx.reduced

    def reduce_backward(self, ctx: StepContext, dy: Any) -> Any:
        """Return the gradient of this rank's range of a vector, zero elsewhere; those of all tiles add up."""
        if not ctx.needs_input_gradient:
            return None
        whole = ctx.xp.zeros((len(dy), *self.input_shape), dy.dtype)
        whole[(slice(None), *self._part)] = self._back(ctx, dy)
        return whole

    def backward(self, ctx: StepContext, dy: Any) -> Any:
        """Return the gradient of the view."""
        ctx.grads["weights"] = self.kernels.matmul(ctx.view.T, dy)
        if self.bias:
            ctx.grads["bias"] = ctx.local_contribution(dy.sum(axis=0))
        if not ctx.needs_input_gradient:
            return None
        return self._back(ctx, dy).reshape(len(dy), *self.input.view_shape[1:]) if self.input.tiled else ctx.reduced

    def _back(self, ctx: StepContext, dy: Any) -> Any:
        return self.kernels.matmul(dy, ctx.params["weights"].T)

    @property
    def _part(self) -> tuple[slice, ...]:
        """Where this rank's inputs lie in the view: a tile is all of it, a vector is whole on every rank."""
        grid = self.context.grid
        return () if self.input.tiled else Shard(self.input_shape).inputs(grid.shape, grid.tile).slices


class FCLayerDist(Dist, FCLayer):
    """Fully connected over tiles."""
