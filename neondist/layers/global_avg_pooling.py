"""Global average pooling."""

from __future__ import annotations

from math import prod
from typing import Any

from ..errors import ShapeError
from .base import Dist, Layer, Shape
from .sums import LayerSum


class GlobalAvgPoolingLayer(Layer):
    """Mean over the whole image: input (N, *spatial, C) local, output (N, C) whole on every rank (Lin et al. 2014).

    Local sums and one allreduce of N x C numbers; nothing is gathered.
    """

    direct, keeps_view = True, False

    def output_shape_for(self, input_shape: Shape) -> Shape:
        """Return (C,)."""
        if len(input_shape) < 2:
            raise ShapeError(f"global average pooling needs an image, but its input has shape {input_shape}")
        return input_shape[-1:]

    def sums_for(self, input_shape: Shape) -> list[LayerSum]:
        """Return the sum of the channels."""
        return [LayerSum("forward", "tiles", each=input_shape[-1])]

    def forward(self, view: Any) -> Any:
        """Return the means over all tiles."""
        return self.total(self.kernels.sample_sum(view)) / prod(self.input_shape[:-1])

    def backward(self, dy: Any) -> Any:
        """Spread the gradient evenly over the cells."""
        each = dy / prod(self.input_shape[:-1])
        cells = self.input.own.shape
        each = each.reshape(len(dy), *(1 for _ in cells), dy.shape[-1])
        dview = self.new_dview(len(dy))
        dview[...] = each
        return dview


class GlobalAvgPoolingLayerDist(Dist, GlobalAvgPoolingLayer):
    """Global average pooling over tiles."""
