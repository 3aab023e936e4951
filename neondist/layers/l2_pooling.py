"""L2 pooling."""

from __future__ import annotations

from typing import Any

import numpy as np

from .base import Dist
from .pooling import PoolingLayer


class L2PoolingLayer(PoolingLayer):
    """Root of the sum of squares over each window (Le et al. 2012); the gradient where all are zero is zero."""

    pools_squares = True

    def forward(self, view: Any) -> Any:
        """Return the roots."""
        self.root = np.sqrt(self._sums(view))
        return self.root.copy()  # the next layer may work in place

    def backward(self, dy: Any) -> Any:
        """Return x times the sum, over its windows, of dy / y."""
        ratio = np.divide(dy, self.root, out=np.zeros_like(dy), where=self.root > 0)
        return self._spread(ratio)

    def squares(self, x: Any) -> Any:
        """Return the sums without the root for this rank's tile of the input; collective over the tiles.

        They are those of own cells alone, also where a run of layers computes others too.
        """
        return self._sums(self.input.get_fprop_view(x))[self._own_outputs]

    def squares_backward(self, dsums: Any) -> Any:
        """Return the gradient of the tile that `squares` got, given that of the sums; collective over the tiles."""
        by_cell = np.zeros((len(dsums), *self.ofmshape), dsums.dtype)
        by_cell[self._own_outputs] = 2 * dsums
        return self.input.get_bprop_view(self._spread(by_cell))

    @property
    def _own_outputs(self) -> tuple[slice, ...]:
        own = self.context.grid.tile_box(self.output_shape[:-1])
        return slice(None), *own.relative_to(self.tile).slices

    def _sums(self, view: Any) -> Any:
        self.view = view
        return self.kernels.window_sum(view * view, *self._kernel_and_stride)

    def _spread(self, by_cell: Any) -> Any:
        return self.view * self.kernels.window_spread(by_cell, self.view.shape[1:-1], *self._kernel_and_stride)


class L2PoolingLayerDist(Dist, L2PoolingLayer):
    """L2 pooling over tiles."""
