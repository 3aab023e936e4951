"""What a data set is: two splits, of which a rank keeps its tile of every image and all the targets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from ..comm import ProcessGrid, agree
from ..errors import DataError, NotReadyError, ShapeError
from ..hdf5 import checksum
from ..registry import Registered


class Tiles(Protocol):
    """This rank's tile of every sample, indexed by an integer array: a NumPy array, or what makes them on demand."""

    def __len__(self) -> int: ...

    def __getitem__(self, indices: Any, /) -> np.ndarray: ...


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

    Raises
    ------
    ShapeError
        If there are not as many labels as tiles.
    """

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
        return normalised(self.tiles[_sample_numbers(indices)], *self.normalisation, dtype)

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
        return self.labels[_sample_numbers(indices)]

    def batches(
        self, parts: Iterable[ArrayLike], dtype: DTypeLike = "float32"
    ) -> Generator[tuple[np.ndarray, np.ndarray]]:
        """Yield `images` and `targets` of one part after the other; a split on disk reads the next part meanwhile.

        Close the generator (`contextlib.closing`) where it may not be used up.
        """
        for part in parts:
            yield self.images(part, dtype), self.targets(part)

    def close(self) -> None:
        """Let go of open files, and wait for what is being read; what is read later opens them again."""


class Dataset(Registered, ABC):
    """A source of samples. A subclass says how to `check` it and how to `load` this rank's part.

    Attributes
    ----------
    sample_shape : tuple of int
        Global shape of one sample, (H, W, C) or (*spatial, C); known after `check`.
    classes : int
        Number of classes; known after `check`. None where the targets are not classes, or it is not known.
    train, test : Split
        Known after `open`.
    content : str
        Set by `load`: a hash of what the samples are made of, the same on ranks that have the same data, whichever
        tile they keep. Ranks are compared before training; '' (the default) compares labels alone.
    """

    content: str = ""

    sample_shape: tuple[int, ...]
    classes: int | None
    train: Split
    test: Split

    def __getattr__(self, name: str) -> Any:
        """Say what is missing where the data are used before they have been looked at or loaded."""
        if name in ("train", "test", "sample_shape", "classes"):
            call = "open(grid)" if name in ("train", "test") else "check()"
            raise NotReadyError(f"dataset: {type(self).__name__} has no '{name}' yet; call its {call} first")
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    @abstractmethod
    def check(self) -> None:
        """Look at the source, quickly and without MPI; raise DataError if it cannot be what it should be."""

    @abstractmethod
    def load(self, grid: ProcessGrid) -> tuple[Split, Split]:
        """Return the training and test splits with this rank's tile, `tile_slices(grid, sample_shape)`; no messages."""

    def open(self, grid: ProcessGrid) -> None:
        """Load this rank's part of both splits (collective): if one rank cannot, every rank raises.

        Raises
        ------
        DataError
            If the source is missing, damaged, too large or not what it should be, on any rank.
        """
        error: Exception | None = None
        try:
            self.check()
            self.train, self.test = self.load(grid)
        except MemoryError as problem:
            what = f" ({problem})" if str(problem) else ""
            error = DataError(f"dataset: a rank has no memory for its part{what}; use more ranks, or fewer samples")
        except Exception as problem:
            error = problem
        agree(grid.world, error)

    def fingerprint(self) -> list[str]:
        """Return what all ranks must have alike once the data set is open, a fact a line."""
        lines = [f"training set: {self.train.fingerprint()}", f"test set: {self.test.fingerprint()}"]
        return [*lines, *([f"data of hash {self.content}"] if self.content else [])]

    def close(self) -> None:
        """Let go of the open files of both splits; what is read later opens them again."""
        for split in (self.train, self.test):
            split.close()


def normalised(raw: ArrayLike, factor: Sequence[float], offset: Sequence[float], dtype: DTypeLike) -> np.ndarray:
    """Return `raw` (n, *tile, C) times `factor` minus `offset`, each one number or one per channel, contiguous."""
    out = np.array(raw, dtype, order="C")
    out *= np.asarray(factor, out.dtype)
    out -= np.asarray(offset, out.dtype)
    return out


def tile_slices(grid: ProcessGrid, sample_shape: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of this rank's tile in one sample of global shape (*spatial, C); channels are never cut."""
    return (*grid.tile_box(tuple(sample_shape[:-1])).slices, slice(0, sample_shape[-1]))


def _sample_numbers(indices: ArrayLike) -> np.ndarray:
    numbers = np.asarray(indices)
    return numbers.astype(np.intp) if numbers.size == 0 else numbers
