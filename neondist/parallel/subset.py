"""Some of a model's parameters, trained without the others."""

from __future__ import annotations

from collections.abc import Sequence
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

    def split_flat(self, flat: Any) -> list[Any]:
        """Return flat views of this subset's arrays in a buffer of the size of all parameters."""
        pairs = zip(self.parameters.split_flat(flat), self.update_mask, strict=True)
        return [array.reshape(-1) for array, selected in pairs if selected]

    def sum_gradients(self, to_owners: bool = False, loss_scale: float = 1.0) -> None:
        """Sum gradients, divided by `loss_scale`, over all ranks (for partitioned parameters, over replicas only)."""
        sync = self.parameters.sync
        pairs = zip(self.parameters.trained_shards, self.update_mask, strict=True)
        shards = [shard for shard, selected in pairs if selected]
        for gradient, shard in zip(self.split_flat(self.parameters.grads), shards, strict=True):
            if loss_scale != 1:
                gradient /= loss_scale
            sync.reductions.allreduce(shard.parameter.layout.gradient_reduction_group, gradient)
            if shard.is_tiled or shard.full_name in self.parameters.names_with_owners:
                sync.record_finiteness(are_all_finite(gradient))
        sync.publish_flags()

    def update(self, optimizer: Optimizer, slots: dict[str, Any], step: int, rate_factor: float) -> None:
        """Update these parameters using their gradients; `slots` are the optimiser's slots of all parameters."""
        self.parameters.update(optimizer, slots, step, rate_factor, self.update_mask)
