"""Tiles of images that are read from their files on access."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np


class LazyTile(ABC):
    """Tile of samples (n, *tile, C), read on access.

    Indexing by one slice selects samples without reading them; slices of samples and of all spatial axes read an array.

    Attributes
    ----------
    shape, dtype : tuple of int, dtype
        Shape and dtype of the array.
    """

    shape: tuple[int, ...]
    dtype: np.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.samples(range(*index.indices(len(self))))
        samples, *cells = index
        bounds = zip(cells, self.shape[1:], strict=False)
        return self.samples(range(*samples.indices(len(self)))).read([slice(*cut.indices(n)) for cut, n in bounds])

    def read_whole(self) -> Any:
        """Read the whole tile as an array."""
        return self.read([slice(0, n) for n in self.shape[1:-1]])

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return prod(self.shape) * self.dtype.itemsize

    @abstractmethod
    def samples(self, indices: range) -> LazyTile:
        """Return the tile of a subset of the samples."""

    @abstractmethod
    def read(self, cells: Sequence[slice]) -> Any:
        """Read cells (n, *cells, C) of all samples as a new array; slices are relative to the tile."""
