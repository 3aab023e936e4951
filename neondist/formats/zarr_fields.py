"""Zarr variables as written by xarray: dimensions, coordinates and packed values, declared by attributes."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from .conventions import (
    MAX_COORDINATE_BYTES,
    AuxiliaryVariable,
    VariableMetadata,
    load_auxiliary_variables,
    referenced_variables,
)

METADATA_FILES = ("zarr.json", ".zarray", ".zgroup")
_DIMENSION_NAMES_ATTRIBUTE = "_ARRAY_DIMENSIONS"
_SPECIAL_NUMBERS = {"NaN": np.nan, "Infinity": np.inf, "-Infinity": -np.inf}


def require_no_pickle(name: str, array: Any) -> None:
    """Raise DataError if an array is encoded with pickle."""
    if "pickle" in str(array.metadata.to_dict()).lower():
        raise DataError(f"{name}: is encoded with pickle, which can execute code; rewrite it without pickle")


def dimension_names(array: Any) -> tuple[str, ...]:
    """Return the names of the dimensions, '' for an unnamed one; () if none is named."""
    names = getattr(array.metadata, "dimension_names", None) or array.attrs.get(_DIMENSION_NAMES_ATTRIBUTE) or ()
    if not isinstance(names, (list, tuple)) or len(names) != array.ndim or not any(names):
        return ()
    return tuple("" if name is None else str(name) for name in names)


def decoded_attributes(array: Any) -> dict[str, Any]:
    """Return attributes, including Zarr 2's fill value: text as str, numbers as arrays, None for other types."""
    values = {
        name: _decode_attribute(value)
        for name, value in dict(array.attrs).items()
        if name != _DIMENSION_NAMES_ATTRIBUTE
    }
    if isinstance(values.get("_FillValue"), str):
        values["_FillValue"] = _decode_fill_value(values["_FillValue"])
    if array.metadata.zarr_format == 2 and array.fill_value is not None and array.dtype.kind in "iuf":
        fill = values.get("_FillValue")
        fill = np.empty(0, array.dtype) if fill is None else np.ravel(fill)
        values["_FillValue"] = np.append(fill, array.fill_value) if fill.size else np.asarray(array.fill_value)
    return values


def variable_metadata(array_path: Path, array: Any) -> VariableMetadata:
    """Return the metadata from which the axes of the array at a path are inferred."""
    attributes, names = decoded_attributes(array), dimension_names(array)
    listed_names = attributes["coordinates"].split() if isinstance(attributes.get("coordinates"), str) else []
    coordinates = {}
    for name in (*names, *listed_names):
        coordinate = _find_in_scope(array_path, name)
        if coordinate is not None:
            coordinates[name] = VariableMetadata(dimension_names(coordinate), decoded_attributes(coordinate))
    return VariableMetadata(names, attributes, coordinates)


def auxiliary_variables(array_path: Path, array: Any) -> tuple[list[AuxiliaryVariable], list[str]]:
    """Return the variables that an array refers to, the array itself as '', and the names of unreadable items."""
    unreadable = list[str]()

    def load(name: str) -> AuxiliaryVariable:
        variable = _find_in_scope(array_path, name)
        if variable is None:
            if name not in dimension_names(array):
                unreadable.append(name)
            return AuxiliaryVariable(name, (), None, {})
        names = dimension_names(variable)
        if (
            variable.dtype.kind not in "biuf"
            or variable.nbytes > MAX_COORDINATE_BYTES
            or len(names) != variable.ndim
            or "" in names
        ):
            unreadable.append(name)
            return AuxiliaryVariable(name, names, None, {})
        require_no_pickle(f"{array_path.parent}:{name}", variable)
        attributes = _encoded_attributes(variable, f"{name}:", unreadable)
        return AuxiliaryVariable(name, names, np.asarray(variable[...]), attributes)

    return load_auxiliary_variables(
        _encoded_attributes(array, "", unreadable), [load(name) for name in dimension_names(array) if name], load
    ), unreadable


def choose_array(name: str, arrays: Mapping[str, Any]) -> str:
    """Return the only array, or the unreferenced variable with the most dimensions; DataError if neither exists."""
    candidates = dict(arrays)
    if all(dimension_names(array) or not array.ndim for array in arrays.values()):
        aux_names = {other for array in arrays.values() for other in referenced_variables(decoded_attributes(array))}
        aux_names |= {key for key, array in arrays.items() if array.ndim < 2 or array.dtype.kind not in "biuf"}
        candidates = {key: array for key, array in arrays.items() if key not in aux_names} or candidates
        candidates = {key: a for key, a in candidates.items() if a.ndim == max(one.ndim for one in candidates.values())}
    if len(candidates) != 1:
        choices = ", ".join(f"{name}:{key}" for key in arrays)
        no_array = f"no array outside groups; specify one in a group, {name}:GROUP/ARRAY"
        problem = f"several arrays; specify one of {choices}" if arrays else no_array
        raise DataError(f"{name}: contains {problem}")
    return next(iter(candidates))


def _find_in_scope(array_path: Path, name: str) -> Any:
    """Return an array by name from its group or the nearest enclosing group that has it, or None."""
    import zarr

    from .zarr_store import FolderStore

    if not name or "/" in name or name.startswith("."):
        return None
    for folder in array_path.parents:
        if not any((folder / file).is_file() for file in METADATA_FILES):
            return None
        if (folder / name).is_dir() and any((folder / name / file).is_file() for file in METADATA_FILES):
            store = FolderStore(folder / name, read_only=True)
            array = zarr.open(store, mode="r")
            if isinstance(array, zarr.Array):
                store.limit_chunk_sizes_to(array)
                return array
    return None


def _encoded_attributes(array: Any, unreadable_prefix: str, unreadable: list[str]) -> dict[str, Any]:
    """Return numbers, and text as bytes; append the names of other attributes, with the prefix, to `unreadable`."""
    values = decoded_attributes(array)
    unreadable += [f"{unreadable_prefix}{name}" for name, value in values.items() if value is None]
    encoded = {name: value.encode() if isinstance(value, str) else value for name, value in values.items()}
    if "_FillValue" in encoded and encoded["_FillValue"] is not None:
        encoded["_FillValue"] = np.ravel(encoded["_FillValue"])[-1].astype(array.dtype)
    return {name: value for name, value in encoded.items() if value is not None and not np.array_equal(value, b"")}


def _decode_attribute(value: Any) -> Any:
    if isinstance(value, str):
        return value
    try:
        array = np.asarray(value)
    except ValueError:
        return None
    return array if array.dtype.kind in "iuf" and array.size else None


def _decode_fill_value(text: str) -> Any:
    """Return a fill value that xarray stores as text: NaN, an infinity, or a base64 double; None if it is invalid."""
    if text in _SPECIAL_NUMBERS:
        return np.asarray(_SPECIAL_NUMBERS[text])
    try:
        raw = base64.standard_b64decode(text)
    except (ValueError, binascii.Error):
        return None
    return np.frombuffer(raw, "<f8")[0] if len(raw) == 8 else None
