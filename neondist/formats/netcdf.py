"""NetCDF-4, which is HDF5 with dimensions that have names: one variable of a file, in its own units."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..errors import ConfigError, DataError
from ..io.hdf5 import arrays_in, faults, find, get_text, plain, read_array
from ..io.regular_file import open_regular
from .axes import Cells
from .base import TileSource
from .conventions import LARGEST, PLACE, AuxiliaryVariable, Variable, collect, letters, names_of, references, words
from .hdf5 import HDF5Sink, HDF5Source
from .packing import Packing

_OF_VARIABLE, _OF_DIMENSION, _USERS = "_Netcdf4Coordinates", "_Netcdf4Dimid", "REFERENCE_LIST"
_OWN = {"CLASS", "NAME", "DIMENSION_LIST", "DIMENSION_LABELS", _USERS}
_BARE = "This is a netCDF dimension but not a netCDF variable."
_DEEPEST = 100  # groups around a variable, in each of which dimensions are looked for
_NOT_COORDINATE = "_nc4_non_coord_"  # before the name of a variable that is called as a dimension, but is not along it


class NetCDFSource(HDF5Source):
    """A variable: the one named, or the only one that has most dimensions; time comes as an axis T.

    What is read are the values, not how they are packed (`Packing`): missing ones are NaN, but whole numbers without a
    scale stay as they are. Its axes are those that coordinates and names tell (`conventions.letters`).
    """

    refusal = "not a NetCDF file; check the path, or restore it from a good copy"

    def __init__(self, path: Path, inside: str, level: int, axes: str | None) -> None:
        with faults(path), open_regular(path) as file:
            if file.read(3) == b"CDF":
                raise DataError(f"{path}: is NetCDF-3; convert it: nccopy -k nc4 {path.name} NEW.nc")
        self._given = axes
        self._found: dict[str, list[tuple[str, Any]]] = {}  # dimensions of variables, which take long to look up
        self._scales: dict[str, tuple[dict[int, list[tuple[int, Any]]], dict[int, Any]]] = {}
        super().__init__(path, inside, level, axes)

    def _called(self, name: str) -> str:
        group, _, last = name.rpartition("/")
        hidden = f"{group}/{_NOT_COORDINATE}{last}".strip("/")
        return hidden if find(self._file, hidden) is not None else name

    def _choose(self, path: Path) -> str:
        there = {name: self._file[name] for name in self._names()}
        of_others = {other for one in there.values() for other in references(_texts(one))}
        found = {name: one.ndim for name, one in there.items() if one.ndim > 1 and plain(one) and name not in of_others}
        found = {name: n for name, n in found.items() if not name.endswith(("_bnds", "_bounds"))}
        most = [name for name, n in found.items() if n == max(found.values())]
        if len(most) == 1:
            return most[0]
        choices = ", ".join(f"{path}:{name}" for name in found) or "it has none of two dimensions"
        raise DataError(f"{path}: which variable? {choices}")

    def _describe(self, array: Any) -> tuple[str | None, Any, dict[str, Any]]:
        where = f"{self._file.filename}:{self._name}"
        if array.name.count("/") > _DEEPEST:
            raise DataError(f"{self._file.filename}: its variable is nested in more than {_DEEPEST} groups; move it up")
        if _is_bare(array):
            raise DataError(f"{where}: is a dimension without coordinates; name a variable")
        if not plain(array):
            raise DataError(f"{where}: holds text, records or lists, not numbers; name a variable of numbers")
        self._packing = Packing(where, array.dtype, _texts(array), prefilled=True)
        dimensions = self._dimensions(array)
        names = tuple(name for name, _ in dimensions)
        axes = self._given
        if axes is None and array.ndim:
            coordinates = {name: self._told(name, one) for name, one in dimensions if one is not None}
            for name in words(array.attrs["coordinates"]) if "coordinates" in _attributes(array, "", []) else ():
                other = self._in_scope(name)
                if name not in coordinates and other is not None:
                    coordinates[name] = self._told(name, other)
            axes = letters(where, Variable(names, _texts(array), coordinates), array.shape)
        return axes, self._packing.dtype, {"dimensions": list(names)}

    def _extents(self, array: Any) -> tuple[int, ...]:
        """Return the extents of the dimensions; of unlimited ones a variable may have been written only a part."""
        import h5py

        extents = list(array.shape)
        if None not in array.maxshape:
            return tuple(extents)
        for axis, (_, scale) in enumerate(self._dimensions(array)):
            users = dict(_users(scale)) if array.maxshape[axis] is None else {}
            for group in self._groups() if users else ():
                for _, found in arrays_in(find(self._file, group)):
                    at = users.get(h5py.h5o.get_info(found.id).addr)
                    if at is not None and at < found.ndim:
                        extents[axis] = max(extents[axis], found.shape[at])
        return tuple(extents)

    def _read(self, cells: Cells) -> np.ndarray:
        there = tuple(
            slice(min(cut.start, n), min(cut.stop, n)) for cut, n in zip(cells, self._array.shape, strict=True)
        )
        if there == cells:
            return self._packing.decode(super()._read(cells))
        shape = [cut.stop - cut.start for cut in cells]
        raw = np.full(shape, self._array.fillvalue, self._array.dtype)
        if all(cut.start < cut.stop for cut in there):
            raw[tuple(slice(0, cut.stop - cut.start) for cut in there)] = super()._read(there)
        return self._packing.decode(raw)

    def _told(self, name: str, found: Any) -> Variable:
        """Return what a coordinate says of the axes."""
        if _is_bare(found):
            return Variable(())
        return Variable(tuple(of for of, _ in self._dimensions(found)), _texts(found))

    def _groups(self) -> list[str]:
        """Return the groups whose dimensions and variables are the variable's, the innermost first."""
        inner, groups = self._array.parent.name, ["/"]
        for part in inner.strip("/").split("/") if inner != "/" else ():
            groups.append(f"{groups[-1].rstrip('/')}/{part}")
        return groups[::-1]

    def _in_scope(self, name: str) -> Any:
        """Return a variable by its name, of the innermost group that has it, or None."""
        for group in self._groups() if not name.startswith("/") else [""]:
            found = find(self._file, f"{group}/{_NOT_COORDINATE}{name}") or find(self._file, f"{group}/{name}")
            if isinstance(found, type(self._array)):
                return found
        return None

    def _dimensions(self, array: Any) -> list[tuple[str, Any]]:
        """Return the name and the variable of each dimension; '' and None for those that have no name.

        Dimensions list whose they are. HDF5's references in these lists are compared as the addresses that they are,
        and never followed: of those in a damaged file libhdf5 dies.
        """
        import h5py

        if array.name in self._found:
            return self._found[array.name]
        own, known = h5py.h5o.get_info(array.id).addr, dict[int, tuple[str, Any]]()
        ids = np.ravel(array.attrs[_OF_VARIABLE]).tolist() if _of_numbers(array, _OF_VARIABLE) else []
        ids = ids if "CLASS" in array.attrs and len(ids) == array.ndim else []
        for group in self._groups():
            users, scales = self._scales_in(group)
            for axis, of in [*users.get(own, ()), *((at, scales[id]) for at, id in enumerate(ids) if id in scales)]:
                known.setdefault(axis, of)
        if not known and array.ndim == 1 and "CLASS" in array.attrs:
            known[0] = (array.name.rpartition("/")[2], array)
        self._found[array.name] = [known.get(axis, ("", None)) for axis in range(array.ndim)]
        return self._found[array.name]

    def _scales_in(self, group: str) -> tuple[dict[int, list[tuple[int, Any]]], dict[int, Any]]:
        """Return the dimensions of a group: by the address of each variable that has one, and by their numbers."""
        if group not in self._scales:
            users, numbered = self._scales[group] = dict[int, list[tuple[int, Any]]](), dict[int, Any]()
            for name, found in arrays_in(find(self._file, group)):
                for at, axis in _users(found):
                    users.setdefault(at, []).append((axis, (name, found)))
                if "CLASS" in found.attrs and _of_numbers(found, _OF_DIMENSION):
                    numbered.setdefault(int(np.ravel(found.attrs[_OF_DIMENSION])[0]), (name, found))
        return self._scales[group]

    def auxiliary_variables(self) -> tuple[list[AuxiliaryVariable], list[str]]:
        """Return what the variable needs, the file as '/' and itself as '' among it, and what of it cannot be read."""
        array, lost = self._array, list[str]()
        with faults(Path(self.path)):
            found = [AuxiliaryVariable("/", (), None, _attributes(self._file, "", lost))]
            own = _attributes(array, "", [])
            lost += [name for name in PLACE if name in array.attrs and name not in own]
            along = [self._of(name, one, lost) for name, one in self._dimensions(array) if name]
            found += collect(own, along, lambda name: self._of(name, self._in_scope(name), lost))
        return found, list(dict.fromkeys(lost))

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of the variable."""
        with faults(Path(self.path)):
            return {name: value for name, value in _texts(self._array).items() if value is not None}

    def known(self) -> list[str]:
        """Return the names of what is known of the variable beside its cells."""
        return names_of(*self.auxiliary_variables())

    def _of(self, name: str, found: Any, lost: list[str]) -> AuxiliaryVariable:
        if found is None:
            lost.append(name)
            return AuxiliaryVariable(name, (), None, {})
        dimensions = tuple(of for of, _ in self._dimensions(found))
        if _is_bare(found):
            return AuxiliaryVariable(name, dimensions, None, {})
        if plain(found) and "" not in dimensions and found.nbytes <= LARGEST:
            attributes = _attributes(found, f"{name}:", lost)
            unread = [one for one, value in _texts(found).items() if value is None and one not in _OWN]
            return AuxiliaryVariable(name, dimensions, read_array(found, name), attributes, tuple(unread))
        lost.append(name)
        return AuxiliaryVariable(name, dimensions, None, {})


class NetCDFSink(HDF5Sink):
    """A new NetCDF-4 file with one variable, and the dimensions, coordinates and projection of the one that it is like.

    Parameters
    ----------
    name : str
        Of the variable, default 'predictions'.
    variables : sequence of (str, mapping), optional
        Instead, a variable for each channel: its name and its attributes, numbers and text.

    Attributes
    ----------
    lost : list of str
        What of these cannot be kept.
    """

    choices: ClassVar[dict[str, Any]] = {"name": "predictions", "variables": None}

    @property
    def by_channel(self) -> bool:
        """Whether the file has a variable for each channel."""
        return self._options["variables"] is not None

    def _arrays(self) -> list[str]:
        if not self.by_channel:
            return super()._arrays()
        names = [name for name, _ in self._options["variables"]]
        if len(names) != self.shape[-1] or len({*names}) < len(names):
            raise ConfigError(
                f"{self.path}: {names} are names of variables for {self.shape[-1]} channels; give"
                " each channel its own name"
            )
        return names

    def _describe(self, arrays: Sequence[Any], like: TileSource | None) -> None:
        file, names, given = arrays[0].file, dict[str, str](), list[AuxiliaryVariable]()
        if like is not None:
            given, self.lost = like.auxiliary_variables()
            self._kept = {name: set() for name in names_of(given, self.lost)}  # what is not is in `lost`
            known = zip(like.stored.stored, like.metadata.get("dimensions", ()), strict=False)
            names = {letter: name for letter, name in known if name}
        usual = dict(zip("NTZYXC", ("sample", "time", "z", "y", "x", "channel"), strict=True))
        sizes = {names.get(one, usual.get(one, one.lower())): n for one, n in zip(self.axes, self.shape, strict=True)}
        if self.by_channel:
            sizes.popitem()  # the channels
        own, kept = tuple(sizes), dict[str, AuxiliaryVariable]()
        for one in given:
            if one.values is not None:
                extents = dict(zip(one.dimensions, one.values.shape, strict=True))
                if sizes | extents == extents | sizes and one.name not in self._arrays():
                    sizes, kept[one.name] = sizes | extents, one
                    file[one.name] = one.values
                else:
                    self.lost.append(one.name)
        for number, (name, n) in enumerate(sizes.items()):
            if name not in kept:
                file[name] = np.zeros(n, ">f4")
            file[name].make_scale(name if name in kept else f"{_BARE}{n:10d}")
            file[name].attrs[_OF_DIMENSION] = np.int32(number)
        for array in arrays:
            array.attrs[_OF_VARIABLE] = np.arange(len(own), dtype=np.int32)
        all_own = [(array.name, own) for array in arrays]
        for name, dimensions in [*all_own, *((one.name, one.dimensions) for one in kept.values())]:
            for axis, of in enumerate(dimensions if name not in sizes else ()):
                file[name].dims[axis].attach_scale(file[of])
        for one in given:
            for key, value in one.attributes.items() if one.name in {"", "/", *kept} else ():
                there = references({key: value})
                if key == "coordinates" and not {*there} <= {*kept}:
                    there = [name for name in there if name in kept]
                    value = np.bytes_(" ".join(there)) if there else None
                if value is not None and {*there} <= {*kept}:
                    for found in [file[one.name]] if one.name else arrays:
                        found.attrs[key] = value
                else:
                    self.lost.append(f"{one.name}:{key}" if one.name else key)
        for array, (_, attributes) in zip(arrays, self._options["variables"] or (), strict=False):
            for key, value in attributes.items():
                array.attrs[key] = np.bytes_(value.encode()) if isinstance(value, str) else value
        self.lost = list(dict.fromkeys(self.lost))


def _attributes(found: Any, of: str, lost: list[str]) -> dict[str, Any]:
    """Return the attributes that are numbers or text of fixed length; others, but for netCDF's own, are lost."""
    kept: dict[str, Any] = {}
    for name in found.attrs:
        if name in _OWN or name.startswith("_N"):
            continue
        if _is_text(found, name) or (plain(found.attrs.get_id(name)) and found.attrs.get_id(name).shape is not None):
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


def _texts(found: Any) -> dict[str, Any]:
    """Return all attributes: text as str, numbers as arrays, None for what is neither or of variable length."""
    known = dict.fromkeys(found.attrs) | _attributes(found, "", [])
    return {name: one.decode(errors="replace") if isinstance(one, bytes) else one for name, one in known.items()}


def _of_numbers(found: Any, name: str) -> bool:
    return name in found.attrs and plain(found.attrs.get_id(name))


def _is_bare(found: Any) -> bool:
    return "NAME" in found.attrs and _is_text(found, "NAME") and get_text(found.attrs, "NAME").startswith(_BARE)


def _is_text(found: Any, name: str) -> bool:
    kind = found.attrs.get_id(name)
    return kind.dtype.kind == "S" and kind.shape == ()
