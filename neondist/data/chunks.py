"""The chunks of an array of images: what the disk gives at once."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log, prod

from ..geometry import split

_LEAST, _MOST = 1 << 14, 1 << 20  # bytes of a chunk: below, its own cost counts; above, a tile's border does
_PIECES = 256  # chunks of an image between these bounds
_SMALL = 1 << 16  # bytes of an image too small to be cut into rows of tiles
_EXCESS = {2: 1.09, 4: 1.2}  # what so many tiles along one axis may read in all; 2 x 2 tiles then read 1.19


def chunk_shape(spatial: Sequence[int], channels: int, itemsize: int) -> tuple[int, ...]:
    """Return the chunk's shape (1, *spatial, C) for images (N, *spatial, C): one image, all channels of some cells.

    A rank reads every chunk that its tile touches, so chunks that lie across a border are read twice. Along each axis
    the chunks either meet where tiles meet, or are so small that reading one twice is little: four tiles, 2 x 2 or (of
    all but small images) in a row, read at most 1.2 images.
    """
    whole = prod(spatial) * channels * itemsize
    pieces = whole / min(max(whole / _PIECES, _LEAST), _MOST)
    along = max(1.0, pieces) ** (1 / len(spatial))
    bounds = _EXCESS if whole > _SMALL else {2: _EXCESS[2]}
    return (1, *(_extent(n, n / along, bounds) for n in spatial), channels)


def cells_read(n: int, chunk: int, parts: int) -> int:
    """Return the cells that `parts` tiles of an axis of n cells read in all, from chunks of `chunk` cells."""
    total = 0
    for lo, hi in (split(n, parts, part) for part in range(parts)):
        if hi > lo:
            total += min(n, ceil(hi / chunk) * chunk) - lo // chunk * chunk
    return total


def _extent(n: int, wanted: float, bounds: dict[int, float]) -> int:
    near = range(max(1, int(wanted / 8)), min(n, int(wanted * 8)) + 1)
    good = [
        c
        for c in {*near, ceil(n / 2), max(1, n // 16)}
        if all(cells_read(n, c, p) <= most * n for p, most in bounds.items())
    ]

    def cost(chunk: int) -> float:
        thirds, quarters = (cells_read(n, chunk, parts) / n - 1 for parts in (3, 4))
        return abs(log(chunk / wanted)) + thirds + quarters

    return min(sorted(good), key=cost)
