"""Variables of several files that are one series in time, of which boxes are read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ...errors import DataError
from ...formats import TileSource, open_source
from ...formats.cache import ChunkCache
from ...formats.cf_time import comparable
from ...formats.conventions import AuxiliaryVariable
from ...formats.coordinates import (
    calendar_of,
    coordinate,
    dimension_of,
    latitudes_of,
    text_of,
    times_of,
    values_of,
)
from ...formats.fields import Channel
from ..raw import filled
from .hdf5_tiles import runs
from .image_lists import matching

_OPEN = 64  # variables of files at a time
_GAP = 1.5  # of the usual step: months are of 28 to 31 days
_NEAR = 1e-4  # of a step of latitude or longitude, since files may have them in other precision

Levels = Sequence[float] | Mapping[str, Sequence[float]] | None


class FieldSeries:
    """The channels of some variables over the times of all files of a pattern, in the order of their names.

    Parameters
    ----------
    files : str
        A pattern of NetCDF or Zarr files.
    variables : sequence of str
    levels : sequence of float, or a mapping from variables to them, optional
        Values of the vertical coordinate that are channels.
    field : str
        What messages call the pattern.
    fill : float, optional
        What is read instead of NaN. Default: NaN is an error.
    cache : int
        Bytes of decoded chunks that are kept.

    Attributes
    ----------
    channels : list of Channel
    extent : (H, W)
    times : array (T,)
        Seconds; and `step`, the usual ones from time to time.
    latitude : array (H,) or (H, W), or None
    dtype : numpy.dtype

    Raises
    ------
    DataError
        Files do not belong together: it names the file, and what to do.
    """

    def __init__(
        self,
        files: str,
        variables: Sequence[str],
        levels: Levels = None,
        *,
        field: str = "files",
        fill: float | None = None,
        cache: int = 0,
    ) -> None:
        self.names, self.variables, self.levels, self.fill = matching(field, files), list(variables), levels, fill
        self._cache, self._sources = ChunkCache(cache), OrderedDict[tuple[int, str], TileSource]()
        self.channels: list[Channel] = []
        self._rows: dict[str, np.ndarray | None] = {}
        self._first: tuple[str, tuple[str, ...]] | None = None
        self._calendar: tuple[str, str] | None = None  # and the file that has it
        dtypes, times = set(), []
        try:
            for number, name in enumerate(self.names):
                found = [self._look_at(number, variable) for variable in self.variables]
                self._channels_of(name, found)
                dtypes |= {source.dtype for source, _ in found}
                times.append(self._times_of(name, found))
            self._begin = np.cumsum([0, *map(len, times)])
            self.times = np.concatenate(times)
            self.dtype = np.result_type(*dtypes, np.float32)
            self._check_times()
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self.times)

    def read(self, places: np.ndarray, cells: Sequence[slice], channels: Sequence[int] | None = None) -> np.ndarray:
        """Return cells (n, *cells, C) of some times, and of some channels or all, channels last."""
        chosen = range(len(self.channels)) if channels is None else channels
        extents = [cut.stop - cut.start for cut in cells]
        out = np.empty((len(places), *extents, len(chosen)), self.dtype)
        if not out.size:
            return out
        for at, number, first, count in self._runs(places):
            for variable, wanted in self._by_variable(chosen).items():
                source = self._open(number, variable)
                for index, channel in wanted:
                    box = self._box(source, slice(first, first + count), cells, channel)
                    found = source.read(box).reshape(count, *extents)
                    out[at : at + count, ..., index] = filled(f"{source.path}", found, self.fill)
        return out

    def source(self, place: int, channel: int = 0) -> TileSource:
        """Return the variable of a channel in the file that has a time."""
        return self._open(self._file_of(place), self.channels[channel].variable)

    def place_named(self, name: str) -> list[int]:
        """Return the channels of a name: of a variable, or of a channel alone."""
        return [at for at, one in enumerate(self.channels) if name in (one.variable, one.name)]

    def close(self) -> None:
        """Close all files; a later read opens them again."""
        while self._sources:
            self._sources.popitem()[1].close()

    @property
    def step(self) -> float:
        """The usual seconds from time to time."""
        return float(np.median(np.diff(self.times))) if len(self) > 1 else 0.0

    @property
    def order(self) -> tuple[str, str]:
        """Whether coordinates of rows and columns are 'ascending' or 'descending'; '' where that is not known."""
        values = [self._rows.get(letter) for letter in "YX"]
        steps = [0.0 if of is None or of.ndim > 1 or len(of) < 2 else float(of[1] - of[0]) for of in values]
        row, column = ("" if not step else "ascending" if step > 0 else "descending" for step in steps)
        return row, column

    def _file_of(self, place: int) -> int:
        """Return the number of the file that has a time."""
        return int(np.searchsorted(self._begin, place, "right")) - 1

    def _runs(self, places: np.ndarray) -> Iterator[tuple[int, int, int, int]]:
        """Yield (position, file, first time in it, count) of times that are one read."""
        for start, first, count in runs(np.asarray(places)):
            at = start
            while count:
                number = self._file_of(first)
                here = min(count, int(self._begin[number + 1]) - first)
                yield at, number, first - int(self._begin[number]), here
                at, first, count = at + here, first + here, count - here

    def _by_variable(self, chosen: Sequence[int]) -> dict[str, list[tuple[int, Channel]]]:
        found: dict[str, list[tuple[int, Channel]]] = {}
        for index, at in enumerate(chosen):
            found.setdefault(self.channels[at].variable, []).append((index, self.channels[at]))
        return found

    @staticmethod
    def _box(source: TileSource, times: slice, cells: Sequence[slice], channel: Channel) -> list[slice]:
        level = 0 if channel.level is None else channel.level[0]
        known = {"T": times, "Y": cells[0], "X": cells[1], "Z": slice(level, level + 1)}
        return [known.get(letter, slice(0, 1)) for letter in source.axes]

    def _open(self, number: int, variable: str) -> TileSource:
        key = number, variable
        if key not in self._sources:
            if len(self._sources) >= _OPEN:
                self._sources.popitem(last=False)[1].close()
            found = open_source(f"{self.names[number]}:{variable}")
            found.cache = self._cache
            self._sources[key] = found
        self._sources.move_to_end(key)
        return self._sources[key]

    def _look_at(self, number: int, variable: str) -> tuple[TileSource, list[AuxiliaryVariable]]:
        """Return a variable and what is beside it; its axes have to be times, rows and columns."""
        source = self._open(number, variable)
        letters = dict(zip(source.axes, source.shape, strict=True))
        missing = {"T": "time", "Y": "latitude", "X": "longitude"}
        for letter, what in missing.items():
            if letter not in letters:
                raise DataError(
                    f"{source.path}: has no {what} axis (its axes are {source.axes[:-1]}); leave the variable out, or"
                    " add one"
                )
        for letter, n in letters.items():
            if letter not in "TZYX" and n > 1:
                name = dimension_of(source, letter) or letter
                raise DataError(
                    f"{source.path}: has {n} cells along '{name}', and is not a field over time, level, latitude and"
                    " longitude; select one of them"
                )
        return source, source.auxiliary_variables()[0]

    def _channels_of(self, name: str, found: Sequence[tuple[TileSource, list[AuxiliaryVariable]]]) -> None:
        """Note the channels of the first file; those of others have to be the same, on the same grid."""
        channels: list[Channel] = []
        for variable, (source, beside) in zip(self.variables, found, strict=True):
            given = source.attributes()
            units = text_of(given, "units")
            numbers = self._levels_of(variable, source, beside)
            if numbers is None:
                channels.append(Channel(variable, variable, None, units, given))
            for number, value in numbers or ():
                channels.append(Channel(f"{variable}{value:g}", variable, (number, value), units, given))
            self._check_grid(source, beside)
        if not self.channels:
            self.channels = channels
            self.latitude = next((of for one in found if (of := latitudes_of(*one)) is not None), None)
            names = [one.name for one in channels]
            twice = next((one for one in names if names.count(one) > 1), None)
            if twice is not None:
                raise DataError(f"{name}: two channels are called '{twice}'; leave out one of the variables or levels")
        if [one.name for one in channels] != [one.name for one in self.channels]:
            raise DataError(
                f"{name}: has {', '.join(one.name for one in channels)}, but {self.names[0]}"
                f" {', '.join(one.name for one in self.channels)}; give all files the same levels"
            )
        for mine, first in zip(channels, self.channels, strict=True):
            if mine.units != first.units:
                raise DataError(
                    f"{name}: {mine.variable} is in '{mine.units}', but in {self.names[0]} in '{first.units}'; convert"
                    " one of the files, so that all have the same units"
                )
            if mine.level != first.level:
                raise DataError(
                    f"{name}: {mine.variable} has level {mine.name} in another position than in {self.names[0]};"
                    " write the levels of all files in the same order"
                )

    def _levels_of(
        self, variable: str, source: TileSource, beside: Sequence[AuxiliaryVariable]
    ) -> list[tuple[int, float]] | None:
        """Return the numbers and values of the levels that are wanted; None of a variable without any."""
        asked = self.levels.get(variable) if isinstance(self.levels, Mapping) else self.levels
        count = dict(zip(source.axes, source.shape, strict=True)).get("Z")
        if count is None or (count == 1 and asked is None):
            return None
        one = coordinate(source, "Z", beside)
        known = np.arange(count, dtype=np.float64) if one is None else np.asarray(values_of(source.path, one), "f8")
        listed = ", ".join(f"{value:g}" for value in known.tolist())
        if asked is None:
            raise DataError(f"{source.path}: has {count} levels; choose some with levels: {listed}")
        found = []
        for value in asked:
            at = np.flatnonzero(np.isclose(known, value, rtol=1e-6, atol=0))
            if not at.size:
                raise DataError(f"{source.path}: has no level {value:g}; choose from {listed}")
            found.append((int(at[0]), float(value)))
        return found

    def _check_grid(self, source: TileSource, beside: Sequence[AuxiliaryVariable]) -> None:
        """Raise DataError unless a variable lies on the grid of the first one."""
        letters = dict(zip(source.axes, source.shape, strict=True))
        extent = letters["Y"], letters["X"]
        names = tuple(dimension_of(source, letter) for letter in "YX")
        if self._first is None:
            self.extent, self._first = extent, (source.path, names)
        where, known = self._first
        if extent != self.extent or names != known:
            mine, first = (
                " x ".join(f"{name or letter} {n}" for name, letter, n in zip(of, "YX", on, strict=True))
                for of, on in ((names, extent), (known, self.extent))
            )
            raise DataError(
                f"{source.path}: has the grid {mine}, but {where} {first}; variables must share their dimensions:"
                " regrid"
                " one of them, or leave it out"
            )
        for letter in "YX":
            one = coordinate(source, letter, beside)
            values = None if one is None else np.asarray(values_of(source.path, one), np.float64)
            if values is not None and not np.isfinite(values).all():
                raise DataError(
                    f"{source.path}: its coordinate {dimension_of(source, letter)} has missing values; give each row"
                    " and column a value, or remove the coordinate"
                )
            before = self._rows.setdefault(letter, values)
            if values is None or before is None:
                continue
            spacing = float(np.abs(np.diff(before)).min()) if len(before) > 1 else 1.0
            if not np.allclose(values, before, rtol=0, atol=_NEAR * (spacing or 1.0)):
                raise DataError(
                    f"{source.path}: its coordinate {dimension_of(source, letter)} differs from that of {where};"
                    f" {_remedy(values, before)}"
                )

    def _times_of(self, name: str, found: Sequence[tuple[TileSource, list[AuxiliaryVariable]]]) -> np.ndarray:
        """Return the times of a file in seconds, which all its variables share."""
        times: list[np.ndarray] = []
        for source, beside in found:
            one = coordinate(source, "T", beside)
            if one is None:
                raise DataError(
                    f"{source.path}: has no time coordinate along '{dimension_of(source, 'T') or 'T'}'; add one"
                    " with units such as 'hours since 2000-01-01 00:00:00'"
                )
            first, calendar = self._calendar or (name, calendar_of(one))
            self._calendar = first, calendar
            if not comparable(f"{name}:{one.name}", calendar_of(one), calendar):
                raise DataError(
                    f"{name}: its times have the calendar '{calendar_of(one)}', but those of {first} '{calendar}';"
                    " convert them to one calendar (xarray: convert_calendar)"
                )
            times.append(times_of(name, one))
            if len(times[0]) != len(times[-1]) or not np.array_equal(times[0], times[-1]):
                raise DataError(
                    f"{source.path}: has other times than {found[0][0].path}; variables must share their dimensions:"
                    " select the common times"
                )
        return times[0]

    def _check_times(self) -> None:
        """Raise DataError where a time does not follow the one before by the usual step."""
        steps, usual = np.diff(self.times), self.step
        wrong = np.flatnonzero(steps <= 0)  # disorder makes gaps, too
        wrong = wrong if wrong.size else np.flatnonzero(steps > _GAP * usual)
        if not wrong.size:
            return
        at = int(wrong[0]) + 1
        number = self._file_of(at)
        first, place = at == self._begin[number], f"time {at - self._begin[number] + 1} of {self.names[number]}"
        before = f"the last of {self.names[number - 1]}" if first else "the one before"
        if steps[at - 1] <= 0:
            raise DataError(
                f"{self.names[number]}: times are not increasing: {place} is not after {before}; sort the times of the"
                " file, and name the files so that they sort by time"
            )
        raise DataError(
            f"{self.names[number]}: a gap in time: {place} comes {_span(steps[at - 1])} after {before}, the usual step"
            f" is {_span(usual)}; add the file that is missing, or fill the gap"
        )


def _remedy(values: np.ndarray, expected: np.ndarray) -> str:
    if np.allclose(values, expected[::-1]):
        return "reverse that axis in one of the files"
    return "regrid one of the files, or sort its rows and columns alike"


def _span(seconds: float) -> str:
    """Return seconds in words."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= size:
            return f"{seconds / size:g} {unit if seconds != size else unit[:-1]}"
    return f"{seconds:g} seconds"
