"""Coordinates of a variable: names of its dimensions, times and latitudes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import DataError
from .base import TileSource
from .cf_time import seconds_of_cf_times
from .conventions import AuxiliaryVariable, attribute_text, unreadable_attribute_message
from .packing import PACKING_ATTRIBUTES, Packing

_COORDINATE_TOLERANCE = 1e-4  # relative to the grid spacing: files may store coordinates in different precision


def dimension_name(source: TileSource, axis_letter: str) -> str:
    """Return the name of the dimension along an axis; '' if the dimension is unnamed."""
    name_by_letter = dict(zip(source.stored_axes.letters, source.metadata.get("dimensions", ()), strict=False))
    return str(name_by_letter.get(axis_letter, ""))


def coordinate_along_axis(
    source: TileSource, axis_letter: str, variables: Sequence[AuxiliaryVariable]
) -> AuxiliaryVariable | None:
    """Return the coordinate along an axis, or None if the file has none with values.

    Times may also be a listed coordinate of another name than the dimension, such as WRF's XTIME.
    """
    name = dimension_name(source, axis_letter)
    with_values = [one for one in variables if name and one.values is not None]
    times = [one for one in with_values if axis_letter == "T" and one.dimensions == (name,) and _is_time(one)]
    return next((one for one in with_values if one.name == name), times[0] if times else None)


def coordinate_values(
    source: TileSource, axis_letter: str, variables: Sequence[AuxiliaryVariable]
) -> np.ndarray | None:
    """Return the coordinates along an axis in float64, or None if the file has none."""
    coord = coordinate_along_axis(source, axis_letter, variables)
    return None if coord is None else unpacked_values(source.path, coord).astype(np.float64)


def require_equal_coordinates(
    source: TileSource, axis_letter: str, values: np.ndarray, other: str, reference: np.ndarray
) -> None:
    """Raise DataError unless coordinates along an axis equal those of `other`, up to rounding."""
    spacing = float(np.abs(np.diff(reference)).min()) if len(reference) > 1 else 1.0
    if not np.allclose(values, reference, rtol=0, atol=_COORDINATE_TOLERANCE * (spacing or 1.0)):
        is_reversed = np.allclose(values, reference[::-1])
        remedy = "regrid one of the files, or sort its rows and columns in the same order"
        raise DataError(
            f"{source.path}: its coordinate {dimension_name(source, axis_letter)} differs from that of {other};"
            f" {'reverse that axis in one of the files' if is_reversed else remedy}"
        )


def text_attribute(attributes: Any, name: str) -> str:
    """Return a text attribute; '' if it is missing."""
    return attribute_text(attributes.get(name)).strip("\0 ")


def unpacked_values(where: str, coord: AuxiliaryVariable, convert_integers: bool = False) -> np.ndarray:
    """Return the unpacked values of a coordinate; DataError if attributes of its packing cannot be read."""
    assert coord.values is not None
    _require_readable_attributes(where, coord, *sorted(PACKING_ATTRIBUTES))
    attributes = {
        name: text_attribute({name: v}, name) if isinstance(v, bytes) else v for name, v in coord.attributes.items()
    }
    packing = Packing(f"{where}:{coord.name}", coord.values.dtype, attributes)
    if convert_integers:
        packing.convert_integers()
    return packing.decode(coord.values)


def _is_time(variable: AuxiliaryVariable) -> bool:
    standard_name = text_attribute(variable.attributes, "standard_name")  # not the start of the forecast
    return " since " in text_attribute(variable.attributes, "units") and standard_name in ("", "time")


def calendar_of(coord: AuxiliaryVariable) -> str:
    """Return the calendar of a time coordinate."""
    return text_attribute(coord.attributes, "calendar") or "standard"


def times_in_seconds(where: str, coord: AuxiliaryVariable) -> np.ndarray:
    """Return times as seconds that are comparable across files.

    Raises
    ------
    DataError
        If the coordinate has no units of time, or a time is missing.
    """
    _require_readable_attributes(where, coord, "units", "calendar")
    units = text_attribute(coord.attributes, "units")
    if " since " not in units.lower():
        raise DataError(
            f"{where}: its coordinate {coord.name} has {f'units {units!r}' if units else 'no units'}; give it units"
            " such as 'hours since 2000-01-01 00:00:00'"
        )
    values = np.asarray(unpacked_values(where, coord, convert_integers=True), np.float64)
    if coord.values is not None and coord.values.dtype == np.int64:
        values[coord.values == np.iinfo(np.int64).min] = np.nan  # NumPy's NaT
    return seconds_of_cf_times(f"{where}:{coord.name}", values, units, calendar_of(coord))


def _require_readable_attributes(where: str, coord: AuxiliaryVariable, *names: str) -> None:
    """Raise DataError if one of the attributes is unreadable: without it, values would be misinterpreted."""
    if unread := [name for name in names if name in coord.unreadable_attributes]:
        raise DataError(
            f"{where}: its coordinate {coord.name} has {unreadable_attribute_message(unread[0], coord.name)}"
        )


def latitudes_of(source: TileSource, variables: Sequence[AuxiliaryVariable]) -> np.ndarray | None:
    """Return the latitudes of a variable's rows (H,), or of its cells (H, W), in degrees; None if there are none."""
    row_dim, column_dim = dimension_name(source, "Y"), dimension_name(source, "X")
    extent_by_letter = dict(zip(source.axes, source.shape, strict=True))
    for coord in variables:
        units = text_attribute(coord.attributes, "units").lower()
        is_latitude = text_attribute(coord.attributes, "standard_name").lower() == "latitude" or units in _DEGREES_NORTH
        is_latitude |= coord.name.lower() in ("lat", "latitude") and units in ("", "degrees", "degree")
        if not is_latitude or coord.values is None:
            continue
        values = np.asarray(unpacked_values(source.path, coord), np.float64)
        if not (np.abs(values) > np.pi / 2).any():  # larger values must be in degrees
            _require_readable_attributes(source.path, coord, "units")
        values = np.rad2deg(values) if units in ("radian", "radians", "rad") else values
        if coord.dimensions == (row_dim,) and values.shape == (extent_by_letter["Y"],):
            return values
        if coord.dimensions == (row_dim, column_dim):
            return values
        if coord.dimensions == (column_dim, row_dim):
            return values.T
    return None


_DEGREES_NORTH = {
    f"{word}{mark}{north}" for word in ("degree", "degrees") for mark in ("_", "") for north in ("n", "north")
}
