"""Weather and climate: variables of NetCDF or Zarr files over time, as channels to learn forecasts from."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from ...comm import ProcessGrid, Transport, all_or_none
from ...errors import ConfigError, DataError
from ...formats.cf_time import seconds_of_cf_times
from ...formats.fields import FieldMetadata
from ...geometry import Box
from ...io.hdf5 import checksum
from ...registry.ranges import Count, Finite, Index
from ...system.memory import parse_bytes
from ...terminal.console import counted
from ..augment import Transform
from ..base import Dataset, Split, count_held_out, require_fraction_or_count, tile_slices
from ..raw_values import normalise
from .field_series import FieldSeries
from .hdf5_tiles import PrefetchingSplit

_BLOCK_BYTES = 1 << 24  # bytes of a tile read at once for the statistics


class ClimateFiles(Dataset):
    """Time series of fields in NetCDF or Zarr files that follow the CF conventions.

    A sample has the variables at `steps` consecutive times as channels; its target has the variables `lead` time steps
    after the last of these times. All files form one series, of which each rank reads its tile. Variables are
    normalised by their mean and standard deviation over the training times, in both images and targets; checkpoints
    store these statistics.

    Parameters
    ----------
    files : str
        A pattern such as ``'era5/*.nc'``; sorting the files by name must sort them by time.
    variables : sequence of str
        Names of the variables, the channels of the images, such as ``[t2m, u10, v10]``.
    levels : sequence of float, or a mapping from variables to such sequences, optional
        Levels to read of variables with a vertical coordinate; each is a channel, such as 'z500' for level 500 of z.
    targets : sequence of str, optional
        Target variables, or channels such as 'z500'. Default: all variables.
    steps : int
        Number of times per image; channels of earlier times are named like 't2m@t-1'.
    lead : int
        Number of time steps from the last time of an image to its target; 0 for targets at the same time.
    normalise : 'training' or 'none'
        'training': the network input is (x - mean) / std of each variable. 'none': unnormalised values.
    fill : float, optional
        Value substituted for missing cells, in the units of the file. Default: missing cells are an error.
    validation, test : float, int or str, optional
        Fraction or number of samples of these splits, or a date such as '2018-01-01', from which targets belong to the
        split. The latest samples are for testing, the ones before for validation, and the earliest for training.
    ahead : bool
        Prefetch the next batch in a thread.
    cache : int or str
        Size of each rank's cache of decoded chunks: 128MiB, 4GiB or a number of bytes; 0 disables caching.

    Raises
    ------
    ConfigError
        If an argument is invalid.

    Examples
    --------
    >>> nd.ClimateFiles("era5/*.nc", ["t2m", "z"], levels=[500, 850], steps=2, lead=1, test=0.2)  # doctest: +SKIP
    """

    def __init__(
        self,
        files: str,
        variables: Sequence[str],
        *,
        levels: Sequence[float] | Mapping[str, Sequence[float]] | None = None,
        targets: Sequence[str] | None = None,
        steps: Count = 1,
        lead: Index = 1,
        normalise: Literal["training", "none"] = "training",
        fill: Finite | None = None,
        validation: float | int | str | None = 0.1,
        test: float | int | str | None = None,
        ahead: bool = True,
        cache: int | str = "128MiB",
    ) -> None:
        super().__init__(validation=None if isinstance(validation, str) else validation)
        require_fraction_or_count("test", None if isinstance(test, str) else test)
        self._held_out = {"test": test, "validation": validation}
        for field, share in self._held_out.items():
            if isinstance(share, str) and not re.fullmatch(r"\d{1,4}-\d\d?-\d\d?([ T]\d\d:\d\d(:\d\d)?)?", share):
                raise ConfigError(f"{field}: '{share}' is not a date; expected one such as '2018-01-01'")
        for field, names in (("variables", variables), ("targets", targets)):
            if names is not None and (isinstance(names, str) or not names or len({*names}) < len(names)):
                raise ConfigError(f"{field}: {names} is invalid; expected distinct names, such as [t2m, u10]")
        if isinstance(levels, Mapping) and (unknown := sorted({*levels} - {*variables, *(targets or ())})):
            raise ConfigError(f"levels: '{unknown[0]}' is not among the variables; correct the name")
        self.files, self.variables, self.levels, self.targets = files, list(variables), levels, targets
        self.steps, self.lead, self.normalise, self.fill = int(steps), int(lead), normalise, fill
        self.ahead, self.cache = ahead, cache
        self._cache_bytes = parse_bytes("cache", cache, minimum=0)
        self._checked_series: FieldSeries | None = None
        self._fields: FieldMetadata | None = None

    def check(self) -> None:
        """Check the headers of all files: variables, units, grid and increasing times."""
        self._checked_series = series = self.open_series(self.files)
        num_inputs = len(self.input_channels(series))
        self.sample_shape, self.classes = (*series.extent, num_inputs * self.steps), None
        targets = [series.channels[index] for index in self.target_channels(series)]
        self.target_shape = (*series.extent, len(targets))
        self._fields = FieldMetadata(
            f"{series.file_names[0]}:{targets[0].variable}",
            targets,
            series.extent,
            series.latitude,
            input_names=self.channel_names(series),
            input_units=self.input_units(series),
            lead_steps=self.lead,
            time_step_seconds=series.time_step_seconds,
            month_step=series.month_step,
            coordinates=series.coordinates,
            coordinate_directions=series.coordinate_directions,
        )
        self._sample_numbers_by_split()

    def open_series(self, files: str, argument_name: str = "files", include_targets: bool = True) -> FieldSeries:
        """Return the checked variables of files; `include_targets`: whether to include variables that are only targets.

        Raises
        ------
        DataError
            If files or variables do not match.
        """
        target_only = [name for name in self.targets or () if name not in self.variables] if include_targets else []
        options: Any = {"argument_name": argument_name, "fill": self.fill, "cache_bytes": self._cache_bytes}
        if not target_only:
            return FieldSeries(files, self.variables, self.levels, **options)
        input_series = FieldSeries(files, self.variables, self.levels, **options)
        missing = [name for name in target_only if not input_series.find_channels(name)]
        return FieldSeries(files, [*self.variables, *missing], self.levels, **options) if missing else input_series

    def input_channels(self, series: FieldSeries) -> list[int]:
        """Return the indices of the channels that an image has at each of its times."""
        return [index for index, channel in enumerate(series.channels) if channel.variable in self.variables]

    def target_channels(self, series: FieldSeries) -> list[int]:
        """Return the indices of the target channels."""
        names = self.variables if self.targets is None else self.targets
        channels = [index for name in names for index in series.find_channels(name)]
        if len({*channels}) < len(channels):
            raise ConfigError(f"targets: {list(names)} contains a channel twice; remove one of them")
        return channels

    def channel_names(self, series: FieldSeries) -> list[str]:
        """Return the names of the images' channels, earliest time first: 't2m@t-1', 't2m'."""
        names = [series.channels[index].name for index in self.input_channels(series)]
        steps_back = range(self.steps - 1, -1, -1)
        return [f"{name}@t-{age}" if age else name for age in steps_back for name in names]

    def input_units(self, series: FieldSeries) -> list[str]:
        """Return the units of the images' channels."""
        return [series.channels[index].units for index in self.input_channels(series)] * self.steps

    @property
    def _series(self) -> FieldSeries:
        if self._checked_series is None:
            self.check()
        assert self._checked_series is not None
        return self._checked_series

    @property
    def fields(self) -> FieldMetadata:
        """Metadata of the targets, with mean, std and climatology once the data set is open."""
        if self._fields is None:
            self.check()
        assert self._fields is not None
        return self._fields

    def open_splits(self, grid: ProcessGrid) -> tuple[Split, Split | None, Split | None]:
        """Return the splits, whose tiles are read from the files on demand."""
        series, samples_by_split = self._series, self._sample_numbers_by_split()
        content = [series.file_names, self.channel_names(series), series.extent, series.times.tolist()]
        self.content_hash = f"{checksum(np.frombuffer(repr(content[1:]).encode(), np.uint8)):08x}"
        tile = tile_slices(grid, self.sample_shape)[:-1]
        train, validation, test = (
            self._make_split(tile, samples) if len(samples) else None for samples in samples_by_split
        )
        assert train is not None
        return train, validation, test

    def open(self, grid: ProcessGrid, checked: bool = False, augment: Sequence[Transform] = (), seed: int = 0) -> None:
        """Load this rank's part of all splits and compute the training statistics. Collective, like `Dataset.open`."""
        super().open(grid, checked, augment, seed)
        series, fields = self._series, self.fields
        inputs, targets = self.input_channels(series), self.target_channels(series)
        box = grid.partition(series.extent).box(grid.tile)
        mean, variance = np.empty(0), np.empty(0)
        num_training_times = len(self._sample_numbers_by_split()[0]) + self.steps - 1 + self.lead
        with all_or_none(grid.world):
            mean, variance = _mean_and_variance_over_time(series, num_training_times, box)
        centre, deviation = np.zeros(len(series.channels)), np.ones(len(series.channels))
        if self.normalise == "training":
            num_cells = math.prod(series.extent)
            contributes = grid.replica == 0
            centre = _exact_global_sum(grid.world, mean, num_cells, contributes) / num_cells
            square_sums = _exact_global_sum(grid.world, variance + (mean - centre) ** 2, num_cells, contributes)
            deviation = np.sqrt(square_sums / num_cells)
            deviation = np.where(deviation > 0, deviation, 1.0)
        self._fields = fields = replace(
            fields, mean=centre[targets], std=deviation[targets], climatology=mean[..., targets]
        )
        for split in self.splits.values():
            split.normalise(np.tile(centre[inputs], self.steps), np.tile(deviation[inputs], self.steps))
            split.fields = fields

    def _sample_numbers_by_split(self) -> list[np.ndarray]:
        """Return the samples of the training, validation and test splits, as indices of their first times."""
        num_times = len(self._series)
        num_samples = num_times - self.steps + 1 - self.lead
        num_held_out = sum(share is not None for share in self._held_out.values())
        if num_samples < 1 + num_held_out:
            raise DataError(
                f"{self.files}: too few times: with steps: {self.steps} and lead: {self.lead},"
                f" {counted(num_times, 'time')} give {counted(max(num_samples, 0), 'sample')} for"
                f" {counted(1 + num_held_out, 'split')}; add files"
            )
        num_test = self._count_last_samples("test", num_samples)
        num_validation = self._count_last_samples("validation", num_samples)
        if isinstance(self._held_out["validation"], str):  # the test samples are also later than this date
            num_validation -= num_test
        if num_validation < (self._held_out["validation"] is not None):
            raise DataError(
                f"validation: {self._held_out['validation']} is not before the first test sample; give an earlier date"
            )
        if num_test + num_validation >= num_samples:
            raise DataError(
                f"validation: {num_validation} of {counted(num_samples, 'sample')} for validation and {num_test} for"
                " test leave none for training; hold out fewer"
            )
        test_start = num_samples - num_test
        validation_start = test_start - num_validation
        return np.split(np.arange(num_samples), [validation_start, test_start])

    def _count_last_samples(self, split: str, num_samples: int) -> int:
        """Return the number of last samples that are held out for a split, or have targets from its date on."""
        share, series = self._held_out[split], self._series
        if not isinstance(share, str):
            return 0 if share is None else count_held_out(split, share, num_samples)
        (date,) = seconds_of_cf_times(split, [0], f"seconds since {share}", series.calendar)
        count = int((series.times[-num_samples:] >= date).sum())
        if not count:
            raise DataError(f"{split}: no target is at {share} or later; give an earlier date")
        return count

    def _make_split(self, tile: tuple[slice, ...], sample_numbers: np.ndarray) -> Split:
        series = self._series
        images = FieldTiles(series, sample_numbers, self.steps, self.input_channels(series), tile)
        target_times = sample_numbers + self.steps - 1 + self.lead
        labels = FieldTiles(series, target_times, 1, self.target_channels(series), tile)
        return FieldSplit(images, labels, self.ahead, scale=1.0)


