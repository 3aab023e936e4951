"""Fully connected layer."""

from __future__ import annotations

from math import prod
from typing import Any, Literal

from ..errors import ShapeError
from ..initializers import FanInUniform, Initializer
from ..registry.ranges import Count
from .base import Dist, Layer, Parameter, Shape
from .context import StepContext
from .functions import Activation
from .layout import OutputShard, Replicate, Shard
from .reduction import Reduction


class FCLayer(Layer):
    """Fully connected layer: flattens (*spatial, C) row-major and multiplies by 'weights' (inputs, out_features).

    Each rank multiplies its tile, or its range of a vector's features, by the corresponding rows of the weights, which
    no other rank stores; one allreduce over the tiles sums the products. Input (N, *spatial, C) local, or (N, C)
    partitioned over the tiles; output (N, out_features) replicated, or partitioned for the next fully connected layer.

    With `split` 'outputs' each rank stores the columns of its range of outputs instead: the input (N, C) is replicated,
    and the output is partitioned for a following fully connected layer with 'inputs'. Such a pair needs one allreduce
    over the tiles in fprop and one in bprop (Shoeybi et al. 2019).

    Parameters
    ----------
    out_features : int
    bias : bool
    activation : Activation, optional
    weights_init : Initializer, optional
        Default FanInUniform.
    split : {'inputs', 'outputs'}
        Axis of the weights that is partitioned over the tiles.
    """

    saves_output = False
    saved_bytes_and_elements = (0, 0)
    layout: type[Replicate] = Shard
    can_split_outputs = True

    def __init__(
        self,
        out_features: Count,
        bias: bool = True,
        activation: Activation | None = None,
        *,
        weights_init: Initializer | None = None,
        split: Literal["inputs", "outputs"] = "inputs",
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.out_features, self.bias, self.activation = out_features, bias, activation
        self.weights_init = weights_init or FanInUniform()
        self.set_split(split)

    def set_split(self, split: str) -> None:
        """Partition the weights over the tiles along 'inputs' or 'outputs', before the layer is planned."""
        self.splits_outputs = split == "outputs"
        self.layout = Replicate if self.splits_outputs else Shard  # layout of the input

    def output_shape_for(self, input_shape: Shape) -> Shape:
        """Return (out_features,)."""
        if self.splits_outputs and len(input_shape) > 1:
            raise ShapeError(f"split: outputs needs a vector, but its input has shape {input_shape}; use split: inputs")
        return (self.out_features,)

    def reductions_for(self, input_shape: Shape) -> list[Reduction]:
        """Return the reduction of the outputs, or of the input gradients."""
        if self.splits_outputs:
            return [Reduction("backward", "tiles", prod(input_shape), needed_by_parameters=False)]
        return [Reduction("forward", "tiles", result_elements_per_sample=self.out_features)]

    def parameters_for(self, input_shape: Shape) -> dict[str, Parameter]:
        """Return 'weights' and 'bias'."""
        num_inputs = prod(input_shape)
        shape = (num_inputs, self.out_features)
        layout = OutputShard() if self.splits_outputs else Shard(input_shape)
        parameters = {"weights": Parameter(shape, self.weights_init, *shape, layout)}
        if self.bias:
            parameters["bias"] = Parameter((self.out_features,), layout=layout if self.splits_outputs else Replicate())
        return parameters

    def reduce(self, ctx: StepContext, view: Any) -> Any:
        """Return the products of this rank's inputs, which are summed over tiles; one rank adds the bias."""
        num_features = prod(view.shape[1:])  # -1 is ambiguous without samples
        ctx.save(view=view.reshape(len(view), num_features), input_shape=view.shape)
        products = self.kernels.product(ctx.view, ctx.params["weights"])
        if self.bias:
            products += ctx.contribution_to_sum(ctx.params["bias"])
        return products

    def forward(self, ctx: StepContext, view: Any) -> Any:
        """Return the sum over tiles, or, with `split` 'outputs', this rank's range of outputs."""
        if not self.splits_outputs:
            return ctx.reduced
        ctx.save(view=view, input_shape=view.shape)
        products = self.kernels.product(view, ctx.params["weights"])
        if self.bias:
            products += ctx.params["bias"]
        return products

    def reduce_backward(self, ctx: StepContext, dy: Any) -> Any:
        """Return this rank's contribution to the input gradient."""
        return self.kernels.product(dy, ctx.params["weights"].T) if ctx.needs_input_gradient else None

    def backward(self, ctx: StepContext, dy: Any) -> Any:
        """Return the gradient of the view."""
        ctx.grads["weights"] = self.kernels.product(ctx.view.T, dy)
        if self.bias:
            dbias = dy.sum(axis=0)
            ctx.grads["bias"] = dbias if self.splits_outputs else ctx.contribution_to_sum(dbias)
        if not ctx.needs_input_gradient:
            return None
        if self.splits_outputs:
            return ctx.reduced
        return self.kernels.product(dy, ctx.params["weights"].T).reshape(ctx.input_shape)


class FCLayerDist(Dist, FCLayer):
    """Fully connected layer over tiles."""
