"""From an array to the functions that work on it, and to its values on the host."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


def namespace(array: Any) -> Any:
    """Return the array's namespace: NumPy, or one that offers the same functions.

    It is that of the array API standard, or, for arrays that do not name it, as CuPy's, the package of their class.
    """
    if isinstance(array, (np.ndarray, np.generic)):
        return np
    named = getattr(array, "__array_namespace__", None)
    return sys.modules[type(array).__module__.partition(".")[0]] if named is None else named()


def to_host(array: Any) -> np.ndarray:
    """Return an array's values as a NumPy array: itself, where it is one; of a device's a copy, which waits for it."""
    return np.asarray(array) if isinstance(array, (np.ndarray, np.generic)) else namespace(array).asnumpy(array)
