"""NetCDF-4, which is HDF5 with dimensions that have names: one variable of a file, in its own units."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..errors import DataError
from ..io.hdf5 import faults, find, get_text, plain
from ..io.regular_file import open_regular
from .axes import Cells, letters
from .base import TileSource
from .hdf5 import HDF5Sink, HDF5Source

_OF_VARIABLE, _OF_DIMENSION, _USERS = "_Netcdf4Coordinates", "_Netcdf4Dimid", "REFERENCE_LIST"
_OWN = {"CLASS", "NAME", "DIMENSION_LIST", "DIMENSION_LABELS", _USERS}
_NAMING = ("coordinates", "bounds", "grid_mapping")
_LARGEST = 1 << 28  # bytes of coordinates of cells
_BARE = "This is a netCDF dimension but not a netCDF variable."


class NetCDFSource(HDF5Source):
    """A variable: the one named, or the only one that has two dimensions or more; time comes as an axis T.

    What is read are the values, not how they are packed: scale_factor and add_offset are applied, and cells of
    _FillValue or missing_value are NaN, in float32 for integers of up to 16 bits, else in float64. Whole numbers
    without a scale stay as they are, and so do those among them that are missing.
    """

    def __init__(self, path: Path, inside: str, level: int, axes: str | None) -> None:
        with faults(path), open_regular(path) as file:
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
        names = [name for name, _ in self._dimensions(array)]
        return letters(names), dtype, {"dimensions": names}

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

    def _dimensions(self, array: Any) -> list[tuple[str, Any]]:
        """Return the name and the variable of each dimension, if the file tells all of them.

        Dimensions list whose they are. HDF5's references in these lists are compared as the addresses that they are,
        and never followed: of those in a damaged file libhdf5 dies.
        """
        import h5py

        own, known = h5py.h5o.get_info(array.id).addr, dict[int, tuple[str, Any]]()
        for place in {array.parent.name, "/"}:
            for name, found in find(self._file, place).items():
                known |= {int(axis): (name, found) for at, axis in _users(found) if at == own}
        every = set(known) == {*range(array.ndim)} and len({name for name, _ in known.values()}) == array.ndim
        return [known[axis] for axis in range(array.ndim)] if every else []

    def beside(self) -> tuple[list[Beside], list[str]]:
        """Return what the variable needs, the file as '/' and itself as '' among it, and what of it cannot be read."""
        array, lost = self._array, list[str]()
        with faults(Path(self.path)):
            found = [Beside("/", (), None, _attributes(self._file, "", lost))]
            own = _attributes(array, "", [])
            lost += [name for name in _NAMING if name in array.attrs and name not in own]
            found.append(Beside("", (), None, {name: own[name] for name in _NAMING if name in own}))
            found += [self._of(name, one, (name,), lost) for name, one in self._dimensions(array)]
            for name in sorted(set().union(*(one.names for one in found)) - {one.name for one in found}):
                one = find(self._file, f"{array.parent.name}/{name}") or find(self._file, name)
                if isinstance(one, type(array)):
                    found.append(self._of(name, one, tuple(of for of, _ in self._dimensions(one)), lost))
        return found, lost

    def known(self) -> list[str]:
        """Return the names of what is known of the variable beside its cells."""
        found, lost = self.beside()
        of_file = [name for one in found if one.name in ("", "/") for name in one.attributes]
        return [*(one.name for one in found if one.values is not None), *of_file, *lost]

    def _of(self, name: str, found: Any, dimensions: tuple[str, ...], lost: list[str]) -> Beside:
        if "NAME" in found.attrs and _is_text(found, "NAME") and get_text(found.attrs, "NAME").startswith(_BARE):
            return Beside(name, dimensions, None, {})
        if plain(found) and found.ndim == len(dimensions) and found.nbytes <= _LARGEST:
            return Beside(name, dimensions, found[()], _attributes(found, f"{name}:", lost))
        lost.append(name)
        return Beside(name, dimensions, None, {})


@dataclass(frozen=True)
class Beside:
    """A variable that another needs: the coordinates of a dimension or of cells, their bounds, a projection.

    Attributes
    ----------
    name : str
    dimensions : tuple of str
        The names of its own.
    values : numpy.ndarray, or None
        None: a dimension without coordinates.
    attributes : dict
        Numbers, and text as bytes.
    """

    name: str
    dimensions: tuple[str, ...]
    values: np.ndarray | None
    attributes: dict[str, Any]

    @property
    def names(self) -> set[str]:
        """Other variables that its attributes name."""
        return {name for key in _NAMING if key in self.attributes for name in _words(self.attributes[key])}


class NetCDFSink(HDF5Sink):
    """A new NetCDF-4 file with one variable, and the dimensions, coordinates and projection of the one that it is like.

    Attributes
    ----------
    lost : list of str
        What of these cannot be kept.
    """

    choices: ClassVar[dict[str, Any]] = {"name": "predictions"}

    def _describe(self, array: Any, like: TileSource | None) -> None:
        file, names, given = array.file, dict[str, str](), list[Beside]()
        if isinstance(like, NetCDFSource):
            given, self.lost = like.beside()
            self._kept = {name: set() for name in like.known()}  # what is not is in `lost`
            names = dict(zip(like.stored.stored, like.metadata["dimensions"], strict=False))
        usual = dict(zip("NTZYXC", ("sample", "time", "z", "y", "x", "channel"), strict=True))
        sizes = {names.get(one, usual.get(one, one.lower())): n for one, n in zip(self.axes, self.shape, strict=True)}
        own, kept = tuple(sizes), dict[str, Beside]()
        for one in given:
            if one.values is not None:
                extents = dict(zip(one.dimensions, one.values.shape, strict=True))
                if sizes | extents == extents | sizes and one.name != self._options["name"]:
                    sizes, kept[one.name] = sizes | extents, one
                    file[one.name] = one.values
                else:
                    self.lost.append(one.name)
        for number, (name, n) in enumerate(sizes.items()):
            if name not in kept:
                file[name] = np.zeros(n, ">f4")
            file[name].make_scale(name if name in kept else f"{_BARE}{n:10d}")
            file[name].attrs[_OF_DIMENSION] = np.int32(number)
        array.attrs[_OF_VARIABLE] = np.arange(len(own), dtype=np.int32)
        for name, dimensions in [(array.name, own), *((one.name, one.dimensions) for one in kept.values())]:
            for axis, of in enumerate(dimensions if name not in sizes else ()):
                file[name].dims[axis].attach_scale(file[of])
        for one in given:
            for key, value in one.attributes.items() if one.name in {"", "/", *kept} else ():
                if key not in _NAMING or {*_words(value)} <= {*kept}:
                    (file[one.name] if one.name else array).attrs[key] = value


def _words(text: Any) -> list[str]:
    """Return the names in an attribute: 'lat lon', or 'crs: x y'."""
    return [word.strip(":") for word in text.decode(errors="replace").split()] if isinstance(text, bytes) else []


def _attributes(found: Any, of: str, lost: list[str]) -> dict[str, Any]:
    """Return the attributes that are numbers or text of fixed length; others, but for netCDF's own, are lost."""
    kept: dict[str, Any] = {}
    for name in found.attrs:
        if name in _OWN or name.startswith("_N"):
            continue
        if _is_text(found, name) or plain(found.attrs.get_id(name)):
            kept[name] = found.attrs[name]
        else:
            lost.append(f"{of}{name}")
    return kept


