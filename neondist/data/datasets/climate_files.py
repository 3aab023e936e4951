"""Weather and climate: variables of NetCDF or Zarr files over time, as channels to learn forecasts from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from ...comm import ProcessGrid, Transport, all_or_none
from ...errors import ConfigError, DataError
from ...formats.fields import Fields
from ...geometry import Box
from ...io.hdf5 import checksum
from ...registry.ranges import Count, Index
from ...system.memory import as_bytes
from ..augment import Transform
from ..base import Dataset, Split, count_of, require_share, tile_slices
from ..raw import normalised
from .field_series import FieldSeries
from .hdf5_tiles import StreamedSplit

_BLOCK = 1 << 24  # bytes of a tile that are read at once for the statistics


class ClimateFiles(Dataset):
    """Time series of fields in NetCDF or Zarr files that follow the CF conventions.

    A sample has the variables at `steps` consecutive times as channels; its target has the variables `lead` time steps
    after the last of these. All files form one series, of which each rank reads its tile. Variables are normalised by
    their mean and standard deviation over the training times, in images and targets alike; checkpoints store these
    statistics.

    Parameters
    ----------
    files : str
        A pattern such as ``'era5/*.nc'``; sorting the files by name must sort them by time.
    variables : sequence of str
        Names of the variables, the channels of the images, such as ``[t2m, u10, v10]``.
    levels : sequence of float, or a mapping of variables to them, optional
        Levels of variables with a vertical coordinate, each a channel: level 500 of z is 'z500'.
    targets : sequence of str, optional
        Target variables, or channels such as 'z500'. Default: all variables.
    steps : int
        Number of times per image; channels of earlier times are named like 't2m@t-1'.
    lead : int
        Number of time steps from the last of these to the target; 0 for targets at the same time.
    normalise : 'training' or 'none'
        'training': the network sees (x - mean) / std of each variable. 'none': unnormalised values.
    fill : float, optional
        Value substituted for missing cells, in the units of the file. Default: missing cells are an error.
    validation, test : float or int, optional
        Fraction or number of samples of these splits: test has the latest samples, validation those before, training
        the earliest.
    ahead : bool
        Prefetch the next batch in a thread.
    cache : int or str
        Size of each rank's cache of decoded chunks: 128MiB, 4GiB or a number of bytes.

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
        fill: float | None = None,
        validation: float | int | None = 0.1,
        test: float | int | None = None,
        ahead: bool = True,
        cache: int | str = "128MiB",
    ) -> None:
        super().__init__(validation=validation)
        require_share("test", test)
        for field, names in (("variables", variables), ("targets", targets)):
            if names is not None and (isinstance(names, str) or not names or len({*names}) < len(names)):
                raise ConfigError(f"{field}: {names} is invalid; expected names, each once, such as [t2m, u10]")
        if isinstance(levels, Mapping) and (unknown := sorted({*levels} - {*variables, *(targets or ())})):
            raise ConfigError(f"levels: '{unknown[0]}' is not among the variables; correct the name")
        if fill is not None and not math.isfinite(fill):
            raise ConfigError(f"fill: {fill} is invalid; expected a finite number")
        self.files, self.variables, self.levels, self.targets = files, list(variables), levels, targets
        self.steps, self.lead, self.normalise, self.fill = int(steps), int(lead), normalise, fill
        self.ahead, self.cache, self._test = ahead, cache, test
        self._cache = as_bytes("cache", cache)
        self._series: FieldSeries | None = None
        self._fields: Fields | None = None

    def check(self) -> None:
        """Check the headers of all files: variables, units, grid and increasing times."""
        self._series = series = self.open_series(self.files)
        inputs = len(self.input_channels(series))
        self.sample_shape, self.classes = (*series.extent, inputs * self.steps), None
        chosen = [series.channels[at] for at in self.target_channels(series)]
        self._fields = Fields(
            f"{series.names[0]}:{chosen[0].variable}",
            chosen,
            series.extent,
            series.latitude,
            inputs=self.channel_names(series),
            input_units=self.input_units(series),
            lead=self.lead,
            step=series.step,
            order=series.order,
        )
        self._numbers()

    def open_series(self, files: str, field: str = "files", targets: bool = True) -> FieldSeries:
        """Return the checked variables of files; `targets`: including those that are only targets.

        Raises
        ------
        DataError
            If files or variables do not match.
        """
        more = [name for name in self.targets or () if name not in self.variables] if targets else []
        options: Any = {"field": field, "fill": self.fill, "cache": self._cache}
        if not more:
            return FieldSeries(files, self.variables, self.levels, **options)
        known = FieldSeries(files, self.variables, self.levels, **options)
        new = [name for name in more if not known.place_named(name)]
        return FieldSeries(files, [*self.variables, *new], self.levels, **options) if new else known

    def input_channels(self, series: FieldSeries) -> list[int]:
        """Return the channels of a series in an image, at each of its times."""
        return [at for at, one in enumerate(series.channels) if one.variable in self.variables]

    def target_channels(self, series: FieldSeries) -> list[int]:
        """Return the target channels of a series."""
        names = self.variables if self.targets is None else self.targets
        found = [at for name in names for at in series.place_named(name)]
        if len({*found}) < len(found):
            raise ConfigError(f"targets: {list(names)} name a channel twice; leave out one of them")
        return found

    def channel_names(self, series: FieldSeries) -> list[str]:
        """Return the names of the images' channels, earliest time first: 't2m@t-1', 't2m'."""
        names = [series.channels[at].name for at in self.input_channels(series)]
        ages = range(self.steps - 1, -1, -1)
        return [f"{name}@t-{age}" if age else name for age in ages for name in names]

    def input_units(self, series: FieldSeries) -> list[str]:
        """Return the units of the images' channels."""
        return [series.channels[at].units for at in self.input_channels(series)] * self.steps

    @property
    def fields(self) -> Fields:
        """Metadata of the targets, with mean, std and climatology once the data set is open."""
        if self._fields is None:
            self.check()
        assert self._fields is not None
        return self._fields

    def load(self, grid: ProcessGrid) -> tuple[Split, Split | None, Split | None]:
        """Return the splits, whose tiles are read from the files on demand."""
        if self._series is None:
            self.check()
        series, numbers = self._series, self._numbers()
        assert series is not None
        facts = [series.names, self.channel_names(series), series.extent, series.times.tolist()]
        self.content = f"{checksum(np.frombuffer(repr(facts[1:]).encode(), np.uint8)):08x}"
        tile = tile_slices(grid, self.sample_shape)[:-1]
        train, validation, test = (self._split(tile, of) if len(of) else None for of in numbers)
        assert train is not None
        return train, validation, test

    def open(self, grid: ProcessGrid, checked: bool = False, augment: Sequence[Transform] = (), seed: int = 0) -> None:
        """Load this rank's part of all splits and compute the training statistics; collective, as `Dataset.open`."""
        super().open(grid, checked, augment, seed)
        series, fields = self._series, self.fields
        assert series is not None
        inputs, targets = self.input_channels(series), self.target_channels(series)
        box = grid.partition(series.extent).box(grid.tile)
        mean, square = np.empty(0), np.empty(0)
        with all_or_none(grid.world):
            mean, square = _over_time(series, self._training_times(), box)
        centre, deviation = np.zeros(len(series.channels)), np.ones(len(series.channels))
        if self.normalise == "training":
            cells = math.prod(series.extent)
            owns = grid.replica == 0
            centre = _exact_sum(grid.world, mean, cells, owns) / cells
            deviation = np.sqrt(_exact_sum(grid.world, square + (mean - centre) ** 2, cells, owns) / cells)
            deviation = np.where(deviation > 0, deviation, 1.0)
        self._fields = fields = replace(
            fields, mean=centre[targets], std=deviation[targets], climatology=mean[..., targets]
        )
        for split in self.splits.values():
            split.normalise(np.tile(centre[inputs], self.steps), np.tile(deviation[inputs], self.steps))
            split.fields = fields

    def _training_times(self) -> int:
        """Return how many times the training samples see."""
        return len(self._numbers()[0]) + self.steps - 1 + self.lead

    def _numbers(self) -> list[np.ndarray]:
        """Return which samples are for training, validation and test; they are numbered by their first time."""
        assert self._series is not None
        times = len(self._series)
        samples = times - self.steps + 1 - self.lead
        kept = (self._kept is not None) + (self._test is not None)
        if samples < 1 + kept:
            raise DataError(
                f"{self.files}: too few times for steps: {self.steps} and lead: {self.lead}: {times}, which makes"
                f" {max(samples, 0)} samples, and {1 + kept} splits; give more files"
            )
        last = 0 if self._test is None else count_of("test", self._test, samples)
        middle = 0 if self._kept is None else self.count_kept(samples)
        if last + middle >= samples:
            raise DataError(
                f"validation: {middle} of {samples} samples, and {last} for test, leave no training samples; give fewer"
            )
        first = samples - last - middle
        return [np.arange(0, first), np.arange(first, first + middle), np.arange(first + middle, samples)]

    def _split(self, tile: tuple[slice, ...], numbers: np.ndarray) -> Split:
        """Return samples as a split."""
        series = self._series
        assert series is not None
        images = FieldTiles(series, numbers, self.steps, self.input_channels(series), tile)
        target = numbers + self.steps - 1 + self.lead
        labels = FieldTiles(series, target, 1, self.target_channels(series), tile)
        return FieldSplit(images, labels, self.ahead, scale=1.0)


