"""NetCDF-4, which is HDF5 with dimensions that have names: one variable of a file, in its own units."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..errors import DataError
from ..io.hdf5 import find, get_text, plain, put_text
from .axes import Cells, letters
from .hdf5 import HDF5Sink, HDF5Source

_OF_VARIABLE, _OF_DIMENSION = "_Netcdf4Coordinates", "_Netcdf4Dimid"
_BARE = "This is a netCDF dimension but not a netCDF variable."
_TEXTS = ("units", "calendar", "standard_name", "long_name", "axis")


class NetCDFSource(HDF5Source):
    """A variable: the one named, or the only one that has two dimensions or more; time comes as an axis T.

    What is read are the values, not how they are packed: scale_factor and add_offset are applied, and cells of
    _FillValue or missing_value are NaN, in float32 for integers of up to 16 bits, else in float64. Whole numbers
    without a scale stay as they are, and so do those among them that are missing.
    """

    def __init__(self, path: Path, inside: str, level: int, axes: str | None) -> None:
        with path.open("rb") as file:
            if file.read(3) == b"CDF":
                raise DataError(f"{path}: is NetCDF-3; convert it: nccopy -k nc4 {path.name} NEW.nc")
        super().__init__(path, inside, level, axes)

    def _choose(self, path: Path) -> str:
        found = {name: self._file[name].ndim for name in self._names() if self._file[name].ndim > 1}
        found = {name: n for name, n in found.items() if not name.endswith(("_bnds", "_bounds"))}
        most = [name for name, n in found.items() if n == max(found.values())]
        if len(most) == 1:
            return most[0]
        choices = ", ".join(f"{path}:{name}" for name in found) or "it has none of two dimensions"
        raise DataError(f"{path}: which variable? {choices}")

    def _describe(self, array: Any) -> tuple[str | None, Any, dict[str, Any]]:
        numbers = {name: _number(array, name) for name in ("scale_factor", "add_offset", "_FillValue", "missing_value")}
        packed = numbers["scale_factor"] is not None or numbers["add_offset"] is not None
        self._scale, self._offset = numbers["scale_factor"], numbers["add_offset"]
        self._missing = [n for name in ("_FillValue", "missing_value") if (n := numbers[name]) is not None]
        dtype = array.dtype
        if packed and dtype.kind in "iu":
            dtype = np.dtype(np.float32 if dtype.itemsize < 4 else np.float64)
        self._values = dtype
        dimensions = self._dimensions(array)
        names = [name for name, _, _ in dimensions]
        return letters(names) if len(names) == array.ndim else None, dtype, {"dimensions": dimensions}

    def _read(self, cells: Cells) -> np.ndarray:
        raw = super()._read(cells)
        if self._values.kind != "f":
            return raw
        gone = np.isin(raw, np.array(self._missing).astype(raw.dtype)) if self._missing else None
        if self._scale is not None or self._offset is not None:
            raw = raw * np.float64(1 if self._scale is None else self._scale) + np.float64(self._offset or 0)
        values = raw.astype(self._values, copy=False)
        if gone is not None:
            values[gone] = np.nan
        return values

    def _dimensions(self, array: Any) -> list[tuple[str, np.ndarray | None, dict[str, str]]]:
        """Return the name, coordinates and texts of each dimension, as far as the file tells.

        They are found by their numbers: of HDF5's own references in a damaged file libhdf5 dies.
        """
        if _OF_VARIABLE not in array.attrs or not plain(array.attrs.get_id(_OF_VARIABLE)):
            return []
        by_number: dict[int, tuple[str, Any]] = {}
        for place in {array.parent.name, "/"}:
            for name, found in find(self._file, place).items():
                if (
                    _OF_DIMENSION in getattr(found, "attrs", {})
                    and (number := _number(found, _OF_DIMENSION)) is not None
                ):
                    by_number.setdefault(int(number), (name, found))
        known = []
        for number in np.ravel(array.attrs[_OF_VARIABLE]):
            if int(number) not in by_number:
                return []
            name, found = by_number[int(number)]
            kept = plain(found) and found.ndim == 1 and found.size <= max(array.shape) and not _is_bare(found)
            texts = {key: get_text(found.attrs, key) for key in _TEXTS if key in found.attrs and _is_text(found, key)}
            known.append((name, found[()] if kept else None, texts))
        return known


class NetCDFSink(HDF5Sink):
    """A new NetCDF-4 file with one variable, and the dimensions and coordinates of the one that it belongs to."""

    choices: ClassVar[dict[str, Any]] = {"name": "predictions"}

    def _describe(self, array: Any, metadata: dict[str, Any]) -> None:
        file, given = array.file, {}
        for name, values, texts in metadata.get("dimensions", []):
            if (letter := letters_of(name)) is not None:
                given[letter] = (name, values, texts)
        usual = dict(zip("NTZYXC", ("sample", "time", "z", "y", "x", "channel"), strict=True))
        for number, (letter, n) in enumerate(zip(self.axes, self.shape, strict=True)):
            name, values, texts = given.get(letter, (usual.get(letter, letter.lower()), None, {}))
            known = values is not None and len(values) == n
            scale = file.create_dataset(name, data=values if known else np.zeros(n, ">f4"))
            scale.make_scale(name if known else f"{_BARE}{n:10d}")
            scale.attrs[_OF_DIMENSION] = np.int32(number)
            for key, text in texts.items():
                put_text(scale.attrs, key, text)
            array.dims[number].attach_scale(scale)
        array.attrs[_OF_VARIABLE] = np.arange(len(self.axes), dtype=np.int32)


def letters_of(name: str) -> str | None:
    """Return the letter of a dimension that is known by its name."""
    found = letters([name, *({"y", "x"} - {name.lower()})])
    return found[0] if found and found[0] in "NTZYXC" else None


def _number(found: Any, name: str) -> Any:
    """Return an attribute that is one number, or None."""
    if name not in getattr(found, "attrs", {}) or not plain(found.attrs.get_id(name)):
        return None
    values = np.ravel(found.attrs[name])
    return values[0] if values.size == 1 else None


def _is_bare(found: Any) -> bool:
    """Tell whether a dimension has no coordinates, and zeros stand in for them."""
    return "NAME" in found.attrs and _is_text(found, "NAME") and get_text(found.attrs, "NAME").startswith(_BARE)


def _is_text(found: Any, name: str) -> bool:
    kind = found.attrs.get_id(name)
    return kind.dtype.kind == "S" and kind.shape == ()
