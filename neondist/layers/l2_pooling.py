"""L2 pooling."""

from __future__ import annotations

from math import inf
from typing import Any

from ..halo import Phase
from .base import Dist
from .context import StepContext
from .pooling import PoolingLayer


class L2PoolingLayer(PoolingLayer):
    """Root of the sum of squares over each window (Le et al. 2012); the gradient of an all-zero window is zero."""

    pools_squares = True
    saved_bytes_and_elements = (0, 1)

    def forward(self, ctx: StepContext, view: Any) -> Any:
        """Return the roots."""
        root = ctx.xp.sqrt(self._window_square_sums(view))
        ctx.save(view=view, root=root)
        return root

    def backward(self, ctx: StepContext, dy: Any) -> Any:
        """Return each cell times the sum of dy / y over the windows that contain the cell."""
        return self._half_gradient_of_square_sums(ctx.view, dy / ctx.xp.where(ctx.root > 0, ctx.root, inf))

    def window_sums_of_squares_with_view(self, x: Any, phase: Phase) -> tuple[Any, Any]:
        """Return the sums (without the root) for this rank's input tile, and the view. Collective over the tiles.

        The sums cover only owned cells, even if a segment of layers also computes cells of other tiles.
        """
        view = self.input.get_fprop_view(x, phase)
        return self._window_square_sums(view)[self._owned_output_slices], view

    def window_sums_of_squares_backward(self, view: Any, dsums: Any, phase: Phase) -> Any:
        """Return the gradient of x, given the gradient of the sums. Collective over the tiles."""
        tile_dsums = self.kernels.xp.zeros((len(dsums), *self.ofmshape), dsums.dtype)
        tile_dsums[self._owned_output_slices] = 2 * dsums
        return self.input.get_bprop_view(self._half_gradient_of_square_sums(view, tile_dsums), phase)

    @property
    def _owned_output_slices(self) -> tuple[slice, ...]:
        own_box = self.context.grid.tile_box(self.output_shape[:-1])
        return slice(None), *own_box.relative_to(self.output_tile).slices

    def _window_square_sums(self, view: Any) -> Any:
        return self.kernels.window_sum(view * view, *self._kernel_and_stride)

    def _half_gradient_of_square_sums(self, view: Any, dsums: Any) -> Any:
        return view * self.kernels.window_sum_adjoint(dsums, view.shape[1:-1], *self._kernel_and_stride)


class L2PoolingLayerDist(Dist, L2PoolingLayer):
    """L2 pooling over tiles."""
