"""A distinctive NaN for uninitialised cells: arithmetic propagates it, so its origin can be reported."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from ...geometry import HaloPlan

_MARK_PAYLOAD = 0x2B5EED  # at most 22 bits, so that it is the same in float32 and float64
_MARK_BITS: dict[int, tuple[Any, int]] = {
    4: (np.uint32, 0x7FC00000 | _MARK_PAYLOAD),
    8: (np.uint64, 0x7FF8000000000000 | _MARK_PAYLOAD << 29),
}


def fill_with_mark(array: Any) -> None:
    """Fill a floating-point array with the mark; integer arrays are left unchanged."""
    if array.dtype.kind == "f":
        kind, bits = _MARK_BITS[array.dtype.itemsize]
        array.view(kind)[...] = bits


def mask_of_uninitialised(array: Any) -> Any:
    """Return a mask of the cells that hold the mark, of either sign."""
    if array.dtype.kind != "f":
        return np.zeros(array.shape, bool)
    uint_type, mark_bits = _MARK_BITS[array.dtype.itemsize]
    sign_bit = uint_type(1) << uint_type(8 * array.dtype.itemsize - 1)
    return array.view(uint_type) & ~sign_bit == mark_bits


def bytes_checksum(array: Any) -> int:
    """Return a checksum of an array's bytes, including NaNs."""
    return zlib.crc32(array.tobytes())


def mask_of_unfilled(view: Any, plan: HaloPlan) -> Any:
    """Return a mask of the marked cells of a view, among those that outputs depend on."""
    is_unfilled = mask_of_uninitialised(view)
    if plan.has_unused_cells and plan.used is not None:
        cells_and_origins = zip(plan.used, plan.need.lo, strict=True)
        view_indices = [[cell - first for part in cells for cell in part] for cells, first in cells_and_origins]
        is_used = np.zeros(is_unfilled.shape, bool)
        is_used[np.ix_(range(len(view)), *view_indices, range(view.shape[-1]))] = True
        is_unfilled &= is_used
    return is_unfilled
