"""Base of batch, group and instance normalisation, which store their input and recompute the rest from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..backends import Normal
from .base import Layer
from .context import StepContext


class NormLayer(Layer):
    """Base of the layers that normalise cells by statistics of the image."""

    sums_image = True
    saves_output = saves_activated = False

    def normalised(self, ctx: StepContext, view: Any, mean: Any, scale: Any, shift: Any) -> Any:
        """Return (view - mean) * scale + shift, given numbers (groups, C); keep what the way back needs."""
        how, y = Normal(mean, scale, shift, clip=ctx.activation is not None), ctx.out
        ctx.activated = True
        self.kernels.normalise(view, how, y)
        ctx.save(view=view, how=how)
        return y

    def restore(self, ctx: StepContext, y: Any) -> None:
        """Write into y what `forward` gave."""
        self.kernels.normalise(ctx.view, ctx.how, y)

    def sums_back(self, ctx: StepContext, dy: Any) -> tuple[Any, Any]:
        """Return the sums of dy and of dy * (view - mean), (groups, C)."""
        return self.kernels.normalise_sums(ctx.view, dy, ctx.how)

    def gradient(self, ctx: StepContext, dy: Any, through: Any, statistics: Sequence[Any] | None) -> Any:
        """Return the gradient of the view: through * dy, and what the statistics add.

        That is, given (a, b), a * (view - mean) + b in cells that count for them; None: nothing.
        """
        x, dx = ctx.view, ctx.out
        own = [ctx.owned(each) for each in (x, dy, dx)]
        if statistics is None or own[0].size < x.size:  # a segment has cells of other tiles too
            own[0] = own[0].copy()  # dx may be the view's memory
            alone = through, *ctx.xp.zeros((2, *through.shape), dy.dtype)
            self.kernels.normalise_back(x, dy, ctx.how, alone, dx)
        if statistics is not None:
            self.kernels.normalise_back(own[0], own[1], ctx.how, (through, *statistics), own[2])
        return dx