def _users(found: Any) -> list[tuple[int, int]]:
    """Return the addresses of the variables that have a dimension, and which of theirs it is."""
    from h5py import h5t

    if _USERS not in getattr(found, "attrs", {}):
        return []
    at = found.attrs.get_id(_USERS)
    kind = at.get_type()
    members = [kind.get_member_type(n) for n in range(2)] if kind.get_class() == h5t.COMPOUND else []
    if [(one.get_class(), one.get_size()) for one in members] != [(h5t.REFERENCE, 8), (h5t.INTEGER, 4)]:
        return []
    raw = np.empty(at.shape, f"V{kind.get_size()}")
    at.read(raw, kind)
    offsets = [kind.get_member_offset(n) for n in range(2)]
    formats = ["=u8", "=i4"]
    fields: Any = {"names": ["at", "axis"], "formats": formats, "offsets": offsets, "itemsize": raw.itemsize}
    return [(int(one["at"]), int(one["axis"])) for one in raw.view(np.dtype(fields)).ravel()]


def _number(found: Any, name: str) -> Any:
    """Return an attribute that is one number, or None."""
    if name not in getattr(found, "attrs", {}) or not plain(found.attrs.get_id(name)):
        return None
    values = np.ravel(found.attrs[name])
    return values[0] if values.size == 1 else None


def _is_text(found: Any, name: str) -> bool:
    kind = found.attrs.get_id(name)
    return kind.dtype.kind == "S" and kind.shape == ()
