"""One array of one layer: its name, and the part of it that this rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..comm import ProcessGrid
from ..layers import Layer, Parameter


@dataclass(frozen=True)
class Entry:
    """A parameter, whole on every rank, or cut like the layer's output."""

    layer: Layer
    name: str
    parameter: Parameter
    grid: ProcessGrid

    @property
    def full_name(self) -> str:
        """The layer's name, and the array's."""
        return f"{self.layer.name}/{self.name}"

    @property
    def slices(self) -> tuple[slice, ...]:
        """Where this rank's part lies in the whole array."""
        return self.part(self.grid.tile)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's part."""
        return tuple(part.stop - part.start for part in self.slices)

    def slot(self, name: str) -> Entry:
        """Return the entry of an optimiser's array for this parameter."""
        return Entry(self.layer, f"{self.name}/{name}", self.parameter, self.grid)

    def gather(self, array: Any) -> Any:
        """Return a copy of the whole array; collective over the tiles if it is cut."""
        if not self.parameter.tiled:
            return array.copy()
        whole = np.empty(self.parameter.shape, array.dtype)
        for tile, part in enumerate(self.grid.tile_comm.allgather(array)):
            whole[self.part(tile)] = part
        return whole

    def part(self, tile: int) -> tuple[slice, ...]:
        """Return where the part of a tile's rank lies in the whole array."""
        shape = self.parameter.shape
        if not self.parameter.tiled:
            return tuple(slice(0, n) for n in shape)
        box = self.grid.partition(self.layer.output_shape[:-1]).box(tile)
        return (*box.slices, *(slice(0, n) for n in shape[box.ndim :]))
