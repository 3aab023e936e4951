"""Fully connected layer."""

from __future__ import annotations

from math import prod
from typing import Any

from ..initializers import FanInUniform, Initializer
from ..registry.ranges import Count
from .base import Dist, Layer, Parameter, Shape
from .context import StepContext
from .functions import Activation
from .layout import Shard
from .reduction import Reduction


class FCLayer(Layer):
    """Fully connected: flattens (*spatial, C) row-major and multiplies by 'weights' (inputs, out_features).

    Each rank multiplies what it has - its tile, or its range of a vector's features - by the rows of the weights for
    that, which it alone keeps, and one sum over the tiles joins the products. Input (N, *spatial, C) local or (N, C)
    cut over the tiles; output (N, out_features) whole, or cut for the next fully connected layer.

    Parameters
    ----------
    out_features : int
    bias : bool
    activation : Activation, optional
    weights_init : Initializer, optional
        Default FanInUniform.
    """

    saves_output = False
    saves_beside = (0, 0)
    layout = Shard

    def __init__(
        self,
        out_features: Count,
        *,
        bias: bool = True,
        activation: Activation | None = None,
        weights_init: Initializer | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.out_features, self.bias, self.activation = out_features, bias, activation
        self.weights_init = weights_init or FanInUniform()

    def output_shape_for(self, input_shape: Shape) -> Shape:
        """Return (out_features,)."""
        return (self.out_features,)

    def reductions_for(self, input_shape: Shape) -> list[Reduction]:
        """Return the sum that joins the outputs."""
        return [Reduction("forward", "tiles", each=self.out_features)]

    def parameters_for(self, input_shape: Shape) -> dict[str, Parameter]:
        """Return 'weights' and 'bias'."""
        inputs = prod(input_shape)
        shape = (inputs, self.out_features)
        found = {"weights": Parameter(shape, self.weights_init, *shape, Shard(input_shape))}
        if self.bias:
            found["bias"] = Parameter((self.out_features,))
        return found

    def reduce(self, ctx: StepContext, view: Any) -> Any:
        """Return the products of this rank's inputs, one of them with the bias; those of all tiles add up."""
        ctx.save(view=view.reshape(len(view), prod(view.shape[1:])), seen=view.shape)  # -1 fails without samples
        products = self.kernels.matmul(ctx.view, ctx.params["weights"])
        if self.bias:
            products += ctx.local_contribution(ctx.params["bias"])
        return products

    def forward(self, ctx: StepContext, view: Any) -> Any:
        """Return the sum."""
        return ctx.reduced

    def backward(self, ctx: StepContext, dy: Any) -> Any:
        """Return the gradient of the view."""
        ctx.grads["weights"] = self.kernels.matmul(ctx.view.T, dy)
        if self.bias:
            ctx.grads["bias"] = ctx.local_contribution(dy.sum(axis=0))
        if not ctx.needs_input_gradient:
            return None
        return self.kernels.matmul(dy, ctx.params["weights"].T).reshape(ctx.seen)


class FCLayerDist(Dist, FCLayer):
    """Fully connected over tiles."""
