"""From an array to the functions that work on it."""

from __future__ import annotations

from typing import Any

import numpy as np


def namespace(array: Any) -> Any:
    """Return the array's namespace, as the array API standard has it: NumPy, or one that offers the same functions."""
    return np if isinstance(array, (np.ndarray, np.generic)) else array.__array_namespace__()
