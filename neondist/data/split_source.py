"""The samples of one split on their way into a file: read once, from front to back, a few at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import DataError

Block = tuple[np.ndarray, np.ndarray]
BLOCK = 1 << 24  # bytes of images that are in memory at once, if one image is not larger


@dataclass(frozen=True)
class SplitSource:
    """Samples of one shape, and their labels.

    Attributes
    ----------
    count : number of samples
    shape : (*spatial, C) of a sample
    dtype : of the images
    label_shape : () of classes, or that of a sample's map
    label_dtype : of the labels
    blocks : called once; yields images (n, *spatial, C) and labels (n, ...)
    names : of the classes, where they have names
    notes : lines to tell, such as what of a source is left out
    """

    count: int
    shape: tuple[int, ...]
    dtype: np.dtype
    label_shape: tuple[int, ...]
    label_dtype: np.dtype
    blocks: Callable[[], Iterator[Block]]
    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def per_block(self) -> int:
        """Number of samples that make a block."""
        return per_block(self.shape, self.dtype)


def per_block(shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Return how many samples of this shape are read at once."""
    return max(1, BLOCK // max(1, int(np.prod(shape, dtype=object)) * dtype.itemsize))


def with_channels(path: Path, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape (*spatial, C) of samples of an array: without channels, (H, W), they have one."""
    if len(shape) == 2:
        return (*shape, 1)
    if not 2 < len(shape) < 5 or 0 in shape:
        raise DataError(f"{path}: samples of shape {shape}; give (N, H, W), (N, H, W, C) or (N, D, H, W, C)")
    return shape
