"""Samples and their targets, of which a rank holds its tile, in memory or computed or read on demand."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from copy import copy
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from ..arrays.rng import shuffled
from ..errors import ShapeError
from ..formats.fields import Fields
from ..geometry import Box
from ..io.hdf5 import checksum
from ..system.lazy import LazyTile
from .augment import AugmentedTile
from .raw import normalise


class Tiles(Protocol):
    """This rank's tile of every sample, indexed by an integer array: an array, or an object that computes them."""

    def __len__(self) -> int: ...

    def __getitem__(self, indices: Any, /) -> np.ndarray: ...


class Sampler(Protocol):
    """Order of the training samples, such as that of a queue of tasks."""

    def order(self, epoch: int, /) -> np.ndarray:
        """Return the order of an epoch's samples (int, shape (N,)), the same on every rank."""


class Split:
    """Samples and their targets, indexed by sample number, the same on all ranks.

    Parameters
    ----------
    tiles : array or Tiles
        This rank's tile of every sample, local shape (N, *tile, C), uint8 or float.
    labels : array or Tiles
        Target of every sample: classes (N,), whole on every rank, or this rank's tile of target images (N, *tile).
        Classes are stored as int64.
    mean, std : float or one per channel
        `images` returns (x / scale - mean) / std.
    scale : float
        Raw value that maps to 1, 255 for bytes.

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
    fill: float | None = None  # value in `tiles` instead of NaN
    fields: Fields | None = None  # metadata of targets that are physical fields
    _tile: AugmentedTile | None = None

    def __init__(
        self, tiles: Tiles, labels: Tiles, mean: ArrayLike = 0.0, std: ArrayLike = 1.0, scale: float = 255.0
    ) -> None:
        if len(tiles) != len(labels):
            raise ShapeError(f"split: {len(tiles)} samples but {len(labels)} labels; give one label per sample")
        self.tiles = tiles
        if isinstance(labels, Sequence) or hasattr(labels, "__array__"):  # in memory, not on demand
            labels = np.asarray(labels)
            labels = labels.astype(np.int64) if labels.ndim == 1 and labels.dtype.kind in "iu" else labels
        self.labels: Tiles = labels
        self.normalise(mean, std, scale)

    def __len__(self) -> int:
        return len(self.labels)

    def images(self, indices: ArrayLike, dtype: DTypeLike = "float32") -> np.ndarray:
        """Return this rank's tile of the samples `indices`, local shape (n, *tile, C), normalised and contiguous."""
        numbers = _sample_numbers(indices)
        if self._tile is not None:
            return self._tile.images(partial(self._part, dtype), numbers, self.epoch)
        return normalise(self.tiles[numbers], *self.normalisation, dtype)

    def lazily(self, indices: ArrayLike, dtype: DTypeLike = "float32") -> LazyTile:
        """Return the same images, read and normalised lazily."""
        return _LazyImages(self, _sample_numbers(indices), np.dtype(dtype))

    def _part(self, dtype: DTypeLike, numbers: np.ndarray, cells: tuple[slice, ...]) -> np.ndarray:
        return normalise(part_of(self.tiles, numbers, cells), *self.normalisation, dtype)

    def augmented(self, tile: AugmentedTile) -> Split:
        """Return a split that returns `tile` of the samples, augmented from the cells of this split."""
        split = copy(self)
        split._tile = tile
        return split

    def plain(self) -> Split:
        """Return the split without augmentation."""
        return self if self._tile is None else self.augmented(self._tile.plain())

    def part(self, first: int, end: int) -> Split:
        """Return the samples `first` to `end - 1` as a split, without copying."""
        part = copy(self)
        part.tiles, part.labels = (_Slice.of(samples, first, end) for samples in (self.tiles, self.labels))
        return part

    def every(self, step: int, first: int) -> Split:
        """Return the samples `first`, `first + step`, ... as a split, without copying."""
        part = copy(self)
        part.tiles, part.labels = (_Slice.of(samples, first, len(self), step) for samples in (self.tiles, self.labels))
        return part

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """Return the order of training samples in an epoch (int, shape (N,)), the same on every rank."""
        return shuffled(len(self), seed, epoch) if self.sampler is None else self.sampler.order(epoch)

    def fingerprint(self) -> str:
        """Return the properties that agree on all ranks as text: size, scale, and labels that are not maps."""
        whole = isinstance(self.labels, np.ndarray) and self.labels.ndim < 3
        labels = f", labels {checksum(self.labels):08x}" if whole else ""  # type: ignore[arg-type]
        factor, offset = self.normalisation
        return f"{len(self)} samples, times {factor} minus {offset}{labels}"

    def normalise(self, mean: ArrayLike, std: ArrayLike, scale: float = 1.0) -> None:
        """Set the normalisation: `images` returns (x / scale - mean) / std."""
        self._factor = 1.0 / (scale * np.asarray(std, np.float64))
        self._offset = np.asarray(mean, np.float64) / np.asarray(std, np.float64)

    @property
    def normalisation(self) -> tuple[list[float], list[float]]:
        """Factor and offset, one or one per channel: `images` returns raw values times factor minus offset."""
        return np.ravel(self._factor).tolist(), np.ravel(self._offset).tolist()

    def targets(self, indices: ArrayLike) -> np.ndarray:
        """Return the targets of the samples `indices`: classes (n,) int64, or tiles of target images (n, *tile)."""
        numbers = _sample_numbers(indices)
        if self._tile is not None and self._tile.moves and are_maps(self.labels, self._tile.box):
            return self._tile.labels(partial(part_of, self.labels), numbers, self.epoch)
        return self.labels[numbers]

    def batches(
        self, parts: Iterable[ArrayLike], dtype: DTypeLike = "float32", lazily: bool = False
    ) -> Generator[tuple[Any, np.ndarray]]:
        """Yield `images` and `targets` of consecutive batches; a split on disk prefetches the next batch.

        Close the generator (`contextlib.closing`) if it may not be exhausted.

        Parameters
        ----------
        lazily : bool
            Yield images that are read lazily, for a model that holds one strip at a time in memory.
        """
        for part in parts:
            yield self.lazily(part, dtype) if lazily else self.images(part, dtype), self.targets(part)

    def close(self) -> None:
        """Close files and wait for pending reads; later reads reopen them."""


