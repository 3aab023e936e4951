"""Dropout."""

from __future__ import annotations

from typing import Any

from .. import rng
from ..errors import ConfigError
from .base import Dist, Layer


class DropoutLayer(Layer):
    """Zeroes cells with probability `rate` while training, and scales the others by 1 / (1 - rate) (Srivastava 2014).

    The mask is a function of seed, layer, step and the cell's GLOBAL index, so it is the same on every grid. Input and
    output (N, *spatial, C), local.
    """

    def __init__(self, rate: float = 0.5, name: str | None = None) -> None:
        super().__init__(name)
        if not 0 <= rate < 1:
            raise ConfigError(f"rate {rate}: needs a probability in [0, 1)")
        self.rate = rate

    def forward(self, view: Any) -> Any:
        """Return the masked cells; in evaluation, all of them."""
        self.mask = self._mask(len(view)) if self.phase.training and self.rate else None
        return view if self.mask is None else view * self.mask

    def backward(self, dy: Any) -> Any:
        """Return the masked gradient."""
        return dy if self.mask is None else dy * self.mask

    def _mask(self, samples: int) -> Any:
        first = self.phase.first_sample
        whole = (first + samples, *self.input_shape)
        cells = (slice(first, first + samples), *self.input.own.slices, slice(None))
        stream = rng.key(self.context.seed, "dropout", str(self.name), self.phase.step)
        kept = rng.at_least(self.rate, stream, rng.box_index(whole, cells))
        return kept * self.context.dtype.type(1 / (1 - self.rate))


class DropoutLayerDist(Dist, DropoutLayer):
    """Dropout over tiles."""
