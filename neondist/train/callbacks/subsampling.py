"""Subsampled pictures of tiled images."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...comm import ProcessGrid
from ...geometry import Box


def subsampling_step(extent: Sequence[int], max_extent: int) -> int:
    """Return the subsampling step for at most `max_extent` cells along each axis."""
    return -(-max(extent, default=1) // max_extent)


def sampled_slices(box: Box, step: int) -> tuple[slice, ...]:
    """Return slices of a box's sampled cells, relative to the box."""
    return tuple(slice(-lo % step, None, step) for lo in box.lo)


def assemble_subsampled_images(
    grid: ProcessGrid, box: Box, extent: Sequence[int], step: int, cells: np.ndarray, first_sample: int
) -> np.ndarray:
    """Assemble samples (n, *pixels, ...) on every rank. Collective.

    Parameters
    ----------
    cells : array (m, *pixels, ...)
        Sampled cells in this rank's box, for m images of this `extent`, starting with sample `first_sample`.
    """
    parts_by_rank = grid.world.allgather((first_sample, tuple(-(-lo // step) for lo in box.lo), cells))
    num_samples = max(first_sample + len(part) for first_sample, _, part in parts_by_rank)
    images = np.zeros((num_samples, *(-(-n // step) for n in extent), *cells.shape[1 + len(extent) :]), cells.dtype)
    for first_sample, origin, part in parts_by_rank:
        region = (slice(lo, lo + n) for lo, n in zip(origin, part.shape[1:], strict=False))
        images[(slice(first_sample, first_sample + len(part)), *region)] = part
    return images
