"""Distribution of global arrays over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ...geometry import Box
from ...parallel import ParameterShard

MAX_TRANSFER_BYTES = 4 << 20  # bytes per transfer
Slices = tuple[slice, ...]


@dataclass(frozen=True)
class ArrayPart:
    """This rank's part of a global array.

    Attributes
    ----------
    name : str
    global_shape : tuple of int
        Shape of the whole array, as in the file.
    local_array : ndarray
        This rank's part, with the shape of its box.
    boxes : sequence of Box
        Part of each rank; a single box if all ranks have the whole array.
    unflattened_shape : tuple of int, optional
        Shape in which the parts are boxes: several axes of `global_shape` may be merged into one, or parts may be
        ranges of the flat array, (size,).
    """

    name: str
    global_shape: tuple[int, ...]
    local_array: Any
    boxes: Sequence[Box]
    unflattened_shape: tuple[int, ...] | None = None

    @classmethod
    def of(cls, shard: ParameterShard, array: Any, group: str) -> ArrayPart:
        """Return this rank's part of a layer's array, named '<group>/<layer name>/<parameter>'."""
        own_part = array.reshape(shard.box.shape)  # a view
        return cls(
            f"{group}/{shard.full_name}", tuple(shard.parameter.shape), own_part, shard.boxes, shard.unflattened_shape
        )

    @property
    def dtype(self) -> np.dtype:
        """The array's dtype, in native byte order."""
        return np.dtype(self.local_array.dtype)

    def blocks(self) -> Iterator[tuple[Box, Slices]]:
        """Yield the blocks of the global array in order: each as a box, and as slices of the file's array."""
        full_shape = self.global_shape if self.unflattened_shape is None else self.unflattened_shape
        if len(self.global_shape) != 1 and full_shape == (prod(self.global_shape),):
            for block in split_into_blocks(self.global_shape, max(1, MAX_TRANSFER_BYTES // self.dtype.itemsize)):
                flat_start = int(np.ravel_multi_index(block.lo, self.global_shape)) if self.global_shape else 0
                yield Box((flat_start,), (flat_start + block.size,)), block.slices
            return
        num_merged_axes = len(full_shape) - len(self.global_shape) + 1  # number of axes merged into the first one
        for block in split_into_blocks(full_shape, max(1, MAX_TRANSFER_BYTES // self.dtype.itemsize)):
            file_slices = block.slices
            if num_merged_axes > 1:
                row = int(np.ravel_multi_index(block.lo[:num_merged_axes], full_shape[:num_merged_axes]))
                file_slices = slice(row, row + prod(block.shape[:num_merged_axes])), *file_slices[num_merged_axes:]
            yield block, file_slices


def split_into_blocks(shape: Sequence[int], max_cells: int) -> Iterator[Box]:
    """Split an array of this shape into contiguous boxes of at most `max_cells` cells, and yield them in order."""
    if 0 in shape:
        return
    axis = next((at for at in range(len(shape)) if prod(shape[at + 1 :]) <= max_cells), len(shape))
    if axis == len(shape):  # scalar
        yield Box((), ())
        return
    step = max(1, max_cells // prod(shape[axis + 1 :]))
    inner_shape = shape[axis + 1 :]
    for outer in np.ndindex(*shape[:axis]):
        for lo in range(0, shape[axis], step):
            hi = min(lo + step, shape[axis])
            yield Box((*outer, lo, *(0 for _ in inner_shape)), (*(i + 1 for i in outer), hi, *inner_shape))
