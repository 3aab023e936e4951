"""Copy of an array surrounded by marks, passed to a layer in place of the array."""

from __future__ import annotations

from typing import Any

import numpy as np

from .mark import bytes_checksum, fill_with_mark

_ALIGNMENT_BYTES = 64
_MARGIN_BYTES = 4096


class GuardedCopy:
    """A copy with the array's own strides and alignment, for bit-for-bit equal results of kernels.

    Memory before, after and between its cells is marked, so out-of-bounds reads return marks.

    Parameters
    ----------
    array : array of any strides
    """

    def __init__(self, array: Any) -> None:
        bytes_before, bytes_after = _byte_range_from_origin(array)
        margin_bytes = max(_MARGIN_BYTES, 2 * max(map(abs, array.strides[1:]), default=0))
        margin_bytes += -margin_bytes % _ALIGNMENT_BYTES
        self.memory = np.empty(bytes_before + bytes_after + 2 * margin_bytes + 2 * _ALIGNMENT_BYTES, np.uint8)
        array_start = margin_bytes + bytes_before
        array_start += (array.ctypes.data - self.memory.ctypes.data - array_start) % _ALIGNMENT_BYTES
        self.array = np.ndarray(array.shape, array.dtype, self.memory, array_start, array.strides)
        self.cells_with_guards = self.memory[array_start % array.itemsize :]
        self.cells_with_guards = self.cells_with_guards[
            : len(self.cells_with_guards) // array.itemsize * array.itemsize
        ].view(array.dtype)
        fill_with_mark(self.cells_with_guards)
        self.array[...] = array
        self.checksum = bytes_checksum(self.array)

    @property
    def changed(self) -> bool:
        """Whether the copy has been modified."""
        return bytes_checksum(self.array) != self.checksum


def _byte_range_from_origin(array: Any) -> tuple[int, int]:
    """Return the bytes that the cells occupy before the address of the first cell, and from that address on."""
    byte_spans = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True) if n]
    return -sum(span for span in byte_spans if span < 0), sum(span for span in byte_spans if span > 0) + array.itemsize
