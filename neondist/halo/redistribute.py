"""Redistribution of activations to another grid, or to whole arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

from ..arrays.namespace import to_host
from ..comm import ProcessGrid, Redistribution
from ..geometry import Box, Partition

BoxesForSampleCount = Callable[[int], Sequence[Box]]
"""Returns the box (samples, *spatial, C) of each rank, given the total number of samples."""


def redistribute(tile: Any, grid: ProcessGrid, own: Box, extent: tuple[int, ...], target: BoxesForSampleCount) -> Any:
    """Return this rank's `target` box on the host, given its tile. Collective over all ranks."""
    tiles = grid.partition(extent)
    ends = [0, *accumulate(grid.world.allgather(len(tile))[:: grid.shape.tiles])]
    source_boxes = boxes_by_rank(pairwise(ends), tiles, tile.shape[-1])
    own_cells = tiles.box(grid.tile).relative_to(own)  # tiles may overlap
    own_array = to_host(tile)[(slice(None), *own_cells.slices)]
    return Redistribution(grid.world.all_to_all, grid.rank, source_boxes, target(ends[-1])).forward(own_array)


def boxes_by_rank(sample_ranges: Iterable[tuple[int, int]], tiles: Partition, channels: int) -> list[Box]:
    """Return the box of each rank: the samples of its replica, the cells of its tile, and all channels."""
    tile_boxes = tiles.boxes()
    return [Box((lo, *box.lo, 0), (hi, *box.hi, channels)) for lo, hi in sample_ranges for box in tile_boxes]
