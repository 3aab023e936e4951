"""Variables of Zarr as xarray writes them: dimensions, coordinates and packed values by attributes."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from .conventions import LARGEST, AuxiliaryVariable, Variable, collect, references

METADATA = ("zarr.json", ".zarray", ".zgroup")
_NAMES = "_ARRAY_DIMENSIONS"
_NUMBERS = {"NaN": np.nan, "Infinity": np.inf, "-Infinity": -np.inf}


def require_harmless(name: str, array: Any) -> None:
    """Raise DataError if an array is packed by pickle."""
    if "pickle" in str(array.metadata.to_dict()).lower():
        raise DataError(f"{name}: is encoded with pickle, which can execute code; rewrite it without")


def dimensions(array: Any) -> tuple[str, ...]:
    """Return the name of each dimension, '' for one without; none at all if the array does not name them."""
    names = getattr(array.metadata, "dimension_names", None) or array.attrs.get(_NAMES) or ()
    if not isinstance(names, (list, tuple)) or len(names) != array.ndim or not any(names):
        return ()
    return tuple("" if name is None else str(name) for name in names)


def attributes(array: Any) -> dict[str, Any]:
    """Return the attributes: text as str, numbers as arrays, None for others; of Zarr 2 its fill value is one."""
    found = {name: _plain(value) for name, value in dict(array.attrs).items() if name != _NAMES}
    if isinstance(found.get("_FillValue"), str):
        found["_FillValue"] = _fill_value(found["_FillValue"])
    if array.metadata.zarr_format == 2 and array.fill_value is not None and array.dtype.kind in "iuf":
        given = found.get("_FillValue")
        given = np.empty(0, array.dtype) if given is None else np.ravel(given)
        found["_FillValue"] = np.append(given, array.fill_value) if given.size else np.asarray(array.fill_value)
    return found


def variable(place: Path, array: Any) -> Variable:
    """Return what tells the axes of the array at a path."""
    own, names = attributes(array), dimensions(array)
    listed = own["coordinates"].split() if isinstance(own.get("coordinates"), str) else []
    coordinates = {}
    for name in (*names, *listed):
        other = _in_scope(place, name)
        if other is not None:
            coordinates[name] = Variable(dimensions(other), attributes(other))
    return Variable(names, own, coordinates)


def auxiliary_variables(place: Path, array: Any) -> tuple[list[AuxiliaryVariable], list[str]]:
    """Return what the array at a path needs, itself as '' among it, and what of it cannot be read."""
    lost = list[str]()

    def of(name: str) -> AuxiliaryVariable:
        other = _in_scope(place, name)
        if other is None:
            if name not in dimensions(array):
                lost.append(name)
            return AuxiliaryVariable(name, (), None, {})
        names = dimensions(other)
        if other.dtype.kind not in "biuf" or other.nbytes > LARGEST or len(names) != other.ndim or "" in names:
            lost.append(name)
            return AuxiliaryVariable(name, names, None, {})
        require_harmless(f"{place.parent}:{name}", other)
        return AuxiliaryVariable(name, names, np.asarray(other[...]), _texts(other, f"{name}:", lost))

    return collect(_texts(array, "", lost), [of(name) for name in dimensions(array) if name], of), lost


def choose(name: str, arrays: Mapping[str, Any]) -> str:
    """Return the only array, or of variables the one with most dimensions that is not a coordinate of another."""
    found = dict(arrays)
    if all(dimensions(array) or not array.ndim for array in arrays.values()):
        of_others = {other for array in arrays.values() for other in references(attributes(array))}
        of_others |= {key for key, array in arrays.items() if array.ndim < 2 or array.dtype.kind not in "biuf"}
        found = {key: array for key, array in arrays.items() if key not in of_others} or found
        found = {key: a for key, a in found.items() if a.ndim == max(one.ndim for one in found.values())}
    if len(found) != 1:
        choices = ", ".join(f"{name}:{key}" for key in arrays) or "it has none"
        raise DataError(f"{name}: which data set? {choices}")
    return next(iter(found))


def _in_scope(place: Path, name: str) -> Any:
    """Return the array of a name beside another, or in the nearest group above, or None."""
    import zarr

    from .zarr_store import FolderStore

    if not name or "/" in name or name.startswith("."):
        return None
    for folder in place.parents:
        if not any((folder / each).is_file() for each in METADATA):
            return None
        if (folder / name).is_dir() and any((folder / name / each).is_file() for each in METADATA):
            store = FolderStore(folder / name, read_only=True)
            found = zarr.open(store, mode="r")
            if isinstance(found, zarr.Array):
                store.expect(found)
                return found
    return None


def _texts(array: Any, of: str, lost: list[str]) -> dict[str, Any]:
    """Return the attributes that are numbers, and text as bytes; others are lost."""
    found = attributes(array)
    lost += [f"{of}{name}" for name, value in found.items() if value is None]
    known = {name: value.encode() if isinstance(value, str) else value for name, value in found.items()}
    if "_FillValue" in known and known["_FillValue"] is not None:
        known["_FillValue"] = np.ravel(known["_FillValue"])[-1].astype(array.dtype)
    return {name: value for name, value in known.items() if value is not None and not np.array_equal(value, b"")}


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value
    try:
        numbers = np.asarray(value)
    except ValueError:
        return None
    return numbers if numbers.dtype.kind in "iuf" and numbers.size else None


def _fill_value(text: str) -> Any:
    """Return the number that xarray writes as the base64 of a double, or None."""
    if text in _NUMBERS:
        return np.asarray(_NUMBERS[text])
    try:
        raw = base64.standard_b64decode(text)
    except (ValueError, binascii.Error):
        return None
    return np.frombuffer(raw, "<f8")[0] if len(raw) == 8 else None
