"""Coordinates of a variable: times, latitudes, levels, and the names of dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import DataError
from .base import TileSource
from .cf_time import seconds_since
from .conventions import AuxiliaryVariable, plain_text, unread_text
from .packing import OF_VALUES, Packing


def dimension_of(source: TileSource, letter: str) -> str:
    """Return the name of the dimension along an axis; '' if it has none."""
    named = dict(zip(source.stored.stored, source.metadata.get("dimensions", ()), strict=False))
    return str(named.get(letter, ""))


def coordinate(source: TileSource, letter: str, beside: Sequence[AuxiliaryVariable]) -> AuxiliaryVariable | None:
    """Return the coordinate along an axis, or None where the file has none with values."""
    name = dimension_of(source, letter)
    return next((one for one in beside if one.name == name and name and one.values is not None), None)


def text_of(attributes: Any, name: str) -> str:
    """Return an attribute that is text; '' if there is none."""
    return plain_text(attributes.get(name)).strip("\0 ")


def values_of(where: str, one: AuxiliaryVariable) -> np.ndarray:
    """Return the values of a coordinate, unpacked; DataError if what says how they are stored cannot be read."""
    assert one.values is not None
    _require_read(where, one, *sorted(OF_VALUES))
    attributes = {name: text_of({name: v}, name) if isinstance(v, bytes) else v for name, v in one.attributes.items()}
    return Packing(f"{where}:{one.name}", one.values.dtype, attributes).decode(one.values)


def calendar_of(one: AuxiliaryVariable) -> str:
    """Return the calendar of a coordinate of times."""
    return text_of(one.attributes, "calendar") or "standard"


def times_of(where: str, one: AuxiliaryVariable) -> np.ndarray:
    """Return times as seconds, for comparing.

    Raises
    ------
    DataError
        The coordinate has no units of time.
    """
    _require_read(where, one, "units", "calendar")
    units = text_of(one.attributes, "units")
    if " since " not in units.lower():
        raise DataError(
            f"{where}: its coordinate {one.name} has {f'units {units!r}' if units else 'no units'}; give it units such"
            " as 'hours since 2000-01-01 00:00:00'"
        )
    values = np.asarray(values_of(where, one), np.float64)
    if one.values is not None and one.values.dtype.kind in "iu":
        values[_missing(one)] = np.nan
    return seconds_since(f"{where}:{one.name}", values, units, calendar_of(one))


def _require_read(where: str, one: AuxiliaryVariable, *names: str) -> None:
    """Raise DataError for an attribute that is there and cannot be read: without it, values would be other ones."""
    if unread := [name for name in names if name in one.unread]:
        raise DataError(f"{where}: its coordinate {one.name} has {unread_text(unread[0], one.name)}")


def _missing(one: AuxiliaryVariable) -> np.ndarray:
    """Return which whole numbers of a coordinate stand for missing values; NumPy's NaT is the least int64."""
    assert one.values is not None
    marks = [np.ravel(one.attributes[name]) for name in ("_FillValue", "missing_value") if name in one.attributes]
    marks += [np.array([np.iinfo(np.int64).min])] if one.values.dtype == np.int64 else []
    return np.isin(one.values, np.concatenate(marks)) if marks else np.zeros(one.values.shape, bool)


def latitudes_of(source: TileSource, beside: Sequence[AuxiliaryVariable]) -> np.ndarray | None:
    """Return the latitudes of a variable's rows (H,), or of its cells (H, W), in degrees; None if it has none."""
    rows, columns = dimension_of(source, "Y"), dimension_of(source, "X")
    extent = dict(zip(source.axes, source.shape, strict=True))
    for one in beside:
        units = text_of(one.attributes, "units").lower()
        told = text_of(one.attributes, "standard_name").lower() == "latitude" or units in _DEGREES_NORTH
        told |= one.name.lower() in ("lat", "latitude") and units in ("", "degrees", "degree")
        if not told or one.values is None:
            continue
        values = np.asarray(values_of(source.path, one), np.float64)
        if not (np.abs(values) > np.pi / 2).any():  # or else they are in degrees
            _require_read(source.path, one, "units")
        values = np.rad2deg(values) if units in ("radian", "radians", "rad") else values
        if one.dimensions == (rows,) and values.shape == (extent["Y"],):
            return values
        if one.dimensions == (rows, columns):
            return values
        if one.dimensions == (columns, rows):
            return values.T
    return None


_DEGREES_NORTH = {
    f"{word}{mark}{north}" for word in ("degree", "degrees") for mark in ("_", "") for north in ("n", "north")
}
