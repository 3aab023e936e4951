"""Images whose channels come from several files, such as the bands of a scene or the modalities of a scan."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from ..errors import DataError
from .axes import BoxLike, Cells, box_to_slices
from .base import TileSource
from .cache import ChunkCache
from .conventions import AuxiliaryVariable


def split_stack_name(name: str) -> list[str]:
    """Split a list 'FILE,FILE,...' of files whose channels are stacked; the name of an existing file is not split."""
    return [name] if os.path.exists(name) else [part for part in name.split(",") if part]


class ChannelStack(TileSource):
    """Image that stacks the channels of several sources, with the metadata of the first source.

    Parameters
    ----------
    sources : sequence of TileSource
        Sources of the same axes and spatial extents; otherwise a DataError is raised.
    """

    def __init__(self, sources: Sequence[TileSource]) -> None:
        first, self.sources = sources[0], list(sources)
        for source in sources:
            if (source.axes, source.shape[:-1]) != (first.axes, first.shape[:-1]):
                raise DataError(
                    f"{source.path}: has extents {list(source.shape[:-1])} of axes {source.axes[:-1]}, but"
                    f" {first.path} has {list(first.shape[:-1])} of {first.axes[:-1]}; give files of the same extents"
                )
        ends = list(accumulate(source.shape[-1] for source in sources))
        self._first_channels = [0, *ends[:-1]]
        path = ",".join(source.path for source in sources)
        chunks = first.chunks and (*first.chunks[:-1], ends[-1])
        shape, dtype = (*first.shape[:-1], ends[-1]), np.result_type(*(source.dtype for source in sources))
        super().__init__(path, first.axes, shape, dtype, chunks, min(source.levels for source in sources))
        self.stored_axes, self.metadata = first.stored_axes, first.metadata

    @property
    def files(self) -> list[str]:
        """The files of all channels."""
        return [file for source in self.sources for file in source.files]

    @property
    def cache(self) -> ChunkCache | None:
        """Cache of decoded chunks of all sources."""
        return self.sources[0].cache

    @cache.setter
    def cache(self, cache: ChunkCache | None) -> None:
        for source in self.sources:
            source.cache = cache

    def read(self, box: BoxLike) -> np.ndarray:
        """Return the cells of a box as a new array with channels last."""
        *cells, channels = box_to_slices(box, self.shape, self.path)
        channel_blocks = []
        for source, first in zip(self.sources, self._first_channels, strict=True):
            cut = slice(*np.clip([channels.start - first, channels.stop - first], 0, source.shape[-1]).tolist())
            channel_blocks.append(source.read([*cells, cut]))
        self.bytes_read = sum(source.bytes_read for source in self.sources)
        return np.concatenate(channel_blocks, axis=-1, dtype=self.dtype)

    def chunks_of_box(self, box: BoxLike) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yield (source number, first cell...), and the decoded bytes, of each chunk that contains cells of a box."""
        *cells, _ = box_to_slices(box, self.shape, self.path)
        for number, source in enumerate(self.sources):
            for first, nbytes in source.chunks_of_box([*cells, slice(0, source.shape[-1])]):
                yield (number, *first), nbytes

    def _read(self, cells: Cells) -> np.ndarray:
        raise NotImplementedError  # never called: `read` is overridden

    def metadata_names(self) -> list[str]:
        """Return the names of the first source's metadata."""
        return self.sources[0].metadata_names()

    def auxiliary_variables(self) -> tuple[list[AuxiliaryVariable], list[str]]:
        """Return the coordinates and other variables of the first source."""
        return self.sources[0].auxiliary_variables()

    def array_attributes(self) -> dict[str, Any]:
        """Return the attributes of the first source."""
        return self.sources[0].array_attributes()

    def close(self) -> None:
        """Close all files."""
        for source in self.sources:
            source.close()
