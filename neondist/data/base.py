"""What a data set is: splits, of which a rank keeps its tile of every image and all the targets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Sequence
from copy import copy
from functools import partial
from numbers import Integral, Real
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from ..comm import ProcessGrid, agree
from ..errors import ConfigError, DataError, NotReadyError, ShapeError
from ..geometry import Box, Overlapping
from ..io.hdf5 import checksum
from ..lazy import LazyTile
from ..registry import Registered
from ..rng import shuffled
from .augment import AugmentedTile, Transform
from .raw import normalised

SPLITS = ("train", "validation", "test")


class Tiles(Protocol):
    """This rank's tile of every sample, indexed by an integer array: a NumPy array, or what makes them on demand."""

    def __len__(self) -> int: ...

    def __getitem__(self, indices: Any, /) -> np.ndarray: ...


class Sampler(Protocol):
    """The order in which samples are trained, such as that of a queue of tasks."""

    def order(self, epoch: int, /) -> np.ndarray:
        """Return the order of an epoch's samples (int, shape (N,)), the same on every rank."""


class Split:
    """Samples and their targets; every index is a sample number, the same on all ranks.

    Parameters
    ----------
    tiles : array or Tiles
        This rank's tile of every sample, local shape (N, *tile, C), uint8 or float.
    labels : array or Tiles
        Target of every sample: classes (N,), whole on every rank, or this rank's tile of target images (N, *tile).
        Classes are kept as int64.
    mean, std : float or one per channel
        `images` returns (x / scale - mean) / std.
    scale : float
        The raw value that stands for 1, 255 for bytes.

    Attributes
    ----------
    epoch : int
        That of the augmentation, if there is one; the training loop sets it.
    sampler : Sampler, optional
        Says the order of training; default: a permutation of the seed and the epoch.

    Raises
    ------
    ShapeError
        If there are not as many labels as tiles.
    """

    epoch = 0
    sampler: Sampler | None = None
    fill: float | None = None  # what `tiles` have instead of NaN
    _tile: AugmentedTile | None = None

    def __init__(
        self, tiles: Tiles, labels: Tiles, mean: ArrayLike = 0.0, std: ArrayLike = 1.0, scale: float = 255.0
    ) -> None:
        if len(tiles) != len(labels):
            raise ShapeError(f"split: {len(tiles)} samples but {len(labels)} labels; give one label per sample")
        self.tiles = tiles
        if isinstance(labels, Sequence) or hasattr(labels, "__array__"):  # and not made or read on demand
            labels = np.asarray(labels)
            labels = labels.astype(np.int64) if labels.ndim == 1 and labels.dtype.kind in "iu" else labels
        self.labels: Tiles = labels
        self._factor = 1.0 / (scale * np.asarray(std, np.float64))
        self._offset = np.asarray(mean, np.float64) / np.asarray(std, np.float64)

    def __len__(self) -> int:
        return len(self.labels)

    def images(self, indices: ArrayLike, dtype: DTypeLike = "float32") -> np.ndarray:
        """Return this rank's tile of the samples `indices`, local shape (n, *tile, C), normalised and contiguous."""
        numbers = _sample_numbers(indices)
        if self._tile is not None:
            return self._tile.images(partial(self._part, dtype), numbers, self.epoch)
        return normalised(self.tiles[numbers], *self.normalisation, dtype)

    def lazily(self, indices: ArrayLike, dtype: DTypeLike = "float32") -> LazyTile:
        """Return the same as `images`, of which cells are read and normalised when they are asked for."""
        return _LazyImages(self, _sample_numbers(indices), np.dtype(dtype))

    def _part(self, dtype: DTypeLike, numbers: np.ndarray, cells: tuple[slice, ...]) -> np.ndarray:
        return normalised(part_of(self.tiles, numbers, cells), *self.normalisation, dtype)

    def augmented(self, tile: AugmentedTile) -> Split:
        """Return a split that gives `tile` of the samples, where this one's tiles are the cells that it holds."""
        found = copy(self)
        found._tile = tile
        return found

    def plain(self) -> Split:
        """Return the split as it is without augmentation."""
        return self if self._tile is None else self.augmented(self._tile.plain())

    def part(self, first: int, end: int) -> Split:
        """Return the samples from `first` to before `end` as a split of their own; nothing is copied."""
        part = copy(self)
        part.tiles, part.labels = (_Slice.of(samples, first, end) for samples in (self.tiles, self.labels))
        return part

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """Return the order in which an epoch trains the samples (int, shape (N,)), the same on every rank."""
        return shuffled(len(self), seed, epoch) if self.sampler is None else self.sampler.order(epoch)

    def fingerprint(self) -> str:
        """Return what of this split is the same on all ranks, as text: its size, scale, and labels that are no maps."""
        whole = isinstance(self.labels, np.ndarray) and self.labels.ndim < 3
        labels = f", labels {checksum(self.labels):08x}" if whole else ""  # type: ignore[arg-type]
        factor, offset = self.normalisation
        return f"{len(self)} samples, times {factor} minus {offset}{labels}"

    @property
    def normalisation(self) -> tuple[list[float], list[float]]:
        """Factor and offset, one or one per channel: `images` returns raw values times factor minus offset."""
        return np.ravel(self._factor).tolist(), np.ravel(self._offset).tolist()

    def targets(self, indices: ArrayLike) -> np.ndarray:
        """Return the targets of the samples `indices`: classes (n,) int64, or tiles of target images (n, *tile)."""
        numbers = _sample_numbers(indices)
        if self._tile is not None and self._tile.moves and _are_maps(self.labels, self._tile.box):
            return self._tile.labels(partial(part_of, self.labels), numbers, self.epoch)
        return self.labels[numbers]

    def batches(
        self, parts: Iterable[ArrayLike], dtype: DTypeLike = "float32", lazily: bool = False
    ) -> Generator[tuple[Any, np.ndarray]]:
        """Yield `images` and `targets` of one part after the other; a split on disk reads the next part meanwhile.

        Close the generator (`contextlib.closing`) where it may not be used up.

        Parameters
        ----------
        lazily : bool
            Yield images that are read when they are asked for: those of a model that has a strip at a time in memory.
        """
        for part in parts:
            yield self.lazily(part, dtype) if lazily else self.images(part, dtype), self.targets(part)

    def close(self) -> None:
        """Let go of open files, and wait for what is being read; what is read later opens them again."""


