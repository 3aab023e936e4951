"""Global average pooling."""

from __future__ import annotations

from math import prod
from typing import Any

from ..errors import ShapeError
from .base import Dist, Layer, Shape
from .context import StepContext
from .layout import Shard
from .reduction import Reduction


class GlobalAvgPoolingLayer(Layer):
    """Mean over the whole image: input (N, *spatial, C) local, output (N, C) replicated (Lin et al. 2014).

    The mean is computed by local sums and one allreduce of N x C elements; nothing is gathered. Before a fully
    connected layer, the result stays partitioned.
    """

    saves_input = saves_output = False
    saved_bytes_and_elements = (0, 0)
    reduce_needed_in_recomputation = False
    forward_reads_only_reduced = True
    layout = Shard

    def output_shape_for(self, input_shape: Shape) -> Shape:
        """Return (C,)."""
        if len(input_shape) < 2:
            problem = f"global average pooling needs an image, but its input has shape {input_shape}"
            raise ShapeError(f"{problem}; move it before the layers that return vectors, or leave it out")
        return input_shape[-1:]

    def reductions_for(self, input_shape: Shape) -> list[Reduction]:
        """Return the reduction that sums each channel."""
        return [Reduction("forward", "tiles", result_elements_per_sample=input_shape[-1])]

    def reduce(self, ctx: StepContext, view: Any) -> Any:
        """Return the sums over this rank's cells."""
        return self.kernels.sample_sum(view)

    def forward(self, ctx: StepContext, view: Any) -> Any:
        """Return the means over all tiles."""
        return ctx.reduced / prod(self.input_shape[:-1])

    def backward(self, ctx: StepContext, dy: Any) -> Any:
        """Distribute the gradient evenly over the cells."""
        dview = ctx.out
        cell_gradient = dy / prod(self.input_shape[:-1])
        dview[...] = cell_gradient.reshape(len(dy), *(1 for _ in dview.shape[1:-1]), dy.shape[-1])
        return dview


class GlobalAvgPoolingLayerDist(Dist, GlobalAvgPoolingLayer):
    """Global average pooling over tiles."""
