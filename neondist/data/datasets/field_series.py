"""Time series of variables in several files, read box by box."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ...errors import DataError
from ...formats import TileSource, open_source
from ...formats.cache import ChunkCache
from ...formats.cf_time import are_comparable_calendars
from ...formats.conventions import AuxiliaryVariable
from ...formats.coordinates import (
    calendar_of,
    coordinate_along_axis,
    coordinate_values,
    dimension_name,
    latitudes_of,
    require_equal_coordinates,
    text_attribute,
    times_in_seconds,
    unpacked_values,
)
from ...formats.fields import FieldChannel
from ...formats.month_step import MonthStep, infer_month_step
from ..raw_values import fill_missing
from .hdf5_tiles import contiguous_runs
from .image_lists import match_files

_MAX_OPEN_VARIABLES = 64
_MAX_STEP_RATIO = 1.5  # longest regular step, relative to the usual one: months have 28 to 31 days

Levels = Sequence[float] | Mapping[str, Sequence[float]] | None


class FieldSeries:
    """The channels of some variables over the times of all files matching a pattern, sorted by file name.

    Parameters
    ----------
    files : str
        A pattern of NetCDF or Zarr files.
    variables : sequence of str
    levels : sequence of float, or a mapping from variables to such sequences, optional
        Values of the vertical coordinate to read; each is a channel.
    argument_name : str
        Name of the pattern's argument, for messages.
    fill : float, optional
        Value substituted for NaN. Default: NaN is an error.
    cache_bytes : int
        Bytes of decoded chunks to keep.

    Attributes
    ----------
    channels : list of FieldChannel
    extent : (H, W)
    times : array (T,)
        In seconds; `time_step_seconds` is the usual difference, `month_step` a constant difference in calendar months.
    coordinates : dict of axis letter to array, or None
        Coordinates of the rows, Y, and of the columns, X.
    latitude : array (H,) or (H, W), or None
    dtype : numpy.dtype

    Raises
    ------
    DataError
        If the files do not form one series; the message names the file and the remedy.
    """

    def __init__(
        self,
        files: str,
        variables: Sequence[str],
        levels: Levels = None,
        *,
        argument_name: str = "files",
        fill: float | None = None,
        cache_bytes: int = 0,
    ) -> None:
        self.file_names, self.variables = match_files(argument_name, files), list(variables)
        self.levels, self.fill = levels, fill
        self._cache, self._sources = ChunkCache(cache_bytes), OrderedDict[tuple[int, str], TileSource]()
        self.channels: list[FieldChannel] = []
        self.coordinates: dict[str, np.ndarray | None] = {}
        self._reference_grid: tuple[str, tuple[str, ...]] | None = None
        self._first_file_and_calendar: tuple[str, str] | None = None
        dtypes, times_by_file = set(), []
        try:
            for number, name in enumerate(self.file_names):
                variable_sources = [self._open_and_check_axes(number, variable) for variable in self.variables]
                self._set_or_check_channels(name, variable_sources)
                dtypes |= {source.dtype for source, _ in variable_sources}
                times_by_file.append(self._read_times(name, variable_sources))
            self._file_offsets = np.cumsum([0, *map(len, times_by_file)])
            self.times = np.concatenate(times_by_file)
            self.dtype = np.result_type(*dtypes, np.float32)
            self._check_times()
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self.times)

    def read(self, times: np.ndarray, cells: Sequence[slice], channels: Sequence[int] | None = None) -> np.ndarray:
        """Return cells (n, *cells, C) at `times`, given as indices; `channels`: indices of channels, all by default."""
        channel_indices = range(len(self.channels)) if channels is None else channels
        extents = [cut.stop - cut.start for cut in cells]
        out = np.empty((len(times), *extents, len(channel_indices)), self.dtype)
        if not out.size:
            return out
        for start, file_index, first, count in self._contiguous_reads(times):
            for variable, selection in self._group_by_variable(channel_indices).items():
                source = self._open_variable(file_index, variable)
                for index, channel in selection:
                    box = self._source_slices(source, slice(first, first + count), cells, channel)
                    values = source.read(box).reshape(count, *extents)
                    out[start : start + count, ..., index] = fill_missing(f"{source.path}", values, self.fill)
        return out

    def source_containing(self, time_index: int, channel: int = 0) -> TileSource:
        """Return the variable of a channel in the file that contains a time."""
        return self._open_variable(self._file_index(time_index), self.channels[channel].variable)

    def find_channels(self, name: str) -> list[int]:
        """Return the indices of the channels of a variable, or of the channel, called `name`."""
        return [index for index, channel in enumerate(self.channels) if name in (channel.variable, channel.name)]

    def close(self) -> None:
        """Close all files; a later read opens them again."""
        while self._sources:
            self._sources.popitem()[1].close()

    @property
    def calendar(self) -> str:
        """The calendar of the first file."""
        assert self._first_file_and_calendar is not None
        return self._first_file_and_calendar[1]

    @property
    def time_step_seconds(self) -> float:
        """The usual time step in seconds: the lower median, so that one of two steps can be a gap."""
        return float(np.sort(np.diff(self.times))[(len(self) - 2) // 2]) if len(self) > 1 else 0.0

    @property
    def month_step(self) -> MonthStep | None:
        """The time step in calendar months, if it is constant."""
        return infer_month_step(self.times, self.calendar)

    @property
    def coordinate_directions(self) -> tuple[str, str]:
        """Whether coordinates of rows and columns are 'ascending' or 'descending'; '' if unknown."""
        values = [self.coordinates.get(axis) for axis in "YX"]
        steps = [0.0 if x is None or x.ndim > 1 or len(x) < 2 else float(x[1] - x[0]) for x in values]
        row, column = ("" if not step else "ascending" if step > 0 else "descending" for step in steps)
        return row, column

    @property
    def has_periodic_columns(self) -> bool:
        """Whether the coordinates of the columns are evenly spaced over 360 degrees, without a repeated column."""
        x = self.coordinates.get("X")
        if x is None or x.ndim > 1 or len(x) < 2:
            return False
        step = 360 / len(x)
        distances = np.abs([*np.diff(x), x[-1] - x[0]])  # the last distance detects a repeated column
        return bool(np.allclose(distances, [*[step] * (len(x) - 1), 360 - step], rtol=0, atol=0.01 * step))

    def _file_index(self, time_index: int) -> int:
        return int(np.searchsorted(self._file_offsets, time_index, "right")) - 1

    def _contiguous_reads(self, time_indices: np.ndarray) -> Iterator[tuple[int, int, int, int]]:
        """Yield (position, file index, first time in the file, count) of each run of times that is read at once."""
        for start, first, count in contiguous_runs(np.asarray(time_indices)):
            position = start
            while count:
                file_index = self._file_index(first)
                num_times = min(count, int(self._file_offsets[file_index + 1]) - first)
                yield position, file_index, first - int(self._file_offsets[file_index]), num_times
                position, first, count = position + num_times, first + num_times, count - num_times

    def _group_by_variable(self, channel_indices: Sequence[int]) -> dict[str, list[tuple[int, FieldChannel]]]:
        groups: dict[str, list[tuple[int, FieldChannel]]] = {}
        for index, channel in enumerate(channel_indices):
            groups.setdefault(self.channels[channel].variable, []).append((index, self.channels[channel]))
        return groups

    @staticmethod
    def _source_slices(source: TileSource, times: slice, cells: Sequence[slice], channel: FieldChannel) -> list[slice]:
        level = 0 if channel.level is None else channel.level[0]
        slices = {"T": times, "Y": cells[0], "X": cells[1], "Z": slice(level, level + 1)}
        return [slices.get(letter, slice(0, 1)) for letter in source.axes]

    def _open_variable(self, file_index: int, variable: str) -> TileSource:
        key = file_index, variable
        if key not in self._sources:
            if len(self._sources) >= _MAX_OPEN_VARIABLES:
                self._sources.popitem(last=False)[1].close()
            source = open_source(f"{self.file_names[file_index]}:{variable}")
            source.convert_integers()
            source.cache = self._cache
            self._sources[key] = source
        self._sources.move_to_end(key)
        return self._sources[key]

    def _open_and_check_axes(self, file_index: int, variable: str) -> tuple[TileSource, list[AuxiliaryVariable]]:
        """Return a variable and its auxiliary variables; DataError unless its axes are time, rows and columns."""
        source = self._open_variable(file_index, variable)
        extent_by_letter = dict(zip(source.axes, source.shape, strict=True))
        required_axes = {"T": "time", "Y": "latitude", "X": "longitude"}
        for letter, kind in required_axes.items():
            if letter not in extent_by_letter:
                raise DataError(
                    f"{source.path}: has no {kind} axis (its axes are {source.axes[:-1]}); leave the variable out, or"
                    " add such an axis"
                )
        for letter, n in extent_by_letter.items():
            if letter not in "TZYX" and n > 1:
                name = dimension_name(source, letter) or letter
                raise DataError(
                    f"{source.path}: has {n} cells along '{name}', but must be a field over time, level, latitude and"
                    f" longitude; select one index along '{name}'"
                )
        return source, source.auxiliary_variables()[0]

    def _set_or_check_channels(self, name: str, sources: Sequence[tuple[TileSource, list[AuxiliaryVariable]]]) -> None:
        """Set the channels from the first file; DataError if a later file has other channels or another grid."""
        channels: list[FieldChannel] = []
        for variable, (source, auxiliaries) in zip(self.variables, sources, strict=True):
            attributes = source.array_attributes()
            units = text_attribute(attributes, "units")
            levels = self._select_levels(variable, source, auxiliaries)
            if levels is None:
                channels.append(FieldChannel(variable, variable, None, units, attributes))
            for number, value in levels or ():
                channels.append(FieldChannel(f"{variable}{value:g}", variable, (number, value), units, attributes))
            self._check_grid(source, auxiliaries)
        if not self.channels:
            self.channels = channels
            self.latitude = next((rows for pair in sources if (rows := latitudes_of(*pair)) is not None), None)
            names = [channel.name for channel in channels]
            repeated = next((name for name in names if names.count(name) > 1), None)
            if repeated is not None:
                raise DataError(f"{name}: two channels are called '{repeated}'; leave out a variable or a level")
        if [channel.name for channel in channels] != [channel.name for channel in self.channels]:
            raise DataError(
                f"{name}: has channels {', '.join(channel.name for channel in channels)}, but {self.file_names[0]} has"
                f" {', '.join(channel.name for channel in self.channels)}; give all files the same levels"
            )
        for channel, first in zip(channels, self.channels, strict=True):
            if channel.units != first.units:
                raise DataError(
                    f"{name}: {channel.variable} has units '{channel.units}', but '{first.units}' in"
                    f" {self.file_names[0]}; convert one of the files, so that all have the same units"
                )
            if channel.level != first.level:
                raise DataError(
                    f"{name}: {channel.variable} has level {channel.name} at a different position than in"
                    f" {self.file_names[0]}; write the levels of all files in the same order"
                )

    def _select_levels(
        self, variable: str, source: TileSource, auxiliaries: Sequence[AuxiliaryVariable]
    ) -> list[tuple[int, float]] | None:
        """Return the indices and values of the requested levels; None for a variable without levels."""
        requested = self.levels.get(variable) if isinstance(self.levels, Mapping) else self.levels
        count = dict(zip(source.axes, source.shape, strict=True)).get("Z")
        if count is None or (count == 1 and requested is None):
            return None
        coord = coordinate_along_axis(source, "Z", auxiliaries)
        level_values = np.arange(count) if coord is None else unpacked_values(source.path, coord)
        level_values = np.asarray(level_values, np.float64)
        listed = ", ".join(f"{value:g}" for value in level_values.tolist())
        if requested is None:
            raise DataError(f"{source.path}: has {count} levels; choose some with levels: {listed}")
        levels = []
        for value in requested:
            index = np.flatnonzero(np.isclose(level_values, value, rtol=1e-6, atol=0))
            if not index.size:
                raise DataError(f"{source.path}: has no level {value:g}; choose from {listed}")
            levels.append((int(index[0]), float(value)))
        return levels

    def _check_grid(self, source: TileSource, auxiliaries: Sequence[AuxiliaryVariable]) -> None:
        """Raise DataError unless a variable has the same grid as the first one."""
        extent_by_letter = dict(zip(source.axes, source.shape, strict=True))
        extent = extent_by_letter["Y"], extent_by_letter["X"]
        dim_names = tuple(dimension_name(source, letter) for letter in "YX")
        if self._reference_grid is None:
            self.extent, self._reference_grid = extent, (source.path, dim_names)
        first_path, first_names = self._reference_grid
        if extent != self.extent or dim_names != first_names:
            grid, first_grid = (
                " x ".join(f"{name or letter} {n}" for name, letter, n in zip(dimensions, "YX", sizes, strict=True))
                for dimensions, sizes in ((dim_names, extent), (first_names, self.extent))
            )
            raise DataError(
                f"{source.path}: has the grid {grid}, but {first_path} has {first_grid}; variables must share their"
                " dimensions: regrid one of them, or leave it out"
            )
        for letter in "YX":
            values = coordinate_values(source, letter, auxiliaries)
            if values is not None and not np.isfinite(values).all():
                raise DataError(
                    f"{source.path}: its coordinate {dimension_name(source, letter)} has missing values; give each row"
                    " and column a value, or remove the coordinate"
                )
            reference = self.coordinates.setdefault(letter, values)
            if values is not None and reference is not None:
                require_equal_coordinates(source, letter, values, first_path, reference)

    def _read_times(self, name: str, sources: Sequence[tuple[TileSource, list[AuxiliaryVariable]]]) -> np.ndarray:
        """Return the times of a file in seconds; DataError if its variables have different times."""
        times: list[np.ndarray] = []
        for source, auxiliaries in sources:
            coord = coordinate_along_axis(source, "T", auxiliaries)
            if coord is None:
                raise DataError(
                    f"{source.path}: has no time coordinate along '{dimension_name(source, 'T') or 'T'}'; add one"
                    " with units such as 'hours since 2000-01-01 00:00:00'"
                )
            first_file, calendar = self._first_file_and_calendar or (name, calendar_of(coord))
            self._first_file_and_calendar = first_file, calendar
            if not are_comparable_calendars(f"{name}:{coord.name}", calendar_of(coord), calendar):
                raise DataError(
                    f"{name}: its times have the calendar '{calendar_of(coord)}', but {first_file} has '{calendar}';"
                    " convert them to one calendar (xarray: convert_calendar)"
                )
            times.append(times_in_seconds(name, coord))
            if len(times[0]) != len(times[-1]) or not np.array_equal(times[0], times[-1]):
                raise DataError(
                    f"{source.path}: its times differ from those of {sources[0][0].path}; variables must share their"
                    " dimensions: select the common times"
                )
        return times[0]

    def _check_times(self) -> None:
        """Raise DataError if the times are not increasing, or have a gap."""
        steps, usual_step = np.diff(self.times), self.time_step_seconds
        bad_steps = np.flatnonzero(steps <= 0)  # unsorted times have gaps, too
        bad_steps = bad_steps if bad_steps.size else np.flatnonzero(steps > _MAX_STEP_RATIO * usual_step)
        if not bad_steps.size:
            return
        time_index = int(bad_steps[0]) + 1
        file_index = self._file_index(time_index)
        name = self.file_names[file_index]
        index_in_file = time_index - self._file_offsets[file_index]
        is_first, where = index_in_file == 0, f"time {index_in_file + 1} of {name}"
        previous = f"the last of {self.file_names[file_index - 1]}" if is_first else "the one before"
        if steps[time_index - 1] <= 0:
            raise DataError(
                f"{name}: times are not increasing: {where} is not after {previous}; sort the times of the"
                " file, and name the files so that they sort by time"
            )
        raise DataError(
            f"{name}: has a gap in time: {where} is {_format_duration(steps[time_index - 1])} after {previous}, but the"
            f" usual step is {_format_duration(usual_step)}; add the missing file, or fill the gap"
        )


def _format_duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= size:
            return f"{seconds / size:g} {unit if seconds != size else unit[:-1]}"
    return f"{seconds:g} seconds"
