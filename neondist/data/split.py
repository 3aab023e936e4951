"""Samples and their targets; a rank holds its tiles in memory, or computes or reads them on demand."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from copy import copy
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from ..arrays.rng import shuffled_indices
from ..errors import DataError, ShapeError
from ..formats.fields import FieldMetadata
from ..io.hdf5 import checksum
from ..system.lazy import LazyTile
from ..terminal.console import counted
from .augment import AugmentedTile
from .raw_values import normalise, white_value


class TileArray(Protocol):
    """This rank's tile of every sample, indexed by an integer array: an array, or an object that computes the tiles."""

    def __len__(self) -> int: ...

    def __getitem__(self, indices: Any, /) -> np.ndarray: ...


class Sampler(Protocol):
    """Order of the training samples, such as the order of tasks in a queue."""

    def order(self, epoch: int, /) -> np.ndarray:
        """Return the order of an epoch's samples (int, shape (N,)), the same on every rank."""


class Split:
    """Samples and their targets, indexed by sample number; a sample has the same number on all ranks.

    Parameters
    ----------
    tiles : array or TileArray
        This rank's tile of every sample, local shape (N, *tile, C), of integers or floating-point numbers. An object
        that computes the tiles is indexed by an array of sample numbers, which may be empty.
    labels : array or TileArray
        Target of every sample: classes (N,) or numbers (N, K), whole on every rank, or this rank's tile of target
        images (N, *tile). Classes are stored as int64.
    mean, std : float or one per channel
        `images` returns (x / scale - mean) / std.
    scale : float, optional
        Raw value that maps to 1. Default: 255 for uint8, 65535 for uint16, and 1 for all other tiles.

    Attributes
    ----------
    epoch : int
        Epoch of the augmentation, if any; set by the training loop.
    sampler : Sampler, optional
        Order of training samples. Default: a permutation keyed by seed and epoch.

    Raises
    ------
    ShapeError
        If the numbers of labels and tiles differ.
    """

    epoch = 0
    sampler: Sampler | None = None
    fill: float | None = None  # value that replaces NaN in `tiles`
    fields: FieldMetadata | None = None  # metadata of targets that are physical fields
    has_vector_targets = False  # as in Dataset
    has_integer_images = False  # whether `images` returns int64, such as ids, in every dtype
    _augmented: AugmentedTile | None = None

    def __init__(
        self,
        tiles: TileArray,
        labels: TileArray,
        mean: ArrayLike = 0.0,
        std: ArrayLike = 1.0,
        scale: float | None = None,
    ) -> None:
        if len(tiles) != len(labels):
            raise ShapeError(
                f"split: {counted(len(tiles), 'sample')} but {counted(len(labels), 'label')}; give one label per sample"
            )
        self.tiles = tiles
        if isinstance(labels, Sequence) or hasattr(labels, "__array__"):  # labels in memory, not read on demand
            labels = np.asarray(labels)
            labels = labels.astype(np.int64) if labels.ndim == 1 and labels.dtype.kind in "iub" else labels
        self.labels: TileArray = labels
        if scale is None:
            scale = white_value(tiles.dtype if hasattr(tiles, "dtype") else self._read_tiles(np.arange(1)).dtype)
        self.normalise(mean, std, scale)

    def __len__(self) -> int:
        return len(self.labels)

    def images(self, indices: ArrayLike, dtype: DTypeLike = "float32") -> np.ndarray:
        """Return this rank's tile of the samples `indices`, local shape (n, *tile, C), normalised and contiguous."""
        sample_numbers = _as_index_array(indices)
        if self._augmented is not None:
            return self._augmented.images(partial(self._read_cells, dtype), sample_numbers, self.epoch)
        dtype = np.int64 if self.has_integer_images else dtype
        return normalise(self._read_tiles(sample_numbers), *self.factor_and_subtrahend, dtype)

    def _read_tiles(self, sample_numbers: np.ndarray) -> np.ndarray:
        tiles = np.asarray(self.tiles[sample_numbers])
        if tiles.ndim < 2 or len(tiles) != len(sample_numbers):
            raise DataError(
                f"split: tiles[{sample_numbers}] has shape {tiles.shape}; tiles must accept an array of"
                f" {counted(len(sample_numbers), 'sample number')} as an index, and return this rank's tile of each,"
                " (n, *tile, C)"
            )
        return tiles

    def lazy_images(self, indices: ArrayLike, dtype: DTypeLike = "float32") -> LazyTile:
        """Return the tiles that `images` returns, but read and normalised on demand, strip by strip."""
        return _LazyImages(self, _as_index_array(indices), np.dtype(dtype))

    def _read_cells(self, dtype: DTypeLike, sample_numbers: np.ndarray, cells: tuple[slice, ...]) -> np.ndarray:
        return normalise(read_cells(self.tiles, sample_numbers, cells), *self.factor_and_subtrahend, dtype)

    def augment_with(self, tile: AugmentedTile) -> Split:
        """Return an augmented split: `tile` of each sample is computed from the cells of this split."""
        split = copy(self)
        split._augmented = tile
        return split

    def without_augmentation(self) -> Split:
        """Return the split without augmentation."""
        return self if self._augmented is None else self.augment_with(self._augmented.without_augmentation())

    def subset(self, first: int, end: int, step: int = 1) -> Split:
        """Return the samples `first`, `first + step`, ... before `end` as a split, without copying."""
        subset = copy(self)
        subset.tiles, subset.labels = (
            samples[first:end:step] if isinstance(samples, np.ndarray) else _Subset(samples, first, end, step)
            for samples in (self.tiles, self.labels)
        )
        return subset

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """Return the order of training samples in an epoch (int, shape (N,)), the same on every rank."""
        return shuffled_indices(len(self), seed, epoch) if self.sampler is None else self.sampler.order(epoch)

    def has_label_maps(self, spatial_ndim: int) -> bool:
        """Return whether labels are tiles of label maps (N, *tile, ...) of images with this number of axes."""
        return not self.has_vector_targets and len(tile_shape(self.labels)) >= spatial_ndim

    def properties_equal_on_all_ranks(self, spatial_ndim: int) -> str:
        """Return as text the properties that must agree on all ranks: size, normalisation, and labels except maps."""
        includes_labels = isinstance(self.labels, np.ndarray) and not self.has_label_maps(spatial_ndim)
        labels = f", labels {checksum(self.labels):08x}" if includes_labels else ""  # type: ignore[arg-type]
        factor, subtrahend = self.factor_and_subtrahend
        return f"{counted(len(self), 'sample')}, times {factor} minus {subtrahend}{labels}"

    def normalise(self, mean: ArrayLike, std: ArrayLike, scale: float = 1.0) -> None:
        """Set the normalisation: `images` returns (x / scale - mean) / std."""
        self._factor = 1.0 / (scale * np.asarray(std, np.float64))
        self._subtrahend = np.asarray(mean, np.float64) / np.asarray(std, np.float64)

    @property
    def factor_and_subtrahend(self) -> tuple[list[float], list[float]]:
        """Factor and subtrahend, one number or one per channel: `images` returns raw * factor - subtrahend."""
        return np.ravel(self._factor).tolist(), np.ravel(self._subtrahend).tolist()

    def targets(self, indices: ArrayLike) -> np.ndarray:
        """Return the targets of some samples: classes (n,), numbers (n, K), or tiles of target images (n, *tile)."""
        sample_numbers = _as_index_array(indices)
        tile = self._augmented
        if tile is not None and tile.moves_cells and self.has_label_maps(tile.box.ndim):
            targets = tile.label_maps(partial(read_cells, self.labels), sample_numbers, self.epoch)
        else:
            targets = self.labels[sample_numbers]
        # booleans are classes; PyTorch accepts no other byte order
        dtype = targets.dtype.newbyteorder("=") if targets.dtype.kind != "b" else np.dtype(np.uint8)
        return targets.astype(dtype, copy=False)

    def batches(
        self, batch_indices: Iterable[ArrayLike], dtype: DTypeLike = "float32", lazy: bool = False
    ) -> Generator[tuple[Any, np.ndarray]]:
        """Yield `images` and `targets` of consecutive batches; a split on disk prefetches the next batch.

        Close the generator (`contextlib.closing`) unless it is certain to be exhausted.

        Parameters
        ----------
        lazy : bool
            Yield images that are read on demand, for a model that keeps one strip at a time in memory.
        """
        for indices in batch_indices:
            yield self.lazy_images(indices, dtype) if lazy else self.images(indices, dtype), self.targets(indices)

    def bytes_to_be_cached(self, epochs: int) -> int:
        """Return the bytes that reading all samples of the first `epochs` epochs adds to caches of this split."""
        return 0

    def describe_sample(self, number: int) -> str:
        """Return the location of a sample, such as its file and line."""
        return describe_sample(self.tiles, number)

    def close(self) -> None:
        """Close files and wait for pending reads; later reads reopen them."""


