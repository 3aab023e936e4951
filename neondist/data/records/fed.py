"""Features and labels that a function of the user's makes of records, as a data set."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from enum import Enum
from functools import lru_cache
from typing import Any

import numpy as np

from ...comm import ProcessGrid
from ...errors import ConfigError, DataError, UserError
from ..base import Dataset, Split
from .base import RecordReader

_PROBED = 2


class Mode(str, Enum):
    """The purpose of the records that `feed` is given; equal to its text."""

    TRAINING = "training"
    EVALUATION = "evaluation"
    PREDICTION = "prediction"


class Feed:
    """A function from records to features and labels, whose results are checked.

    Parameters
    ----------
    function : callable
        Of a list of records and a mode; returns features and labels, or for prediction features alone. One of each per
        record: features (n, C, *spatial), or (n, F).
    place : str
        File and line of the function, for messages.
    """

    def __init__(self, function: Callable[..., Any], place: str) -> None:
        self.function, self.place = function, place

    def __call__(self, records: list[np.ndarray], mode: Mode) -> tuple[np.ndarray, np.ndarray | None]:
        """Return features and labels, channels last; ConfigError if the function fails or returns something else."""
        name = getattr(self.function, "__name__", "feed")
        try:
            found = self.function(records, mode)
        except UserError:
            raise
        except Exception as error:
            raise ConfigError(f"{self.place}: {name} failed: {type(error).__name__}: {error}") from error
        pair = isinstance(found, tuple) and len(found) == 2
        if not pair and mode != Mode.PREDICTION:
            raise ConfigError(f"{self.place}: {name} returned {_kind(found)}; return (features, labels)")
        features = self._array(f"{name}: features", found[0] if pair else found, len(records))
        if features.ndim < 2:
            raise ConfigError(f"{self.place}: {name}: features have shape {features.shape}; return an array per record")
        if not pair or mode == Mode.PREDICTION:
            return _last(features), None
        labels = self._array(f"{name}: labels", found[1], len(records))
        return _last(features), _last(labels) if labels.shape[2:] == features.shape[2:] else labels

    def _array(self, what: str, values: Any, records: int) -> np.ndarray:
        try:
            found = np.asarray(values) if hasattr(values, "__array__") else np.stack([np.asarray(x) for x in values])
            count = len(found)
        except (TypeError, ValueError) as error:
            if isinstance(values, Sequence) and len(values) != records:
                found, count = np.empty(0), len(values)
            else:
                raise ConfigError(f"{self.place}: {what} cannot be one array ({error})") from error
        if count != records:
            raise ConfigError(f"{self.place}: {what} are {count} for {records} records; return one per record")
        if found.dtype.kind not in "biuf":
            raise ConfigError(f"{self.place}: {what} have dtype {found.dtype}; return numbers")
        return found


class Samples:
    """Features and labels of the records that are used, made when they are asked for.

    Parameters
    ----------
    reader : RecordReader
    feed : Feed
    mode : Mode
    bad : collection of int
        Records that are left out.
    """

    def __init__(self, reader: RecordReader, feed: Feed, mode: Mode, bad: Sequence[int] = ()) -> None:
        self.reader, self.feed, self.mode = reader, feed, mode
        self.numbers = np.setdiff1d(np.arange(len(reader)), np.asarray(bad, np.intp))
        if not len(self.numbers):
            raise DataError(f"{reader.name}: has no usable records")
        self._last = lru_cache(maxsize=2)(self._make)  # images and targets of a batch are asked for one by one

    def __len__(self) -> int:
        return len(self.numbers)

    def of(self, indices: Any) -> tuple[np.ndarray, np.ndarray | None]:
        """Return features (n, *spatial, C) and labels."""
        return self._last(tuple(np.asarray(indices).tolist()))

    def _make(self, indices: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray | None]:
        return self.feed(self.reader.read(self.numbers[list(indices)].tolist()), self.mode)

    def content(self) -> str:
        """Return a hash of some records, alike on all ranks that read the same source."""
        some = self.numbers[np.linspace(0, len(self) - 1, min(8, len(self))).astype(int)]
        sums = [zlib.crc32(np.ascontiguousarray(record).tobytes()) for record in self.reader.read(some.tolist())]
        return f"{len(self)}:{zlib.crc32(np.array(sums, np.int64).tobytes()):08x}"


class _Part:
    """This rank's tile of features, or of labels that are maps; other labels whole."""

    def __init__(self, samples: Samples, which: int, shape: tuple[int, ...], tile: tuple[slice, ...]) -> None:
        self._samples, self._which, self._tile = samples, which, tile
        own = tuple(len(range(*cut.indices(n))) for cut, n in zip(tile, shape, strict=False))
        self.shape = (len(samples), *own, *shape[len(tile) :])

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, indices: Any) -> np.ndarray:
        found = self._samples.of(np.arange(len(self))[indices])[self._which]
        assert found is not None  # prediction needs no labels
        return found[(slice(None), *self._tile)]


class _Records(Dataset):
    """Records of one or two sources; see `record_dataset`."""

    classes = None
    needs_selection = False

    def __init__(self, training: Samples, evaluation: Samples | None = None) -> None:
        super().__init__()
        self._sources = {"train": training} | ({} if evaluation is None else {"validation": evaluation})

    def check(self) -> None:
        """Feed a few records."""
        shapes = set()
        for samples in self._sources.values():
            features, _ = samples.of(range(min(_PROBED, len(samples))))
            shapes.add(features.shape[1:])
        if len(shapes) > 1:
            raise DataError(f"feed: features of {' and '.join(s.reader.name for s in self._sources.values())} differ")
        self.sample_shape = shapes.pop()

    def load(self, grid: ProcessGrid) -> tuple[Split, Split | None, Split | None]:
        """Return the splits; nothing is read but the batches."""
        self.content = " ".join(samples.content() for samples in self._sources.values())
        splits = {name: self._split(samples, grid) for name, samples in self._sources.items()}
        return splits["train"], splits.get("validation"), None

    def _split(self, samples: Samples, grid: ProcessGrid) -> Split:
        extent = self.sample_shape[:-1]
        cells = grid.tile_box(extent).slices if extent else ()
        features, labels = samples.of(range(min(_PROBED, len(samples))))
        shape = (0,) if labels is None else labels.shape[1:]
        maps = bool(extent) and shape[: len(extent)] == extent
        images = _Part(samples, 0, features.shape[1:], cells)
        return Split(images, _Part(samples, 1, shape, cells if maps else ()), scale=1.0)


def record_dataset(training: Samples, evaluation: Samples | None = None) -> Dataset:
    """Return a data set of samples to train, and samples that judge."""
    return _Records(training, evaluation)


def _last(values: np.ndarray) -> np.ndarray:
    """Return (n, C, *spatial) as (n, *spatial, C)."""
    return np.moveaxis(values, 1, -1) if values.ndim > 2 else values


def _kind(found: Any) -> str:
    return f"a tuple of {len(found)}" if isinstance(found, tuple) else f"a {type(found).__name__}"
