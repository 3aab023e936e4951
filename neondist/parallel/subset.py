"""Some of a model's parameters, trained without the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..layers import Layer
from ..optim import Optimizer
from .parameters import Parameters
from .sync import is_finite


class TrainedSubset:
    """The trained arrays of some layers, as parts of the model's flat buffers.

    Parameters
    ----------
    first : int
        The model's first node of the subset.
    """

    def __init__(self, parameters: Parameters, layers: Sequence[Layer], first: int) -> None:
        self.parameters, self.first = parameters, first
        names = {str(layer.name) for layer in layers}
        self.is_chosen = [shard.layer in names for shard in parameters.trained]

    def split_flat(self, flat: Any) -> list[Any]:
        """Return this part's arrays in a buffer as long as all parameters, each flat, as views."""
        pairs = zip(self.parameters.split_flat(flat), self.is_chosen, strict=True)
        return [array.reshape(-1) for array, selected in pairs if selected]

    def sum_gradients(self, for_update: bool = False, loss_scale: float = 1.0) -> None:
        """Sum the shares of all ranks, divided by `loss_scale`; shares cut over the tiles, over the replicas."""
        sync = self.parameters.sync
        shards = [shard for shard, selected in zip(self.parameters.trained, self.is_chosen, strict=True) if selected]
        for gradient, shard in zip(self.split_flat(self.parameters.grads), shards, strict=True):
            if loss_scale != 1:
                gradient /= loss_scale
            sync.reductions.allreduce(shard.parameter.layout.group, gradient)
            if shard.is_tiled or shard.full_name in self.parameters.owned_names:
                sync.record_finiteness(is_finite(gradient))
        sync.publish_flags()

    def update(self, optimizer: Optimizer, slots: dict[str, Any], step: int, scale: float) -> None:
        """Update these parameters by their gradients; `slots` are those of all parameters."""
        self.parameters.update(optimizer, slots, step, scale, self.is_chosen)
