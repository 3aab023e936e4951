"""Crops of images that stay in their files: their positions, and this rank's tiles."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import numpy as np

from ...arrays import rng
from ...errors import DataError
from ...formats import TileSource, open_source
from ...formats.cache import ChunkCache
from ..raw_values import fill_missing
from .hdf5_tiles import PrefetchingSplit
from .image_lists import ImageEntry, is_class_map, is_picture

_MAX_OPEN_FILES, _MAX_OPEN_ONE_CHUNK_FILES = 64, 4  # files stored as one chunk are kept in memory


class RandomCropPositions:
    """Random positions of the crops of an epoch; they depend only on the seed, the epoch and the samples' keys.

    Parameters
    ----------
    sample_keys : array of int, one per sample
    image_extents : extents of the samples' images
    crop_shape : extents of a crop
    stream_name : name of the random stream
    """

    def __init__(
        self,
        seed: int,
        sample_keys: np.ndarray,
        image_extents: Sequence[tuple[int, ...]],
        crop_shape: tuple[int, ...],
        stream_name: str = "crop",
    ) -> None:
        self.epoch, self.shape = 0, crop_shape
        self._max_positions = np.array(image_extents) - crop_shape
        axes = np.arange(len(crop_shape), dtype=np.uint64)
        self._random_stream_indices = np.asarray(sample_keys, np.uint64)[:, None] * np.uint64(len(crop_shape)) + axes
        self._seed, self._stream_name = seed, stream_name
        self._epoch_positions: tuple[int, np.ndarray] | None = None  # epoch and first cells of its crops

    def first_cell(self, number: int) -> list[int]:
        """Return the first cell of a sample's crop in its image."""
        if self._epoch_positions is None or self._epoch_positions[0] != self.epoch:
            draws = rng.uniform(rng.key(self._seed, self._stream_name, self.epoch), self._random_stream_indices)
            positions = np.minimum((draws * (self._max_positions + 1)).astype(np.int64), self._max_positions)
            self._epoch_positions = self.epoch, positions
        origin: list[int] = self._epoch_positions[1][number].tolist()
        return origin


