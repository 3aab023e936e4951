"""Multi-layer perceptrons."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ConfigError
from ..geometry import GridShape
from ..plan import Plan, prefix_error_with_layer
from .model import Model


class MLP(Model):
    """A network of fully connected and pointwise layers, without windows.

    Inputs are images (N, *spatial, C) or vectors (N, C).
    """

    def plan(self, input_shape: Sequence[int], grid: GridShape | None = None, batch_size: int | None = None) -> Plan:
        """Return the plan; raise ConfigError if a layer has a window."""
        plan = super().plan(input_shape, grid, batch_size)
        for index, layer in enumerate(plan):
            if layer.window is not None:
                error = ConfigError("an MLP cannot contain layers with windows; use Convnet")
                raise prefix_error_with_layer(error, index, layer.layer)
        return plan
