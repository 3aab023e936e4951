"""L2 pooling."""

from __future__ import annotations

from typing import Any

import numpy as np

from .base import Dist
from .pooling import PoolingLayer


class L2PoolingLayer(PoolingLayer):
    """Root of the sum of squares over each window (Le et al. 2012); the gradient where all are zero is zero."""

    def forward(self, view: Any) -> Any:
        """Return the roots."""
        self.view = view
        self.root = np.sqrt(self.kernels.window_sum(view * view, *self._kernel_and_stride))
        return self.root.copy()  # the next layer may work in place

    def backward(self, dy: Any) -> Any:
        """Return x times the sum, over its windows, of dy / y."""
        ratio = np.divide(dy, self.root, out=np.zeros_like(dy), where=self.root > 0)
        return self.view * self.kernels.window_spread(ratio, self.view.shape[1:-1], *self._kernel_and_stride)


class L2PoolingLayerDist(Dist, L2PoolingLayer):
    """L2 pooling over tiles."""