class RandomCropTileReader:
    """One tile of each crop, read on demand; not thread-safe.

    Parameters
    ----------
    tile : slices of the cells in a crop
    opener : function that opens a file
    fill : value substituted for NaN; None: NaN is an error
    classes : for masks, the number of classes and the label to ignore, if any
    cache : bytes of decoded chunks to keep
    """

    def __init__(
        self,
        crops: RandomCropPositions,
        images: Sequence[ImageEntry],
        tile: tuple[slice, ...],
        opener: Callable[[str], TileSource] = open_source,
        fill: float | None = None,
        classes: tuple[int, int | None] | None = None,
        cache: int = 0,
    ) -> None:
        self.crops, self.images, self.tile, self._open_source, self.fill = crops, images, tile, opener, fill
        self._classes = classes
        first_image = images[0]
        dtype = np.result_type(*{item.dtype for item in images})
        self.dtype = np.dtype(np.uint8) if dtype == np.bool_ else dtype
        self._drops_channel_axis = opener is not open_source and is_class_map(first_image)
        tile_extents = tuple(cut.stop - cut.start for cut in tile)
        self.shape = (len(images), *tile_extents, *(() if self._drops_channel_axis else first_image.shape[-1:]))
        self._sources: OrderedDict[str, TileSource] = OrderedDict()
        self._cache = ChunkCache(cache)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, indices: Any) -> np.ndarray:
        return self.read_cells(np.asarray(indices), self._own_cells)

    def read_cells(self, indices: np.ndarray, cells: tuple[slice, ...]) -> np.ndarray:
        """Return cells (n, *cells, ...) of some samples; slices count from the tile's first cell."""
        extents = tuple(cut.stop - cut.start for cut in cells)
        out = np.empty((len(indices), *extents, *self.shape[1 + len(extents) :]), self.dtype)
        for index, number in enumerate(indices) if out.size else ():
            item = self.images[number]
            values = self._open_image_file(item.name).read(self._crop_box(number, cells))
            out[index] = self._fill_and_check(item, values).reshape(out.shape[1:])
        return out

    def describe_sample(self, number: int) -> str:
        """Return the file of a sample."""
        return self.images[number].name

    def bytes_to_be_cached(self, epochs: int) -> int:
        """Return the bytes of decoded chunks that reading all crops of the first `epochs` epochs adds to the cache."""
        saved_epoch, seen_chunks, total_bytes = self.crops.epoch, set[Hashable](), 0
        try:
            for chunk, nbytes in self._chunks_of_epochs(epochs):
                total_bytes += nbytes * (chunk not in seen_chunks)
                seen_chunks.add(chunk)
                if total_bytes >= self._cache.capacity_bytes:
                    break
        finally:
            self.crops.epoch = saved_epoch
        return max(0, min(self._cache.capacity_bytes, total_bytes) - self._cache.nbytes)

    def _chunks_of_epochs(self, epochs: int) -> Iterator[tuple[Hashable, int]]:
        """Yield the chunks, with their bytes, that are cached when all crops of the first `epochs` epochs are read."""
        names = dict.fromkeys(item.name for item in self.images if not is_picture(item.name))
        sources = {name: self._open_image_file(name) for name in names}
        sources = {name: source for name, source in sources.items() if source.cache is not None}
        for self.crops.epoch in range(epochs if sources else 0):
            for number, item in enumerate(self.images):
                if item.name in sources:
                    for first, nbytes in sources[item.name].chunks_of_box(self._crop_box(number, self._own_cells)):
                        yield (item.name, first), nbytes

    def close(self) -> None:
        """Close the files; a later read reopens them."""
        while self._sources:
            self._sources.popitem()[1].close()

    @property
    def _own_cells(self) -> tuple[slice, ...]:
        return tuple(slice(0, cut.stop - cut.start) for cut in self.tile)

    def _crop_box(self, number: int, cells: tuple[slice, ...]) -> tuple[slice, ...]:
        """Return the box of the file that contains some cells of a crop's tile."""
        item, origin = self.images[number], self.crops.first_cell(number)
        box = (
            slice(lo + own.start + cut.start, lo + own.start + cut.stop)
            for lo, own, cut in zip(origin, self.tile, cells, strict=True)
        )
        return (*item.leading_index, *box, slice(0, item.shape[-1]))

    def _open_image_file(self, name: str) -> TileSource:
        if name not in self._sources:
            new_source = self._open_source(name)
            is_whole = new_source.chunks == new_source.shape
            names = [other for other, source in self._sources.items() if (source.chunks == source.shape) == is_whole]
            if len(names) >= (_MAX_OPEN_ONE_CHUNK_FILES if is_whole else _MAX_OPEN_FILES):
                self._sources.pop(names[0]).close()
            if not is_whole:
                new_source.cache = self._cache
            self._sources[name] = new_source
        self._sources.move_to_end(name)
        return self._sources[name]

    def _fill_and_check(self, item: ImageEntry, cells: np.ndarray) -> np.ndarray:
        cells = fill_missing(item.name, cells, self.fill)
        if self._classes is not None and self._drops_channel_axis:
            count, ignored_label = self._classes
            if cells.min() >= 0 and cells.max() < count:  # the common case, and cheaper
                return cells
            bad_labels = cells[(cells < 0) | (cells >= count)]
            bad_labels = bad_labels if ignored_label is None else bad_labels[bad_labels != ignored_label]
            if bad_labels.size:
                raise DataError(
                    f"{item.name}: contains label {bad_labels.flat[0]}; labels must be 0 to {count - 1}; correct the"
                    " mask, increase `classes`, list the masks' values in class_values, such as [0, 255], or set"
                    f" ignore_index: {bad_labels.flat[0]} in the data set and in the cost"
                )
        return cells


class CropSplit(PrefetchingSplit):
    """A split of crops, whose positions change with the epoch."""

    def __init__(
        self, crops: RandomCropPositions, tiles: RandomCropTileReader, labels: Any, prefetch: bool, **normalisation: Any
    ) -> None:
        self._crop_positions, self.fill = crops, tiles.fill
        self._tile_readers = [reader for reader in (tiles, labels) if isinstance(reader, RandomCropTileReader)]
        super().__init__(tiles, labels, prefetch, **normalisation)

    @property
    def epoch(self) -> int:
        """The epoch, set by the training loop."""
        return self._crop_positions.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._crop_positions.epoch = epoch

    def bytes_to_be_cached(self, epochs: int) -> int:
        """Return the bytes that reading all crops of the first `epochs` epochs adds to the caches of decoded chunks."""
        return sum(reader.bytes_to_be_cached(epochs) for reader in self._tile_readers)
