"""Conversion of the raw values of files."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from ..errors import DataError


def white_value(dtype: np.dtype) -> float:
    """Return the value of white in images of a dtype; 1 unless it is an unsigned integer of one or two bytes."""
    return {"u1": 255.0, "u2": 65535.0}.get(dtype.str[1:], 1.0)


def fill_missing(path: str, cells: np.ndarray, fill: float | None) -> np.ndarray:
    """Return cells of a file with NaN replaced by `fill`; DataError for NaN without `fill`, and for infinities."""
    if cells.dtype.kind != "f" or np.isfinite(cells.sum(dtype=np.float64)):
        return cells
    missing = np.isnan(cells)
    if np.isinf(cells).any():
        raise DataError(f"{path}: has infinite values; replace them with NaN and set the data set's fill")
    if not missing.any():
        return cells
    if fill is None:
        raise DataError(f"{path}: has missing values (NaN); replace them in the file, or set the data set's fill")
    return np.where(missing, fill, cells).astype(cells.dtype)


def normalise(raw: ArrayLike, factor: Sequence[float], subtrahend: Sequence[float], dtype: DTypeLike) -> np.ndarray:
    """Return raw * factor - subtrahend, contiguous: `raw` is (n, *tile, C), the others have 1 or C numbers."""
    raw, out = np.asarray(raw), np.empty(np.shape(raw), dtype)
    scale, shift = np.asarray(factor, out.dtype), np.asarray(subtrahend, out.dtype)
    flat_raw, flat_out = raw, out
    if max(scale.size, shift.size) > 1 and raw.size and raw.ndim > 2 and raw.flags.c_contiguous:
        flat_raw, flat_out = raw.reshape(*raw.shape[:-2], -1), out.reshape(*raw.shape[:-2], -1)  # short axes are slow
        scale, shift = np.resize(scale, flat_raw.shape[-1]), np.resize(shift, flat_raw.shape[-1])
    np.multiply(flat_raw, scale, out=flat_out, dtype=out.dtype, casting="unsafe")
    if shift.any():
        flat_out -= shift
    return out