class FieldTiles:
    """One tile of the fields at some times, read on demand; not thread-safe.

    Parameters
    ----------
    series : FieldSeries
    first_times : array of int
        Index of the first time of each sample.
    steps : int
        Number of times of a sample; their channels are concatenated.
    channels : indices in `series.channels`
    tile : slices of the cells
    """

    def __init__(
        self, series: FieldSeries, first_times: np.ndarray, steps: int, channels: Sequence[int], tile: tuple[slice, ...]
    ) -> None:
        self.series, self._channels, self.tile = series, list(channels), tile
        self._first_times, self._times_per_sample = first_times, steps
        self.dtype, self.fill = series.dtype, series.fill
        extents = [cut.stop - cut.start for cut in tile]
        self.shape = (len(first_times), *extents, steps * len(self._channels))

    def __len__(self) -> int:
        return len(self._first_times)

    def __getitem__(self, indices: Any) -> np.ndarray:
        return self.read_cells(np.asarray(indices), tuple(slice(0, cut.stop - cut.start) for cut in self.tile))

    def read_cells(self, indices: np.ndarray, cells: tuple[slice, ...]) -> np.ndarray:
        """Return cells (n, *cells, C) of some samples; slices count from the tile's first cell."""
        box = [slice(own.start + cut.start, own.start + cut.stop) for own, cut in zip(self.tile, cells, strict=True)]
        times = (self._first_times[indices].reshape(-1, 1) + np.arange(self._times_per_sample)).ravel()
        fields = self.series.read(times, box, self._channels)
        by_sample = fields.reshape(len(indices), self._times_per_sample, *fields.shape[1:])
        channels_last = np.moveaxis(by_sample, 1, -2).reshape(len(indices), *fields.shape[1:-1], self.shape[-1])
        return np.ascontiguousarray(channels_last)

    def close(self) -> None:
        """Close the files; a later read opens them again."""
        self.series.close()


