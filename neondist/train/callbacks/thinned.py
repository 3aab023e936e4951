"""Small pictures of images that lie in tiles on several ranks: every s-th cell of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...comm import ProcessGrid
from ...geometry import Box


def step_for(extent: Sequence[int], pixels: int) -> int:
    """Return how far apart cells are shown, so that no axis has more pixels."""
    return -(-max(extent, default=1) // pixels)


def shown(box: Box, step: int) -> tuple[slice, ...]:
    """Return which cells of a box are, from its first one on."""
    return tuple(slice(-lo % step, None, step) for lo in box.lo)


def pasted(grid: ProcessGrid, box: Box, extent: Sequence[int], step: int, cells: np.ndarray, first: int) -> np.ndarray:
    """Return samples (n, *pixels, ...) on every rank; collective.

    Parameters
    ----------
    cells : array (m, *pixels, ...)
        Those that are shown of this rank's box of the images `extent`, of m samples from the `first` on.
    """
    parts = grid.world.allgather((first, tuple(-(-lo // step) for lo in box.lo), cells))
    count = max(first + len(part) for first, _, part in parts)
    out = np.zeros((count, *(-(-n // step) for n in extent), *cells.shape[1 + len(extent) :]), cells.dtype)
    for first, place, part in parts:
        cut = (slice(lo, lo + n) for lo, n in zip(place, part.shape[1:], strict=False))
        out[(slice(first, first + len(part)), *cut)] = part
    return out
