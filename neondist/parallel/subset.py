"""A subset of a model's parameters, trained without the others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

from ..layers import Layer
from ..optim import Optimizer
from .parameters import Parameters
from .sync import are_all_finite


class TrainedSubset:
    """The trained arrays of some layers, as parts of the model's flat buffers.

    Parameters
    ----------
    first_node : int
        The model's first node whose parameters are in the subset.
    """

    def __init__(self, parameters: Parameters, layers: Sequence[Layer], first_node: int) -> None:
        self.parameters, self.first_node = parameters, first_node
        names = {str(layer.name) for layer in layers}
        self.update_mask = [shard.layer_name in names for shard in parameters.trained_shards]

    def sum_gradients(self, to_owners: bool = False, loss_scale: float = 1.0) -> None:
        """Sum gradients, divided by `loss_scale`, over all ranks (for partitioned parameters, over replicas only)."""
        sync, shards = self.parameters.sync, self.parameters.trained_shards
        gradients = self.parameters.split_flat(self.parameters.grads)
        for gradient, shard in compress(zip(gradients, shards, strict=True), self.update_mask):
            if loss_scale != 1:
                gradient /= loss_scale
            sync.reductions.allreduce(shard.parameter.layout.gradient_reduction_group, gradient)
            if shard.is_tiled or shard.full_name in self.parameters.names_with_owners:
                sync.record_finiteness(are_all_finite(gradient))
        sync.publish_flags()

    def update(self, optimizer: Optimizer, slots: dict[str, Any], step: int, rate_factor: float) -> None:
        """Update these parameters using their gradients; `slots` are the optimiser's slots of all parameters."""
        self.parameters.update(optimizer, slots, step, rate_factor, self.update_mask)
