"""Decoded chunks that are kept, because boxes that are read one after the other share them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

import numpy as np


class ChunkCache:
    """The chunks that were used last, of one source or of several; one thread at a time uses it.

    Parameters
    ----------
    nbytes : int
        What they may take together.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self._held = nbytes, 0
        self._chunks = OrderedDict[Hashable, np.ndarray]()

    def get(self, key: Hashable) -> np.ndarray | None:
        """Return a chunk, if it is there."""
        if (found := self._chunks.get(key)) is not None:
            self._chunks.move_to_end(key)
        return found

    def put(self, key: Hashable, chunk: np.ndarray) -> None:
        """Keep a chunk instead of the least recently used ones."""
        self._chunks[key] = chunk
        self._held += chunk.nbytes
        while self._held > self.nbytes:
            self._held -= self._chunks.popitem(last=False)[1].nbytes
