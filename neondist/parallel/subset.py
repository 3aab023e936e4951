"""Some of a model's parameters, trained without the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..layers import Layer
from ..optim import Optimizer
from .parameters import Parameters
from .sync import finite


class TrainedSubset:
    """The trained arrays of some layers, as parts of the model's flat buffers.

    Parameters
    ----------
    first : int
        The model's node where the part begins.
    """

    def __init__(self, parameters: Parameters, layers: Sequence[Layer], first: int) -> None:
        self.parameters, self.first = parameters, first
        self.chosen = [shard.layer in layers for shard in parameters.trained]

    def cut(self, flat: Any) -> list[Any]:
        """Return this part's arrays in a buffer as long as all parameters, each flat, as views."""
        pairs = zip(self.parameters.cut(flat), self.chosen, strict=True)
        return [array.reshape(-1) for array, mine in pairs if mine]

    def sum_gradients(self) -> None:
        """Add up every rank's share; what is cut over the tiles, over the replicas alone."""
        sync = self.parameters.sync
        shards = [shard for shard, mine in zip(self.parameters.trained, self.chosen, strict=True) if mine]
        for gradient, shard in zip(self.cut(self.parameters.grads), shards, strict=True):
            sync.reductions.allreduce(shard.parameter.layout.group, gradient)
            if shard.cut:
                sync.note(finite(gradient))
        sync.tell()

    def update(self, optimizer: Optimizer, slots: dict[str, Any], step: int, scale: float) -> None:
        """Change these parameters by their gradients; `slots` are as long as all parameters."""
        self.parameters.version += 1
        parameters = self.parameters
        optimizer.update(parameters.values, parameters.grads, slots, step, scale, parameters.layout(self.chosen))
