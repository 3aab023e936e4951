"""Activations that are there already, cut anew: for another grid, or whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from ..comm import Redistribution
from ..errors import GridError, ShapeError
from ..geometry import Box, Partition, split
from ..namespace import to_host

if TYPE_CHECKING:
    from .global_array import GlobalArray


def onto(tile: Any, source: GlobalArray, target: GlobalArray) -> Any:
    """Return this rank's tile of `target`, given that of `source`; collective over all ranks."""
    (here, shape), (there, other) = ((array.grid.size, array.global_shape[1:]) for array in (source, target))
    if here != there:
        raise GridError(f"redistribute: the grids have {here} and {there} ranks; make both over one communicator")
    if shape != other:
        raise ShapeError(f"redistribute: samples of shape {shape} and {other}; give arrays of one shape")
    replicas = target.grid.replicas

    def boxes(samples: int) -> list[Box]:
        return _boxes((split(samples, replicas, at) for at in range(replicas)), target.tiles, target.channels)

    return target.backend.from_host(_moved(tile, source, boxes), target.dtype)


def assembled(tile: Any, source: GlobalArray) -> Any:
    """Return the whole array (N, *spatial, C) on every rank; collective over all ranks."""
    size, shape = source.grid.size, source.global_shape[1:]
    found = _moved(tile, source, lambda samples: [Box.of((samples, *shape))] * size)
    return source.backend.from_host(found, source.dtype)


def _moved(tile: Any, source: GlobalArray, target: Callable[[int], Sequence[Box]]) -> Any:
    """Return this rank's part, where `target` tells the boxes of all ranks for so many samples."""
    grid, tiles = source.grid, source.grid.partition(source.extent)
    source.check_tile("tile", tile)
    ends = [0, *accumulate(grid.world.allgather(len(tile))[:: grid.shape.tiles])]
    cut = _boxes(pairwise(ends), tiles, source.channels)
    mine = tiles.box(grid.tile).relative_to(source.own)  # of tiles that overlap
    part = to_host(tile)[(slice(None), *mine.slices)]
    return Redistribution(grid.world.all_to_all, grid.rank, cut, target(ends[-1])).forward(part)


def _boxes(samples: Iterable[tuple[int, int]], tiles: Partition, channels: int) -> list[Box]:
    """Return the box of each rank: samples of its replica, cells of its tile, all channels."""
    cells = tiles.boxes()
    return [Box((lo, *box.lo, 0), (hi, *box.hi, channels)) for lo, hi in samples for box in cells]
