"""Dropout."""

from __future__ import annotations

from typing import Any

from ..registry.ranges import UnitInterval
from .base import Dist, Layer
from .context import StepContext


class DropoutLayer(Layer):
    """Dropout of cells with probability `rate` in training (Srivastava et al. 2014).

    Other cells are scaled by 1 / (1 - rate). The mask is a function of seed, layer, step and the cell's global index,
    so it is the same on every grid. Input and output (N, *spatial, C) per tile.
    """

    saves_input = saves_output = False
    saved_bytes_and_elements = (1, 0)
    step_dependent = True

    def __init__(self, rate: UnitInterval = 0.5, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self.rate = rate

    def forward(self, ctx: StepContext, view: Any) -> Any:
        """Return the masked cells; in evaluation, all of them."""
        if not ctx.training or not self.rate:
            ctx.save(mask=None)
            return view
        ctx.save(mask=ctx.random("dropout").mask_at_least(self.rate))
        return self._apply_mask(ctx, view)

    def backward(self, ctx: StepContext, dy: Any) -> Any:
        """Return the masked gradient."""
        return dy if ctx.mask is None else self._apply_mask(ctx, dy)

    def _apply_mask(self, ctx: StepContext, array: Any) -> Any:
        result = ctx.xp.multiply(array, array.dtype.type(1 / (1 - self.rate)), out=ctx.out)
        result *= ctx.mask
        return result


class DropoutLayerDist(Dist, DropoutLayer):
    """Dropout over tiles."""
