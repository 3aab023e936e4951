"""Images that are read where they are needed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np


class LazyTile(ABC):
    """This rank's tile of some samples (n, *tile, C), of which cells are read when they are asked for.

    Indexing with a slice gives fewer samples, still unread; with slices for the samples and all spatial axes, an array.

    Attributes
    ----------
    shape, dtype : as of the array that it stands for
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

    def whole(self) -> Any:
        """Return all of it as an array."""
        return self.read([slice(0, n) for n in self.shape[1:-1]])

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return prod(self.shape) * self.dtype.itemsize

    @abstractmethod
    def samples(self, numbers: range) -> LazyTile:
        """Return some of the samples."""

    @abstractmethod
    def read(self, cells: Sequence[slice]) -> Any:
        """Return cells (n, *cells, C) of all samples, a new array; slices count from the tile's first cell."""
