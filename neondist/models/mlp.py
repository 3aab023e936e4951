"""Multi-layer perceptrons."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ConfigError
from ..geometry import GridShape
from .model import Model
from .plan import ModelPlan, of_layer


class MLP(Model):
    """A network whose layers look at no neighbours: fully connected layers and what goes between them.

    Input images (N, *spatial, C) or vectors (N, C).
    """

    def plan(
        self, input_shape: Sequence[int], grid: GridShape | None = None, batch_size: int | None = None
    ) -> ModelPlan:
        """Return the plan of every layer; ConfigError if one of them has a window."""
        plans = super().plan(input_shape, grid, batch_size)
        for index, (layer, plan) in enumerate(zip(self.leaves, plans, strict=True)):
            if plan.window is not None:
                raise of_layer(ConfigError("an MLP has no layers with windows; use Convnet"), index, layer)
        return plans
