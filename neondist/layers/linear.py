"""Fully connected layer."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..geometry import split
from ..initializers import FanInUniform, Initializer
from .base import Dist, Layer, Parameter, Shape
from .functions import Activation
from .sums import LayerSum


class FCLayer(Layer):
    """Fully connected: flattens (*spatial, C) row-major and multiplies by 'weights' (inputs, out_features).

    Each rank multiplies what it has - its tile, or its range of a vector's features - by its rows of the weights, and
    one sum over the tiles joins them. Input (N, *spatial, C) local or (N, C) whole; output (N, out_features) whole.

    Parameters
    ----------
    out_features : int
    bias : bool
    activation : Activation, optional
    weights_init : Initializer, optional
        Default FanInUniform.
    """

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

    def sums_for(self, input_shape: Shape) -> list[LayerSum]:
        """Return the sum that joins the outputs, and for a vector the one that joins its gradient."""
        back = [LayerSum("backward", "tiles", each=input_shape[0])] if len(input_shape) == 1 else []
        return [LayerSum("forward", "tiles", each=self.out_features), *back]

    def parameters_for(self, input_shape: Shape) -> dict[str, Parameter]:
        """Return 'weights' and 'bias'."""
        inputs = prod(input_shape)
        found = {"weights": Parameter((inputs, self.out_features), self.weights_init, inputs, self.out_features)}
        if self.bias:
            found["bias"] = Parameter((self.out_features,))
        return found

    def forward(self, view: Any) -> Any:
        """Return the products, summed over the tiles, plus bias."""
        mine = view[(slice(None), *self._part)]
        self.view = mine.reshape(len(view), prod(mine.shape[1:]))  # -1 fails where there are no samples
        y = self._join(self.kernels.matmul(self.view, self._rows(self.params["weights"])))
        if self.bias:
            y += self.params["bias"]
        return y

    def backward(self, dy: Any) -> Any:
        """Return the gradient of the view; the weights' is this rank's rows, zero elsewhere."""
        gradient = self.grads["weights"]
        gradient[...] = 0
        rows = gradient.reshape(*self.input_shape, -1)[self._place]
        rows[...] = self.kernels.matmul(self.view.T, dy).reshape(rows.shape)
        if self.bias:
            self.grads["bias"] = self.share(dy.sum(axis=0))
        if not self.needs_input_gradient:
            return None
        dview = self.kernels.matmul(dy, self._rows(self.params["weights"]).T)
        if self.input.tiled:
            return dview.reshape(len(dy), *self.input.view_shape[1:])
        whole = np.zeros((len(dy), *self.input_shape), dy.dtype)
        whole[(slice(None), *self._part)] = dview
        return self._join(whole)

    @property
    def _place(self) -> tuple[slice, ...]:
        """Where this rank's inputs lie in the whole input (*spatial, C)."""
        if self.input.tiled:
            return self.input.own.slices
        grid = self.context.grid
        return (slice(*split(self.input_shape[0], grid.shape.tiles, grid.tile)),)

    @property
    def _part(self) -> tuple[slice, ...]:
        """Where they lie in the view: a tile is all of it, a vector is whole on every rank."""
        return () if self.input.tiled else self._place

    def _rows(self, weights: Any) -> Any:
        return weights.reshape(*self.input_shape, -1)[self._place].reshape(-1, self.out_features)

    def _join(self, partial: Any) -> Any:
        """Add up the tiles' products; unlike `total`, a vector's ranges are parts of one sum too."""
        return self.input.reductions.allreduce("tiles", partial)


class FCLayerDist(Dist, FCLayer):
    """Fully connected over tiles."""
