"""Copy of an array surrounded by marks, passed to a layer in its place."""

from __future__ import annotations

from typing import Any

import numpy as np

from .mark import fingerprint, mark

_ALIGNED = 64
_MOAT = 4096


class Shadow:
    """A copy with the array's own strides and alignment, so that kernels compute exactly the same.

    Memory before, after and between its cells is marked, so reads out of bounds return marks.

    Parameters
    ----------
    array : array of any strides
    """

    def __init__(self, array: Any) -> None:
        self.like = _layout(array)
        before, after = _reach(array)
        moat = max(_MOAT, 2 * max(map(abs, array.strides[1:]), default=0))
        moat += -moat % _ALIGNED
        self.memory = np.empty(before + after + 2 * moat + 2 * _ALIGNED, np.uint8)
        first = moat + before
        first += (array.ctypes.data - self.memory.ctypes.data - first) % _ALIGNED
        self.array = np.ndarray(array.shape, array.dtype, self.memory, first, array.strides)
        self.cells = self.memory[first % array.itemsize :]
        self.cells = self.cells[: len(self.cells) // array.itemsize * array.itemsize].view(array.dtype)
        self.fill(array)

    def fill(self, array: Any) -> None:
        """Copy the array."""
        mark(self.cells)
        self.array[...] = array
        self.sum = fingerprint(self.array)

    @property
    def changed(self) -> bool:
        """Whether the copy has been modified."""
        return fingerprint(self.array) != self.sum


def shadow_of(array: Any, before: Shadow | None) -> Shadow:
    """Return a shadow of the array, reusing `before`, which is no longer needed, if it fits."""
    if before is None or before.like != _layout(array):
        return Shadow(array)
    before.fill(array)
    return before


def _layout(array: Any) -> tuple:
    return array.shape, array.strides, array.dtype, array.ctypes.data % _ALIGNED


def _reach(array: Any) -> tuple[int, int]:
    """Return the bytes that the cells occupy before and after the first one's address."""
    spans = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True) if n]
    return -sum(span for span in spans if span < 0), sum(span for span in spans if span > 0) + array.itemsize
