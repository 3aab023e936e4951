"""Cache of decoded chunks, shared by reads of overlapping boxes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

import numpy as np


class ChunkCache:
    """Least-recently-used cache of chunks of one or several sources; not thread-safe.

    Parameters
    ----------
    capacity_bytes : int
        Maximum total size of the cached chunks.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes, self._cached_bytes = capacity_bytes, 0
        self._chunks = OrderedDict[Hashable, np.ndarray]()

    @property
    def nbytes(self) -> int:
        """Bytes of the cached chunks."""
        return self._cached_bytes

    def get(self, key: Hashable) -> np.ndarray | None:
        """Return a chunk, or None if it is not cached."""
        if (chunk := self._chunks.get(key)) is not None:
            self._chunks.move_to_end(key)
        return chunk

    def put(self, key: Hashable, chunk: np.ndarray) -> None:
        """Add a chunk, and evict the least recently used chunks while the capacity is exceeded."""
        self._chunks[key] = chunk
        self._cached_bytes += chunk.nbytes
        while self._cached_bytes > self.capacity_bytes:
            self._cached_bytes -= self._chunks.popitem(last=False)[1].nbytes
