"""Chunk shapes of image arrays on disk."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log, prod

from ..geometry import part_range

_MIN_CHUNK_BYTES, _MAX_CHUNK_BYTES = 1 << 14, 1 << 20  # small chunks cause overhead, large ones excess reads
_CHUNKS_PER_IMAGE = 256  # target chunks per image, within these bounds
_SMALL_IMAGE_BYTES = 1 << 16  # up to this size, four tiles along one axis are not considered
# by number of tiles along an axis: maximum of the cells read by all tiles, relative to the axis; 2 x 2 tiles: 1.19
_MAX_READ_RATIOS = {2: 1.09, 4: 1.2}


def chunk_shape(spatial_shape: Sequence[int], channels: int, itemsize: int) -> tuple[int, ...]:
    """Return the chunk shape (1, *spatial, C) for images (N, *spatial, C): a box of one image, all channels.

    A rank reads every chunk that its tile overlaps, so chunks across a tile border are read twice. Along each axis,
    chunks are aligned with tiles, or so small that reading some of them twice costs little: four tiles, 2 x 2 or (for
    all but small images) in a row, read at most 1.2 times the image in total.
    """
    image_bytes = prod(spatial_shape) * channels * itemsize
    num_chunks = image_bytes / min(max(image_bytes / _CHUNKS_PER_IMAGE, _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES)
    chunks_per_axis = max(1.0, num_chunks) ** (1 / len(spatial_shape))
    max_read_ratios = _MAX_READ_RATIOS if image_bytes > _SMALL_IMAGE_BYTES else {2: _MAX_READ_RATIOS[2]}
    return (1, *(_chunk_extent(n, n / chunks_per_axis, max_read_ratios) for n in spatial_shape), channels)


def count_cells_read(extent: int, chunk: int, num_tiles: int) -> int:
    """Return the number of cells read by `num_tiles` tiles of an axis of `extent` cells in chunks of `chunk` cells."""
    cells_read = 0
    for lo, hi in (part_range(extent, num_tiles, tile) for tile in range(num_tiles)):
        if hi > lo:
            cells_read += min(extent, ceil(hi / chunk) * chunk) - lo // chunk * chunk
    return cells_read


def _chunk_extent(extent: int, target_extent: float, max_read_ratios: dict[int, float]) -> int:
    candidates = range(max(1, int(target_extent / 8)), min(extent, int(target_extent * 8)) + 1)
    allowed_extents = [
        c
        for c in {*candidates, ceil(extent / 2), max(1, extent // 16)}
        if all(count_cells_read(extent, c, p) <= ratio * extent for p, ratio in max_read_ratios.items())
    ]

    def cost(chunk: int) -> float:
        excess_3, excess_4 = (count_cells_read(extent, chunk, num_tiles) / extent - 1 for num_tiles in (3, 4))
        return abs(log(chunk / target_extent)) + excess_3 + excess_4

    return min(sorted(allowed_extents), key=cost)