class _LazyImages(LazyTile):
    def __init__(self, split: Split, numbers: np.ndarray, dtype: np.dtype) -> None:
        self._split, self._numbers, self.dtype = split, numbers, dtype
        own = _shape(split.tiles) if split._tile is None else (*split._tile.box.shape, split._tile.shape[-1])
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
    """Some neighbours of samples that are made or read on demand."""

    def __init__(self, samples: Tiles, first: int, end: int) -> None:
        self._samples, self._numbers = samples, np.arange(first, end)

    @classmethod
    def of(cls, samples: Tiles, first: int, end: int) -> Tiles:
        return samples[first:end] if isinstance(samples, np.ndarray) else cls(samples, first, end)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, indices: Any) -> np.ndarray:
        return self._samples[self._numbers[indices]]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *_shape(self._samples))

    def part(self, indices: np.ndarray, cells: tuple[slice, ...]) -> np.ndarray:
        return part_of(self._samples, self._numbers[indices], cells)


class Dataset(Registered, ABC):
    """A source of samples in up to three splits. A subclass says how to `check` it and `load` this rank's part.

    Parameters
    ----------
    validation : float or int, optional
        How much of the training samples, a fraction such as 0.1 or a number of samples, is kept for validation: the
        last ones, by their numbers, on any grid the same. Default: none, unless the data have a split for it.

    Attributes
    ----------
    sample_shape : tuple of int
        Global shape of one sample, (H, W, C) or (*spatial, C); known after `check`.
    classes : int
        Number of classes; known after `check`. None where the targets are not classes, or it is not known.
    train : Split
        Known after `open`, as the next two.
    validation, test : Split or None
        Settings are chosen by the validation split, what comes out is reported by the test split; None without one.
    content : str
        Set by `load`: a hash of what the samples are made of, the same on ranks that have the same data, whichever
        tile they keep. Ranks are compared before training; '' (the default) compares labels alone.

    Raises
    ------
    ConfigError
        `validation` is no fraction, and no number of samples.
    """

    content: str = ""
    needs_selection = True
    """Whether `open` refuses data without a validation and a test split."""
    _kept: float | int | None = None  # for classes whose constructor does not call this one

    sample_shape: tuple[int, ...]
    classes: int | None
    train: Split
    validation: Split | None
    test: Split | None

    def __init__(self, validation: float | int | None = None) -> None:
        require_share("validation", validation)
        self._kept = validation

    def __getattr__(self, name: str) -> Any:
        """Say what is missing where the data are used before they have been looked at or loaded."""
        if name in (*SPLITS, "sample_shape", "classes"):
            call = "open(grid)" if name in SPLITS else "check()"
            raise NotReadyError(f"dataset: {type(self).__name__} has no '{name}' yet; call its {call} first")
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    @property
    def splits(self) -> dict[str, Split]:
        """The splits that there are, by name: train, validation, test."""
        found = {name: getattr(self, name) for name in SPLITS}
        return {name: split for name, split in found.items() if split is not None}

    @property
    def selection(self) -> Split:
        """What settings are chosen by: the validation split, or where there is none the test split."""
        return list(self.splits.values())[1]

    @abstractmethod
    def check(self) -> None:
        """Look at the source, quickly and without MPI; raise DataError if it cannot be what it should be."""

    @abstractmethod
    def load(self, grid: ProcessGrid) -> tuple[Split, Split] | tuple[Split, Split | None, Split | None]:
        """Return the training and the test split, or training, validation and test, None for one that is missing.

        Each holds this rank's tile, `tile_slices(grid, sample_shape)`; no messages.
        """

    def open(self, grid: ProcessGrid, checked: bool = False, augment: Sequence[Transform] = (), seed: int = 0) -> None:
        """Load this rank's part of all splits (collective): if one rank cannot, every rank raises.

        Parameters
        ----------
        grid : ProcessGrid
        checked : bool
            Whether `check` has been called on every rank just now.
        augment : sequence of Transform
            Steps that the images of `train`, and their label maps, go through, others in every `train.epoch`. What is
            kept in memory are the cells that a tile may come from.
        seed : int
            Of the augmentation.

        Raises
        ------
        DataError
            If the source is missing, damaged, too large or not what it should be, on any rank.
        ConfigError
            A step does not suit images of this shape.
        """
        grid.check("open")
        error: Exception | None = None
        try:
            if not checked:
                self.check()
            for transform in augment:
                transform.check(self.sample_shape)
            tile = AugmentedTile(augment, seed, self.sample_shape, grid.tile_box(self.sample_shape[:-1]))
            reading = Overlapping.one(self.sample_shape[:-1], tile.held) if augment else None
            self.train, *own, self.test = self.load(grid.reading(reading))
            self.validation = own[0] if own else None
            if self.validation is None and self._kept is not None:
                samples = len(self.train)
                first = samples - self.count_kept(samples)
                self.train, self.validation = self.train.part(0, first), self.train.part(first, samples)
            if len(self.splits) == 1 and self.needs_selection:
                raise DataError("dataset: has neither a validation nor a test split; give validation, such as 0.1")
            if augment:
                self._augment(tile)
        except MemoryError as problem:
            what = f" ({problem})" if str(problem) else ""
            error = DataError(f"dataset: a rank has no memory for its part{what}; use more ranks, or fewer samples")
        except Exception as problem:
            error = problem
        agree(grid.world, error)

    def _augment(self, tile: AugmentedTile) -> None:
        """Let the training split give augmented tiles, and the others tiles of what has been read with them."""
        for split in self.splits.values() if tile.moves else ():
            if _are_maps(split.labels, tile.box) and _shape(split.labels)[: tile.box.ndim] != tile.held.shape:
                raise DataError(
                    f"augment: label maps that are not as large as the images, {tile.shape[:-1]}, cannot be moved with"
                    " them; leave out Flip, QuarterTurns, Shift and Elastic"
                )
        self.train = self.train.augmented(tile)
        if tile.moves:
            others = (self.validation, self.test)
            self.validation, self.test = (None if one is None else one.augmented(tile.plain()) for one in others)

    def count_kept(self, samples: int) -> int:
        """Return how many of the training samples are kept for validation; DataError if that would be all."""
        return count_of("validation", self._kept or 0, samples)

    def fingerprint(self) -> list[str]:
        """Return what all ranks must have alike once the data set is open, a fact a line."""
        lines = [f"{name} split: {split.fingerprint()}" for name, split in self.splits.items()]
        return [*lines, *([f"data of hash {self.content}"] if self.content else [])]

    def close(self) -> None:
        """Let go of the open files of all splits; what is read later opens them again."""
        for split in self.splits.values():
            split.close()


