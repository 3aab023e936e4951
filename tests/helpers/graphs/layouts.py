"""Arrays as users have them: of other orders, strides and types, and not to be written to."""

from __future__ import annotations

from typing import Any

import numpy as np

LAYOUTS = ["plain", "fortran", "strided", "reversed", "read only", "integers", "single", "big endian"]


def values(rng: np.random.Generator, shape: tuple[int, ...], layout: str) -> np.ndarray:
    """Return random numbers that an array of this layout can hold."""
    if layout == "integers":
        return rng.integers(-4, 5, shape).astype(float)
    return rng.normal(size=shape).astype(np.float32).astype(float)


def laid_out(array: np.ndarray, layout: str) -> np.ndarray:
    """Return a new array of the same values."""
    array = array.copy()
    if layout == "fortran":
        return np.asfortranarray(array)
    if layout == "strided":
        wide = np.full((*array.shape[:-1], 2 * array.shape[-1]), np.nan)
        wide[..., ::2] = array
        return wide[..., ::2]
    if layout == "reversed":
        turned: np.ndarray = array[:, ::-1].copy()[:, ::-1]
        return turned
    if layout == "read only":
        array.setflags(write=False)
    types: dict[str, Any] = {"integers": np.int32, "single": np.float32, "big endian": ">f8"}
    return array.astype(types.get(layout, float), copy=False)