class _LazyImages(LazyTile):
    def __init__(self, split: Split, numbers: np.ndarray, dtype: np.dtype) -> None:
        self._split, self._numbers, self.dtype = split, numbers, dtype
        own = shape_of(split.tiles) if split._tile is None else (*split._tile.box.shape, split._tile.shape[-1])
        self.shape = (len(numbers), *own)

    def samples(self, numbers: range) -> LazyTile:
        """Return some of the samples."""
        return _LazyImages(self._split, self._numbers[slice(numbers.start, numbers.stop, numbers.step)], self.dtype)

    def read(self, cells: Sequence[slice]) -> np.ndarray:
        """Return normalised cells (n, *cells, C)."""
        read = partial(self._split._part, self.dtype)
        if self._split._tile is None:
            return read(self._numbers, tuple(cells))
        return self._split._tile.images(read, self._numbers, self._split.epoch, cells)


class _Slice:
    """Subset of samples that are computed or read on demand."""

    def __init__(self, samples: Tiles, first: int, end: int, step: int = 1) -> None:
        self._samples, self._numbers = samples, np.arange(first, end, step)

    @classmethod
    def of(cls, samples: Tiles, first: int, end: int, step: int = 1) -> Tiles:
        return samples[first:end:step] if isinstance(samples, np.ndarray) else cls(samples, first, end, step)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, indices: Any) -> np.ndarray:
        return self._samples[self._numbers[indices]]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *shape_of(self._samples))

    def part(self, indices: np.ndarray, cells: tuple[slice, ...]) -> np.ndarray:
        return part_of(self._samples, self._numbers[indices], cells)


def part_of(tiles: Tiles, numbers: np.ndarray, cells: tuple[slice, ...]) -> np.ndarray:
    """Return cells (n, *cells, ...) of the tiles of some samples, cut from whole tiles if `tiles` has no `part`."""
    if hasattr(tiles, "part"):
        part: np.ndarray = tiles.part(numbers, cells)
        return part
    if isinstance(tiles, np.ndarray):
        return np.stack([tiles[number][cells] for number in numbers]) if len(numbers) else tiles[(slice(0), *cells)]
    return tiles[numbers][(slice(None), *cells)]


def shape_of(tiles: Tiles) -> tuple[int, ...]:
    """Return the shape of a tile; that of the first one if `tiles` has no shape."""
    return tuple(getattr(tiles, "shape", None) or tiles[np.arange(1)].shape)[1:]


def are_maps(labels: Tiles, box: Box) -> bool:
    """Return whether labels are tiles (N, *tile, ...) of maps."""
    return len(shape_of(labels)) >= len(box.lo)


def _sample_numbers(indices: ArrayLike) -> np.ndarray:
    numbers = np.asarray(indices)
    return numbers.astype(np.intp) if numbers.size == 0 else numbers