class FieldSplit(PrefetchingSplit):
    """A split of fields, whose targets are normalised like its images."""

    def __init__(self, tiles: FieldTiles, labels: FieldTiles, prefetch: bool, **normalisation: Any) -> None:
        super().__init__(tiles, labels, prefetch, **normalisation)
        self.fill = tiles.fill

    def targets(self, indices: ArrayLike) -> np.ndarray:
        """Return the targets (n, *tile, C) of some samples, normalised."""
        raw = super().targets(indices)
        assert self.fields is not None
        # in float64: float32 would round the offset, and so shift all targets
        return normalise(raw, *factor_and_subtrahend(self.fields), np.float64).astype(raw.dtype)


def factor_and_subtrahend(fields: FieldMetadata) -> tuple[list[float], list[float]]:
    """Return factor and subtrahend of each channel: normalised values are raw * factor - subtrahend."""
    return (1 / fields.std).tolist(), (fields.mean / fields.std).tolist()


def _mean_and_variance_over_time(series: FieldSeries, num_times: int, box: Box) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and variance (*box, C) of each cell over the first `num_times` times, in float64."""
    num_channels = len(series.channels)
    mean, square_sum = (np.zeros((*box.shape, num_channels)) for _ in range(2))
    times_per_block = max(1, _BLOCK_BYTES // max(1, box.size * num_channels * series.dtype.itemsize))
    for first in range(0, num_times if box.size else 0, times_per_block):
        # one time after the other, so that the results do not depend on the block size
        times = np.arange(first, min(first + times_per_block, num_times))
        for number, field in enumerate(series.read(times, box.slices), first + 1):
            difference = field - mean
            mean += difference / number
            square_sum += difference * (field - mean)
    return mean, square_sum / max(num_times, 1)


def _exact_global_sum(world: Transport, cells: np.ndarray, num_cells: int, contributes: bool) -> np.ndarray:
    """Return the sum of each channel over the cells of all ranks, the same for any grid. Collective.

    Values are added as integers of a common scale, whose sum does not depend on the order.
    """
    num_channels = cells.shape[-1]
    flat = cells.reshape(-1, num_channels)
    maxima = world.allgather(np.abs(flat).max(0, initial=0.0).tolist())
    bound = np.maximum(np.array(maxima).max(0) * num_cells, np.finfo(np.float64).tiny)
    scale = np.exp2(np.minimum(61 - np.ceil(np.log2(bound)), 1000))
    local_sums = np.rint(flat * scale).astype(np.int64).sum(0).tolist() if contributes else [0] * num_channels
    sums = [sum(column) for column in zip(*world.allgather(local_sums), strict=True)]
    return np.array(sums, np.float64) / scale
