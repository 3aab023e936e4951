"""One array of one layer: its name, and the part of it that this rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..comm import ProcessGrid
from ..layers import Layer, Parameter
from ..layers.layout import Strip
from ..namespace import to_host


@dataclass(frozen=True)
class Entry:
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
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's part."""
        return self.parameter.layout.shape_on(self.parameter.shape, self.grid.shape, self.grid.tile)

    @property
    def mine(self) -> list[Strip]:
        """Where this rank's part lies in the whole array."""
        return self.strips(self.grid.tile)

    def slot(self, name: str) -> Entry:
        """Return the entry of an optimiser's array for this parameter."""
        return Entry(self.layer, f"{self.name}/{name}", self.parameter, self.grid)

    def gather(self, array: Any) -> Any:
        """Return a copy of the whole array, NumPy's; collective over the tiles if it is cut."""
        mine = to_host(array)
        if not self.cut:
            return mine.copy()
        whole = np.empty(self.parameter.shape, mine.dtype)
        for tile, part in enumerate(self.grid.tile_comm.allgather(mine)):
            for here, there in self.strips(tile):
                whole[there] = part[here]
        return whole

    def strips(self, tile: int) -> list[Strip]:
        """Return where the part of a tile's rank lies in the whole array."""
        return self.parameter.layout.strips(self.parameter.shape, self.grid.shape, tile)