def require_share(field: str, kept: Any) -> None:
    """Raise ConfigError unless that much of the training samples can be kept for another split."""
    whole = isinstance(kept, Integral) and not isinstance(kept, bool)
    if kept is not None and not (kept > 0 if whole else _is_fraction(kept)):
        raise ConfigError(
            f"{field}: {kept!r} cannot be used; give a fraction of the training samples, such as 0.1, or a number of"
            " them"
        )


def count_of(field: str, kept: float | int, samples: int) -> int:
    """Return how many of the training samples are kept for another split; DataError if that would be all."""
    limit = samples - 1
    count = kept if isinstance(kept, Integral) else min(max(1, round(kept * samples)), limit)
    if not 0 < count <= limit:
        raise DataError(f"{field}: {kept} of {samples} training samples leave none to train on; give fewer")
    return int(count)


def part_of(tiles: Tiles, numbers: np.ndarray, cells: tuple[slice, ...]) -> np.ndarray:
    """Return cells (n, *cells, ...) of the tiles of some samples; of those made on demand, from whole tiles."""
    if hasattr(tiles, "part"):
        found: np.ndarray = tiles.part(numbers, cells)
        return found
    if isinstance(tiles, np.ndarray):
        return np.stack([tiles[number][cells] for number in numbers]) if len(numbers) else tiles[(slice(0), *cells)]
    return tiles[numbers][(slice(None), *cells)]


def _shape(tiles: Tiles) -> tuple[int, ...]:
    """Return the shape of a tile; where it is not told, of the first one."""
    return tuple(getattr(tiles, "shape", None) or tiles[np.arange(1)].shape)[1:]


def _are_maps(labels: Tiles, box: Box) -> bool:
    """Tell whether labels are tiles (N, *tile, ...) of maps."""
    return len(_shape(labels)) >= len(box.lo)


def _is_fraction(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) < 1


def tile_slices(grid: ProcessGrid, sample_shape: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of this rank's tile in one sample of global shape (*spatial, C); channels are never cut."""
    return (*grid.tile_box(tuple(sample_shape[:-1])).slices, slice(0, sample_shape[-1]))


def _sample_numbers(indices: ArrayLike) -> np.ndarray:
    numbers = np.asarray(indices)
    return numbers.astype(np.intp) if numbers.size == 0 else numbers
