"""Source of the samples of a split for conversion, read once and sequentially, a few at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import DataError

ImagesAndLabels = tuple[np.ndarray, np.ndarray]
BLOCK_BYTES = 1 << 24  # bytes of images in memory at once, or one image if larger


@dataclass(frozen=True)
class SplitSource:
    """Samples of a split, all of one shape, and their labels.

    Attributes
    ----------
    count : number of samples
    shape : (*spatial, C) of a sample
    dtype : dtype of the images
    label_shape : shape of a sample's label: () for classes, (K,) for K targets, or the shape of a map
    label_dtype : dtype of the labels
    read_blocks : called once; yields images (n, *spatial, C) and labels (n, ...)
    class_names : names of the classes, if any
    messages : messages for the user, such as the numbers of files left out
    """

    count: int
    shape: tuple[int, ...]
    dtype: np.dtype
    label_shape: tuple[int, ...]
    label_dtype: np.dtype
    read_blocks: Callable[[], Iterator[ImagesAndLabels]]
    class_names: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()


def samples_per_block(shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Return the number of samples of this shape in a block."""
    return max(1, BLOCK_BYTES // max(1, int(np.prod(shape, dtype=object)) * dtype.itemsize))


def add_channel_axis(path: Path, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape (*spatial, C) of the samples of an array; samples (H, W) get one channel."""
    if len(shape) == 2:
        return (*shape, 1)
    if not 2 < len(shape) < 5 or 0 in shape:
        raise DataError(
            f"{path}: each sample has shape {shape}; expected (H, W), (H, W, C) or (D, H, W, C), without empty axes"
        )
    return shape
