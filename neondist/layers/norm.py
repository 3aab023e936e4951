"""Base class of batch, group and instance normalisation, which store their input and recompute their output from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..backends import Normalisation
from .base import Layer
from .context import StepContext


class NormLayer(Layer):
    """Base class of layers that normalise cells by statistics over cells of the batch or of a sample."""

    saves_output = saves_activated = False

    def normalise_view(self, ctx: StepContext, view: Any, mean: Any, scale: Any, shift: Any) -> Any:
        """Return (view - mean) * scale + shift, given arrays (groups, C); save arrays for the backward pass."""
        norm, y = Normalisation(mean, scale, shift, fused_relu=ctx.activation is not None), ctx.out
        ctx.activated = True
        self.kernels.normalise(view, norm, y)
        ctx.save(view=view, norm=norm)
        return y

    def recompute_output(self, ctx: StepContext, y: Any) -> None:
        """Write the output of `forward` into y."""
        self.kernels.normalise(ctx.view, ctx.norm, y)

    def channel_gradient_sums(self, ctx: StepContext, dy: Any) -> tuple[Any, Any]:
        """Return the sums of dy and of dy * (view - mean), (groups, C)."""
        return self.kernels.normalise_backward_sums(ctx.view, dy, ctx.norm)

    def view_gradient(self, ctx: StepContext, dy: Any, dy_factor: Any, statistics: Sequence[Any] | None) -> Any:
        """Return the gradient of the view: dy_factor * dy, plus the gradient through the statistics.

        With `statistics` (a, b), the second term is a * (view - mean) + b in the cells that they cover; else it is 0.
        """
        x, dx = ctx.view, ctx.out
        owned = [ctx.owned(array) for array in (x, dy, dx)]
        if statistics is None or owned[0].size < x.size:  # a segment includes cells of other tiles
            owned[0] = owned[0].copy()  # dx may be the view's memory
            dy_only = dy_factor, *ctx.xp.zeros((2, *dy_factor.shape), dy.dtype)
            self.kernels.normalise_backward(x, dy, ctx.norm, dy_only, dx)
        if statistics is not None:
            self.kernels.normalise_backward(owned[0], owned[1], ctx.norm, (dy_factor, *statistics), owned[2])
        return dx
