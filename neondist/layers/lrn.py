"""Local response normalisation."""

from __future__ import annotations

from math import prod
from typing import Any

from ..registry.ranges import Count, NotNegative, Positive
from .base import Dist, Layer
from .context import StepContext


class LRNLayer(Layer):
    """y = x / (k + alpha / depth * sum of squares over `depth` neighbouring channels) ^ beta (Krizhevsky et al. 2012).

    Channels beyond the first and the last count as zeros, as in torch.nn.LocalResponseNorm. The layer is pointwise in
    space, so nothing is exchanged. Input and output (N, *spatial, C) per tile.

    Parameters
    ----------
    depth : int
        Number of channels in a sum: the channel itself, depth // 2 before it and (depth - 1) // 2 after it.
    alpha, beta, k : float
        alpha and beta at least 0, k positive.
    """

    saved_bytes_and_elements = (0, 2)

    def __init__(
        self,
        depth: Count = 5,
        *,
        alpha: NotNegative = 1e-4,
        beta: NotNegative = 0.75,
        k: Positive = 1.0,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.depth, self.alpha, self.beta, self.k = depth, alpha, beta, k

    def forward(self, ctx: StepContext, view: Any) -> Any:
        """Return the normalised cells."""
        pad_width = [(0, 0)] * (view.ndim - 1) + [(self.depth // 2, (self.depth - 1) // 2)]
        squares = ctx.xp.pad(view * view, pad_width)
        # the kernel treats the channels as a spatial axis
        sums = self.kernels.window_sum(self._channels_as_spatial_axis(squares), (self.depth,), (1,)).reshape(view.shape)
        base = sums * (self.alpha / self.depth) + self.k
        y = view * base**-self.beta
        ctx.save(view=view, base=base, y=y)
        return y

    def backward(self, ctx: StepContext, dy: Any) -> Any:
        """Return the gradient through the cell itself and through the sums of its neighbours."""
        channels = dy.shape[-1]
        scaled_dy = self._channels_as_spatial_axis(dy * ctx.y / ctx.base)
        sums = self.kernels.window_sum_adjoint(scaled_dy, (channels + self.depth - 1,), (self.depth,), (1,))
        first_channel = self.depth // 2
        neighbour_sums = sums[:, first_channel : first_channel + channels].reshape(dy.shape)
        return dy * ctx.base**-self.beta - ctx.view * neighbour_sums * (2 * self.alpha * self.beta / self.depth)

    @staticmethod
    def _channels_as_spatial_axis(array: Any) -> Any:
        return array.reshape(prod(array.shape[:-1]), array.shape[-1], 1)


class LRNLayerDist(Dist, LRNLayer):
    """Local response normalisation over tiles."""
