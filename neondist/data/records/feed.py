"""Data set of the features and labels that a user's function computes from records."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from ...comm import ProcessGrid
from ...errors import ConfigError, DataError, UserError
from ...terminal.console import counted
from ..base import Dataset, Split
from .base import RecordReader

_NUM_RECORDS_CHECKED = 2


class Mode(str, Enum):
    """Purpose of the records passed to `feed`; a member equals its text."""

    TRAINING = "training"
    EVALUATION = "evaluation"
    PREDICTION = "prediction"


class FeedFunction:
    """Function that computes features and labels from records; its results are checked.

    Parameters
    ----------
    function : callable
        Takes a list of records and a mode; returns features (n, C, *spatial) or (n, F) and labels, one of each per
        record; features alone suffice for prediction.
    location : str
        File and line of the function, for messages.
    """

    def __init__(self, function: Callable[..., Any], location: str) -> None:
        self.function, self.location = function, location

    def __call__(self, records: list[np.ndarray], mode: Mode) -> tuple[np.ndarray, np.ndarray | None]:
        """Return features and labels, channels last; ConfigError if the function fails or returns invalid results."""
        name = getattr(self.function, "__name__", "feed")
        try:
            result = self.function(records, mode)
        except UserError:
            raise
        except Exception as error:
            raise ConfigError(f"{self.location}: {name} failed: {type(error).__name__}: {error}") from error
        is_pair = isinstance(result, tuple) and len(result) == 2
        if not is_pair and mode != Mode.PREDICTION:
            raise ConfigError(f"{self.location}: {name} returned {_describe_type(result)}; return (features, labels)")
        features = self._check_array(f"{name}: features", result[0] if is_pair else result, len(records))
        if features.dtype.kind in "iu" and features.dtype.itemsize > 2:  # ids, which float32 may not represent
            if features.max(initial=0) > np.iinfo(np.int64).max:
                raise ConfigError(
                    f"{self.location}: {name}: features have the value {features.max()}, which int64 cannot represent;"
                    " return smaller integers"
                )
            features = features.astype(np.int64)
        if features.ndim < 2:
            raise ConfigError(
                f"{self.location}: {name}: features have shape {features.shape}; return an array per record"
            )
        if not is_pair or mode == Mode.PREDICTION:
            return _channels_last(features), None
        labels = self._check_array(f"{name}: labels", result[1], len(records))
        return _channels_last(features), _channels_last(labels) if labels.shape[2:] == features.shape[2:] else labels

    def _check_array(self, name: str, values: Any, num_records: int) -> np.ndarray:
        try:
            array = np.asarray(values) if hasattr(values, "__array__") else np.stack([np.asarray(x) for x in values])
            count = len(array)
        except (TypeError, ValueError) as error:
            if isinstance(values, Sequence) and len(values) != num_records:
                array, count = np.empty(0), len(values)
            else:
                raise ConfigError(
                    f"{self.location}: {name} cannot form one array ({error}); return values of one shape"
                ) from error
        if count != num_records:
            raise ConfigError(
                f"{self.location}: {name}: got {count} for {counted(num_records, 'record')}; return one per record"
            )
        if array.dtype.kind not in "biuf":
            raise ConfigError(f"{self.location}: {name} have dtype {array.dtype}; return numbers")
        return array


class RecordSamples:
    """Features and labels of the usable records, computed on demand.

    Parameters
    ----------
    reader : RecordReader
    feed : FeedFunction
    mode : Mode
    bad_numbers : collection of int
        Numbers of records to leave out.
    """

    def __init__(self, reader: RecordReader, feed: FeedFunction, mode: Mode, bad_numbers: Sequence[int] = ()) -> None:
        self.reader, self.feed, self.mode = reader, feed, mode
        self.record_numbers = np.setdiff1d(np.arange(len(reader)), np.asarray(bad_numbers, np.intp))
        if not len(self.record_numbers):
            raise DataError(f"{reader.source}: has no usable records; correct them")
        self._cached_batch = lru_cache(maxsize=2)(self._compute_batch)  # images and targets are requested separately

    def __len__(self) -> int:
        return len(self.record_numbers)

    @cached_property
    def has_integer_features(self) -> bool:
        """Whether the features of the first records, and thus of all, are int64."""
        return self._cached_batch(tuple(range(min(_NUM_RECORDS_CHECKED, len(self)))))[0].dtype == np.int64

    def features_and_labels(self, indices: Any) -> tuple[np.ndarray, np.ndarray | None]:
        """Return features (n, *spatial, C), int64 if they are integers of more than 16 bits, and labels."""
        numbers = tuple(np.asarray(indices).tolist())
        features, labels = self._cached_batch(numbers or (0,))
        if not numbers:  # a replica without records of a small last batch; feed may fail for none
            return features[:0], None if labels is None else labels[:0]
        if (features.dtype == np.int64) != self.has_integer_features:
            raise ConfigError(
                f"{self.feed.location}: feed: features are integers in some batches only; return one dtype for all"
            )
        return features, labels

    def _compute_batch(self, indices: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray | None]:
        return self.feed(self.reader.read(self.record_numbers[list(indices)].tolist()), self.mode)

    def content_hash(self) -> str:
        """Return a hash of some records, equal on all ranks that read the same source."""
        numbers = self.record_numbers[np.linspace(0, len(self) - 1, min(8, len(self))).astype(int)]
        crcs = [zlib.crc32(np.ascontiguousarray(record).tobytes()) for record in self.reader.read(numbers.tolist())]
        return f"{len(self)}:{zlib.crc32(np.array(crcs, np.int64).tobytes()):08x}"


class _SampleTiles:
    """This rank's tiles of features or label maps, or whole labels of another shape."""

    def __init__(self, samples: RecordSamples, component: int, shape: tuple[int, ...], tile: tuple[slice, ...]) -> None:
        self._samples, self._component, self._tile_slices = samples, component, tile
        own_extents = tuple(len(range(*cut.indices(n))) for cut, n in zip(tile, shape, strict=False))
        self.shape = (len(samples), *own_extents, *shape[len(tile) :])

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, indices: Any) -> np.ndarray:
        values = self._samples.features_and_labels(np.arange(len(self))[indices])[self._component]
        assert values is not None  # prediction needs no labels
        return values[(slice(None), *self._tile_slices)]

    def describe_sample(self, number: int) -> str:
        return self._samples.reader.describe_record(int(self._samples.record_numbers[number]))


