"""One array of one layer: its name, and the part of it that this rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..comm import ProcessGrid
from ..geometry import Box
from ..layers import Layer, Parameter
from ..namespace import to_host


@dataclass(frozen=True)
class ParameterShard:
    """A parameter, whole on every rank, or cut over the tiles as its layout says."""

    layer: Layer
    name: str
    parameter: Parameter
    grid: ProcessGrid

    @property
    def full_name(self) -> str:
        """The layer's name, and the array's."""
        return f"{self.layer.name}/{self.name}"

    @property
    def cut(self) -> bool:
        """Whether the parts of tiles differ."""
        return self.parameter.layout.cut

    @property
    def decays(self) -> bool:
        """Whether it is more than a bias, or a scale of a norm."""
        decays = self.parameter.decays
        return len(self.parameter.shape) > 1 if decays is None else decays

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's part."""
        return self.parameter.layout.shape_on(self.parameter.shape, self.grid.shape, self.grid.tile)

    @property
    def unfolded(self) -> tuple[int, ...]:
        """The whole array's shape, in which the ranks' parts are boxes."""
        return self.parameter.layout.unfolded(self.parameter.shape)

    def box(self, tile: int) -> Box:
        """Return the part of a tile's rank."""
        return self.parameter.layout.box(self.parameter.shape, self.grid.shape, tile)

    def part_of(self, whole: Any) -> Any:
        """Return this rank's part of the whole array."""
        return whole.reshape(self.unfolded)[self.box(self.grid.tile).slices].reshape(self.local_shape)

    def slot(self, name: str) -> ParameterShard:
        """Return the shard of an optimiser's array for this parameter."""
        return ParameterShard(self.layer, f"{self.name}/{name}", self.parameter, self.grid)

    def gather(self, array: Any) -> Any:
        """Return a copy of the whole array, NumPy's; collective over the tiles if it is cut."""
        mine = to_host(array)
        if not self.cut:
            return mine.copy()
        whole = np.empty(self.unfolded, mine.dtype)
        for tile, part in enumerate(self.grid.tile_comm.allgather(mine)):
            box = self.box(tile)
            whole[box.slices] = part.reshape(box.shape)
        return whole.reshape(self.parameter.shape)
