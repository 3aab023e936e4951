"""What callers give, as arrays of the kind that layers work on."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import ShapeError


def real_array(name: str, array: Any, dtype: np.dtype, copy: bool = False) -> np.ndarray:
    """Return what a caller gave as a contiguous array of the model's dtype: itself, where it is one, or a copy.

    Raises
    ------
    ShapeError
        These are no real numbers.
    """
    given = np.asarray(array)
    if given.dtype.kind not in "biuf":
        raise ShapeError(f"{name} of dtype {given.dtype}: give real numbers")
    return np.array(given, dtype, order="C") if copy else np.ascontiguousarray(given, dtype)