class FieldTiles:
    """One tile of the fields at some times, read when they are asked for; one thread at a time may read.

    Parameters
    ----------
    series : FieldSeries
    first : array of int
        The first time of each sample.
    steps : int
        How many times it has, whose channels follow each other.
    channels : which of the series
    tile : slices of the cells
    """

    def __init__(
        self, series: FieldSeries, first: np.ndarray, steps: int, channels: Sequence[int], tile: tuple[slice, ...]
    ) -> None:
        self.series, self._first, self._steps, self._channels, self.tile = series, first, steps, list(channels), tile
        self.dtype, self.fill = series.dtype, series.fill
        cells = [cut.stop - cut.start for cut in tile]
        self.shape = (len(first), *cells, steps * len(self._channels))

    def __len__(self) -> int:
        return len(self._first)

    def __getitem__(self, indices: Any) -> np.ndarray:
        return self.part(np.asarray(indices), tuple(slice(0, cut.stop - cut.start) for cut in self.tile))

    def part(self, indices: np.ndarray, cells: tuple[slice, ...]) -> np.ndarray:
        """Return cells (n, *cells, C) of some samples; slices count from the tile's first cell."""
        box = [slice(of.start + cut.start, of.start + cut.stop) for of, cut in zip(self.tile, cells, strict=True)]
        times = (self._first[indices].reshape(-1, 1) + np.arange(self._steps)).ravel()
        found = self.series.read(times, box, self._channels)
        apart = found.reshape(len(indices), self._steps, *found.shape[1:])
        whole = np.moveaxis(apart, 1, -2).reshape(len(indices), *found.shape[1:-1], self.shape[-1])
        return np.ascontiguousarray(whole)

    def close(self) -> None:
        """Close the files; a later read opens them again."""
        self.series.close()