class _LazyImages(LazyTile):
    def __init__(self, split: Split, sample_numbers: np.ndarray, dtype: np.dtype) -> None:
        self._split, self._sample_numbers, self.dtype = split, sample_numbers, dtype
        tile = split._augmented
        own_shape = tile_shape(split.tiles) if tile is None else (*tile.box.shape, tile.shape[-1])
        self.shape = (len(sample_numbers), *own_shape)

    def samples(self, chosen: range) -> LazyTile:
        return _LazyImages(self._split, self._sample_numbers[chosen.start : chosen.stop : chosen.step], self.dtype)

    def read(self, cells: Sequence[slice]) -> np.ndarray:
        read = partial(self._split._read_cells, self.dtype)
        if self._split._augmented is None:
            return read(self._sample_numbers, tuple(cells))
        return self._split._augmented.images(read, self._sample_numbers, self._split.epoch, cells)


class _Subset:
    """Subset of samples that are computed or read on demand."""

    def __init__(self, samples: TileArray, first: int, end: int, step: int) -> None:
        self._samples, self._sample_numbers = samples, np.arange(first, end, step)

    def __len__(self) -> int:
        return len(self._sample_numbers)

    def __getitem__(self, indices: Any) -> np.ndarray:
        return self._samples[self._sample_numbers[indices]]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *tile_shape(self._samples))

    def read_cells(self, indices: np.ndarray, cells: tuple[slice, ...]) -> np.ndarray:
        return read_cells(self._samples, self._sample_numbers[indices], cells)

    def describe_sample(self, number: int) -> str:
        return describe_sample(self._samples, int(self._sample_numbers[number]))


def describe_sample(tiles: TileArray, number: int) -> str:
    """Return the location of a sample, as described by its tiles; by default its number."""
    describe = getattr(tiles, "describe_sample", None)
    return f"sample {number}" if describe is None else str(describe(number))


def read_cells(tiles: TileArray, numbers: np.ndarray, cells: tuple[slice, ...]) -> np.ndarray:
    """Return cells (n, *cells, ...) of the tiles of some samples, cut from whole tiles if `tiles` cannot read parts."""
    if hasattr(tiles, "read_cells"):
        part: np.ndarray = tiles.read_cells(numbers, cells)
        return part
    if isinstance(tiles, np.ndarray):
        return np.stack([tiles[number][cells] for number in numbers]) if len(numbers) else tiles[(slice(0), *cells)]
    return tiles[numbers][(slice(None), *cells)]


def tile_shape(tiles: TileArray) -> tuple[int, ...]:
    """Return the shape of a tile, taken from the first tile if `tiles` has no shape."""
    return tuple(getattr(tiles, "shape", None) or tiles[np.arange(1)].shape)[1:]


def _as_index_array(indices: ArrayLike) -> np.ndarray:
    array = np.asarray(indices)
    return array.astype(np.intp) if array.size == 0 else array
