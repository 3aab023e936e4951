"""Average pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..halo import ExchangePolicy
from .base import Dist
from .context import StepContext
from .pooling import PoolingLayer


class AvgPoolingLayer(PoolingLayer):
    """Mean over each window.

    Parameters
    ----------
    kernel_size, stride, padding, scheme
        As in PoolingLayer.
    count_include_pad : bool
        True: divide by the number of cells of the window; False: by the number of its cells inside the image.
    """

    saves_input = saves_output = False
    saved_bytes_and_elements = (0, 0)

    def __init__(
        self,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[Any] = 0,
        count_include_pad: bool = True,
        *,
        scheme: ExchangePolicy | str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(kernel_size, stride, padding, name=name, scheme=scheme)
        self.count_include_pad = count_include_pad

    def forward(self, ctx: StepContext, view: Any) -> Any:
        """Return the means."""
        y = self.kernels.window_sum(view, *self._kernel_and_stride)
        y *= self._inverse_counts(ctx)
        return y

    def backward(self, ctx: StepContext, dy: Any) -> Any:
        """Distribute each gradient evenly over the cells of its window."""
        extent = ctx.input_box.shape
        return self.kernels.window_sum_adjoint(dy * self._inverse_counts(ctx), extent, *self._kernel_and_stride)

    def _inverse_counts(self, ctx: StepContext) -> Any:
        """Return the reciprocal of the number of averaged cells of every window: (*out, 1)."""
        kernel, stride = self._kernel_and_stride
        xp, dtype = ctx.xp, self.context.dtype
        weights = xp.ones((1,) * len(kernel) + (1,), dtype)
        for axis, ((lo, hi), n, k, s) in enumerate(
            zip(ctx.input_box.axes(), self.input_shape[:-1], kernel, stride, strict=True)
        ):
            starts = xp.arange(lo, hi - k + 1, s)
            cells_inside = xp.minimum(starts + k, n) - xp.maximum(starts, 0)
            counts = xp.full(len(starts), k) if self.count_include_pad else cells_inside
            weights = weights / counts.reshape([-1 if a == axis else 1 for a in range(len(kernel) + 1)])
        return weights.astype(dtype)


class AvgPoolingLayerDist(Dist, AvgPoolingLayer):
    """Average pooling over tiles."""