class _RecordDataset(Dataset):
    """Records of one or two sources; see `record_dataset`."""

    classes = None

    def __init__(self, training: RecordSamples, evaluation: RecordSamples | None = None) -> None:
        super().__init__()
        self._samples_by_split = {"train": training} | ({} if evaluation is None else {"validation": evaluation})

    def check(self) -> None:
        """Compute the features of a few records, and check their shapes."""
        shapes = set()
        for samples in self._samples_by_split.values():
            features, _ = samples.features_and_labels(range(min(_NUM_RECORDS_CHECKED, len(samples))))
            shapes.add((features.shape[1:], samples.has_integer_features))
        if len(shapes) > 1:
            raise DataError(
                f"feed: features of {' and '.join(s.reader.source for s in self._samples_by_split.values())} differ in"
                " shape or dtype; return the same for both"
            )
        self.sample_shape, _ = shapes.pop()

    def read_first_samples(self) -> tuple[np.ndarray, np.ndarray | None]:
        samples = self._samples_by_split["train"]
        return samples.features_and_labels(range(min(_NUM_RECORDS_CHECKED, len(samples))))

    def open_splits(self, grid: ProcessGrid) -> tuple[Split, Split | None, Split | None]:
        self.content_hash = " ".join(samples.content_hash() for samples in self._samples_by_split.values())
        splits = {name: self._make_split(samples, grid) for name, samples in self._samples_by_split.items()}
        return splits["train"], splits.get("validation"), None

    def _make_split(self, samples: RecordSamples, grid: ProcessGrid) -> Split:
        extent = self.sample_shape[:-1]
        cells = grid.tile_box(extent).slices if extent else ()
        features, labels = samples.features_and_labels(range(min(_NUM_RECORDS_CHECKED, len(samples))))
        label_shape = (0,) if labels is None else labels.shape[1:]
        has_label_maps = bool(extent) and label_shape[: len(extent)] == extent
        images = _SampleTiles(samples, 0, features.shape[1:], cells)
        split = Split(images, _SampleTiles(samples, 1, label_shape, cells if has_label_maps else ()), scale=1.0)
        split.has_integer_images = samples.has_integer_features
        return split


def record_dataset(training: RecordSamples, evaluation: RecordSamples | None = None) -> Dataset:
    """Return a data set of training samples and, optionally, evaluation samples."""
    return _RecordDataset(training, evaluation)


def _channels_last(values: np.ndarray) -> np.ndarray:
    """Return (n, C, *spatial) as (n, *spatial, C)."""
    return np.moveaxis(values, 1, -1) if values.ndim > 2 else values


def _describe_type(result: Any) -> str:
    return f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {type(result).__name__}"
