"""From an array to the functions that work on it, and to its values on the host."""

from __future__ import annotations

from typing import Any

import numpy as np


def namespace(array: Any) -> Any:
    """Return the array's namespace, as the array API standard has it: NumPy, or one that offers the same functions."""
    return np if isinstance(array, (np.ndarray, np.generic)) else array.__array_namespace__()


def to_host(array: Any) -> np.ndarray:
    """Return an array's values as a NumPy array: itself, where it is one; of a device's a copy, which waits for it."""
    return np.asarray(array) if isinstance(array, (np.ndarray, np.generic)) else namespace(array).asnumpy(array)
