"""Memory layouts of arrays: orders, strides, types and read-only arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

LAYOUTS = ["plain", "fortran", "strided", "reversed", "read only", "integers", "single", "big endian"]


def draw_values(rng: np.random.Generator, shape: tuple[int, ...], layout: str) -> np.ndarray:
    """Return random values that are exact in an array of this layout."""
    if layout == "integers":
        return rng.integers(-4, 5, shape).astype(float)
    return rng.normal(size=shape).astype(np.float32).astype(float)


def apply_layout(array: np.ndarray, layout: str) -> np.ndarray:
    """Return a copy of an array in a layout."""
    array = array.copy()
    if layout == "fortran":
        return np.asfortranarray(array)
    if layout == "strided":
        wide = np.full((*array.shape[:-1], 2 * array.shape[-1]), np.nan)
        wide[..., ::2] = array
        return wide[..., ::2]
    if layout == "reversed":
        reversed_array: np.ndarray = array[:, ::-1].copy()[:, ::-1]
        return reversed_array
    if layout == "read only":
        array.setflags(write=False)
    types: dict[str, Any] = {"integers": np.int32, "single": np.float32, "big endian": ">f8"}
    return array.astype(types.get(layout, float), copy=False)
