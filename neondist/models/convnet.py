"""Convolutional networks."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ShapeError
from ..geometry import GridShape
from ..plan import Plan
from .model import Model


class Convnet(Model):
    """A convolutional network for images (N, H, W, C), or (N, *spatial, C) in general."""

    def plan(self, input_shape: Sequence[int], grid: GridShape | None = None, batch_size: int | None = None) -> Plan:
        """Return the plan; raise ShapeError if the input is not an image."""
        if len(input_shape) < 2:
            raise ShapeError(f"input_shape {tuple(input_shape)}: a convnet needs (H, W, C); use an MLP for vectors")
        return super().plan(input_shape, grid, batch_size)
