"""Distribution of the outputs that metrics evaluate: the assignment of cells to ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..comm import ProcessGrid, Reductions
from ..errors import ShapeError
from ..formats.fields import FieldMetadata
from ..geometry import Window
from ..halo import GlobalArray


class OutputLayout:
    """Distribution of a model's outputs over the ranks of a grid.

    Parameters
    ----------
    grid : ProcessGrid
    shape : tuple of int
        (*spatial, C), global.
    allreduce : callable, optional
        Function that sums counts over all ranks. Default: no reduction, for a single rank.
    owns_outputs : bool
        Whether this rank counts its outputs; False if another rank already counts these outputs.
    fields : FieldMetadata, optional
        Metadata of the channels, if they are physical fields.
    """

    def __init__(
        self,
        grid: ProcessGrid,
        shape: Sequence[int],
        allreduce: Callable[..., Any] | None = None,
        owns_outputs: bool = True,
        fields: FieldMetadata | None = None,
    ) -> None:
        self.grid, self.shape, self.owns_outputs, self.fields = grid, tuple(shape), owns_outputs, fields
        self._allreduce, self._view_arrays = allreduce, dict[tuple[Window, int, bool], GlobalArray]()
        self._reductions = Reductions(grid)

    @classmethod
    def whole(cls, shape: Sequence[int]) -> OutputLayout:
        """Return the layout of whole outputs on one rank."""
        return cls(ProcessGrid.serial(), shape)

    def sum_over_ranks(self, sums: np.ndarray) -> np.ndarray:
        """Return the sum of all ranks' counts over their own cells. Collective."""
        return sums if self._allreduce is None else self._allreduce(sums, replicas=True)

    def sum_over_replicas(self, sums: np.ndarray) -> np.ndarray:
        """Return the sum over all replicas of sums that are equal on the ranks of a replica. Collective."""
        return self._reductions.allreduce("world", sums if self.grid.tile == 0 else np.zeros_like(sums))

    def sum_over_tiles(self, shape: Sequence[int], sums: np.ndarray) -> np.ndarray:
        """Return the sum over the tiles if the local shape is that of a tile, else `sums`. Collective over tiles."""
        return self._reductions.allreduce("tiles", sums.copy()) if self._is_tile_shape(shape) else sums

    def gather_view(self, tile: np.ndarray, window: Window) -> np.ndarray:
        """Return this rank's part of an array, with the halo that a window needs. Collective."""
        is_tile = self._is_tile_shape(tile.shape)
        key = window, tile.shape[-1], is_tile
        if key not in self._view_arrays:
            grid = self.grid if is_tile else ProcessGrid.serial()
            self._view_arrays[key] = GlobalArray(
                grid, (grid.replicas, *self.shape[:-1], tile.shape[-1]), window, dtype=str(tile.dtype)
            )
        return self._view_arrays[key].get_fprop_view(tile)

    def _is_tile_shape(self, shape: Sequence[int]) -> bool:
        """Return whether outputs are tiles; raise ShapeError if they should be, but have another local shape."""
        extent, local_extent = self.shape[:-1], tuple(shape[1:-1])
        if self.grid.shape.tiles == 1 or not extent:
            return False
        if local_extent == self.grid.tile_box(extent).shape and self.owns_outputs:
            return True
        raise ShapeError(f"outputs of spatial shape {local_extent} are not tiles of {extent}; leave this metric out")
