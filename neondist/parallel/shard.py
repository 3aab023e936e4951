"""One array of a model: its name, and this rank's part of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays.namespace import to_host
from ..comm import ProcessGrid
from ..geometry import Box
from ..layers import Parameter
from ..strategies.shares import OwnerBoxes


@dataclass(frozen=True)
class ParameterShard:
    """A parameter: whole on every rank, partitioned over tiles according to its layout, or divided among owners.

    Attributes
    ----------
    layer_name : str
        The name of the layer, or of the module.
    share : OwnerBoxes, optional
        The owners' parts, if the parameter has owners.
    """

    layer_name: str
    name: str
    parameter: Parameter
    grid: ProcessGrid
    share: OwnerBoxes | None = None

    @property
    def full_name(self) -> str:
        """Full name, '<layer name>/<array name>'."""
        return f"{self.layer_name}/{self.name}"

    @property
    def is_tiled(self) -> bool:
        """Whether each tile has its own part of the array."""
        return self.parameter.layout.is_partitioned and self.grid.shape.tiles > 1

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: by default only to arrays of more than one axis."""
        decays = self.parameter.decays
        return len(self.parameter.shape) > 1 if decays is None else decays

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's part."""
        if self.share is not None:
            return self.box.shape
        return self.parameter.layout.shape_on(self.parameter.shape, self.grid.shape, self.grid.tile)

    @property
    def unflattened_shape(self) -> tuple[int, ...]:
        """Shape to which the whole array is reshaped, so that the ranks' parts are boxes."""
        return self.parameter.layout.unflattened_shape(self.parameter.shape) if self.share is None else self.share.shape

    @property
    def boxes(self) -> list[Box]:
        """Box of each rank's part; a single box if every rank has the whole array."""
        if self.share is not None:
            return list(self.share.boxes)
        shape, tiles = self.grid.shape, self.grid.shape.tiles
        ranks = range(self.grid.size if self.is_tiled else 1)
        return [self.parameter.layout.box(self.parameter.shape, shape, rank % tiles) for rank in ranks]

    @property
    def box(self) -> Box:
        """Box of this rank's part."""
        if self.share is not None:
            return self.share.boxes[self.grid.rank]
        return self.parameter.layout.box(self.parameter.shape, self.grid.shape, self.grid.tile)

    def own_part_of(self, whole: Any) -> Any:
        """Return this rank's part of the whole array."""
        return whole.reshape(self.unflattened_shape)[self.box.slices].reshape(self.local_shape)

    def slot_shard(self, slot_name: str, share: OwnerBoxes | None = None) -> ParameterShard:
        """Return the shard of an optimiser's array for this parameter; `share`: the owners' parts, if any."""
        return ParameterShard(self.layer_name, f"{self.name}/{slot_name}", self.parameter, self.grid, share)

    def gather(self, array: Any) -> Any:
        """Return a copy of the whole array as a NumPy array. Collective if ranks have different parts."""
        own_part, boxes = to_host(array), self.boxes
        if len(boxes) == 1:
            return own_part.reshape(self.parameter.shape).copy()
        whole = np.empty(self.unflattened_shape, own_part.dtype)
        group = self.grid.tile_comm if self.share is None else self.grid.world
        for box, part in zip(boxes, group.allgather(own_part), strict=False):  # replicas have the same tiles
            whole[box.slices] = part.reshape(box.shape)
        return whole.reshape(self.parameter.shape)
