"""Default chunk sizes of new files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_CHUNK_EXTENT_BY_NDIM = {1: 1 << 16, 2: 256, 3: 64}  # along each axis, by the number of spatial axes
_MAX_CHUNK_BYTES = 1 << 23


def default_chunks(shape: Sequence[int], axes: str, dtype: Any, target_bytes: int = 0) -> tuple[int, ...]:
    """Return the shape of chunks of 65536, 256 x 256 or 64 x 64 x 64 cells with all channels.

    Chunks above 8 MiB are made smaller, and chunks below `target_bytes` are enlarged.
    """
    spatial_axes = [axis for axis, name in enumerate(axes) if name in "ZYX"]
    num_spatial, cell_bytes = max(1, len(spatial_axes)), shape[-1] * np.dtype(dtype).itemsize
    side = _CHUNK_EXTENT_BY_NDIM[num_spatial]
    while side > 16 and side**num_spatial * cell_bytes > _MAX_CHUNK_BYTES:
        side //= 2
    while (2 * side) ** num_spatial * cell_bytes <= target_bytes:
        side *= 2
    return (*(min(n, side) if axis in spatial_axes else 1 for axis, n in enumerate(shape[:-1])), shape[-1])