class FieldSplit(StreamedSplit):
    """A split of fields, whose targets are normalised as its images are."""

    def __init__(self, tiles: FieldTiles, labels: FieldTiles, ahead: bool, **normalisation: Any) -> None:
        super().__init__(tiles, labels, ahead, **normalisation)
        self.fill = tiles.fill

    def targets(self, indices: ArrayLike) -> np.ndarray:
        """Return the targets (n, *tile, C) of some samples, normalised."""
        found = super().targets(indices)
        assert self.fields is not None
        # in float64, for float32 would round what is taken away, and so move all targets
        return normalised(found, *scaling_of(self.fields), np.float64).astype(found.dtype)


def scaling_of(fields: Fields) -> tuple[list[float], list[float]]:
    """Return the factor and the offset of each channel: normalised values are raw ones times factor minus offset."""
    return (1 / fields.std).tolist(), (fields.mean / fields.std).tolist()


def _over_time(series: FieldSeries, count: int, box: Box) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and the mean square deviation (*box, C) of each cell over the first times, in float64."""
    channels = len(series.channels)
    mean, square = (np.zeros((*box.shape, channels)) for _ in range(2))
    some = max(1, _BLOCK // max(1, box.size * channels * series.dtype.itemsize))
    for first in range(0, count if box.size else 0, some):
        # one time after the other, so that the numbers do not depend on how many fit into a block
        for at, found in enumerate(series.read(np.arange(first, min(first + some, count)), box.slices), first + 1):
            away = found - mean
            mean += away / at
            square += away * (found - mean)
    return mean, square / max(count, 1)


def _exact_sum(world: Transport, cells: np.ndarray, count: int, owns: bool) -> np.ndarray:
    """Return the sum of each channel over the cells of all ranks, the same for any grid; collective.

    Numbers are added as integers of a common scale, whose sum does not depend on the order.
    """
    channels = cells.shape[-1]
    flat = cells.reshape(-1, channels)
    tops = world.allgather(np.abs(flat).max(0, initial=0.0).tolist())
    top = np.maximum(np.array(tops).max(0) * count, np.finfo(np.float64).tiny)
    scale = np.exp2(np.minimum(61 - np.ceil(np.log2(top)), 1000))
    mine = np.rint(flat * scale).astype(np.int64).sum(0).tolist() if owns else [0] * channels
    sums = [sum(column) for column in zip(*world.allgather(mine), strict=True)]
    return np.array(sums, np.float64) / scale
