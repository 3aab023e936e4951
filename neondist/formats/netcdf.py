"""Reader and writer of NetCDF-4, which is HDF5 with named dimensions: one variable of a file, in its own units."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..errors import ConfigError, DataError
from ..io.hdf5 import (
    array_names,
    convert_hdf5_errors,
    find_object,
    get_text_attribute,
    is_numeric,
    iter_arrays,
    read_array,
)
from ..io.regular_file import open_regular
from ..terminal.console import counted
from . import conventions
from .axes import Cells
from .base import TileSource
from .conventions import AuxiliaryVariable, VariableMetadata, list_metadata_names, referenced_variables, split_words
from .hdf5 import HDF5Sink, HDF5Source
from .in_place import CellLayout
from .packing import Packing

_DIMENSION_IDS, _DIMENSION_ID, _REFERENCE_LIST = ("_Netcdf4Coordinates", "_Netcdf4Dimid", "REFERENCE_LIST")
_OWN_ATTRIBUTES = {"CLASS", "NAME", "DIMENSION_LIST", "DIMENSION_LABELS", _REFERENCE_LIST}
_NO_COORDINATES_TEXT = "This is a netCDF dimension but not a netCDF variable."
_MAX_NESTING = 100  # limit on nested groups; every enclosing group is searched for dimensions
_NON_COORDINATE_PREFIX = "_nc4_non_coord_"  # prefix of a variable with a dimension's name that is not its coordinate


class NetCDFSource(HDF5Source):
    """Variable of a NetCDF-4 file, by default the only one with the most dimensions; time is the axis T.

    Values are unpacked, with NaN for missing values; integers without scale and offset are unchanged (`Packing`). Axes
    are inferred from coordinates and names (`conventions.infer_axes`).
    """

    wrong_type_message = "not a NetCDF file; check the path, or restore it from a good copy"

    def __init__(self, path: Path, name_in_file: str, level: int, axes: str | None) -> None:
        with convert_hdf5_errors(path), open_regular(path) as file:
            if file.read(3) == b"CDF":
                raise DataError(f"{path}: is NetCDF-3; convert it: nccopy -k nc4 {path.name} NEW.nc")
        self._dimensions_by_variable: dict[str, list[tuple[str, Any]]] = {}  # cached, since look-ups are slow
        self._scales_by_group: dict[str, tuple[dict[int, list[tuple[int, Any]]], dict[int, Any]]] = {}
        super().__init__(path, name_in_file, level, axes)

    def _resolve_name(self, name: str) -> str:
        group, _, base_name = name.rpartition("/")
        hidden_name = f"{group}/{_NON_COORDINATE_PREFIX}{base_name}".strip("/")
        return hidden_name if find_object(self._file, hidden_name) is not None else name

    def _choose_default_array(self, path: Path) -> str:
        arrays = {name: self._file[name] for name in self._root_array_names()}
        referenced = {other for one in arrays.values() for other in referenced_variables(_all_attributes(one))}
        ndims = {name: a.ndim for name, a in arrays.items() if a.ndim > 1 and is_numeric(a) and name not in referenced}
        ndims = {name: n for name, n in ndims.items() if not name.endswith(("_bnds", "_bounds"))}
        largest_names = [name for name, n in ndims.items() if n == max(ndims.values())]
        if len(largest_names) == 1:
            return largest_names[0]
        if not ndims:
            names = [name for name in array_names(self._file) if "/" in name]
            choices = f"one in a group: {', '.join(f'{path}:{name}' for name in names)}" if names else f"{path}:NAME"
            raise DataError(f"{path}: has no numeric variable of two or more dimensions; give a variable, {choices}")
        choices = ", ".join(f"{path}:{name}" for name in ndims)
        raise DataError(f"{path}: has several variables; specify one: {choices}")

    def _axes_dtype_metadata(self, array: Any) -> tuple[str | None, Any, dict[str, Any]]:
        where = f"{self._file.filename}:{self._name}"
        if array.name.count("/") > _MAX_NESTING:
            raise DataError(
                f"{self._file.filename}: the variable is nested in more than {_MAX_NESTING} groups; move it up"
            )
        if _lacks_coordinates(array):
            raise DataError(f"{where}: is a dimension without coordinates; specify a variable")
        if not is_numeric(array):
            raise DataError(f"{where}: holds text, records or lists, not numbers; specify a variable of numbers")
        self.packing = Packing(where, array.dtype, _all_attributes(array), has_default_fill=True)
        dimensions = self._dimensions(array)
        names = tuple(name for name, _ in dimensions)
        axes = self._axes_option
        if axes is None and array.ndim:
            coordinates = {name: self._variable_metadata(name, one) for name, one in dimensions if one is not None}
            for name in (
                split_words(array.attrs["coordinates"]) if "coordinates" in _storable_attributes(array, "", []) else ()
            ):
                variable = self._find_in_scope(name)
                if name not in coordinates and variable is not None:
                    coordinates[name] = self._variable_metadata(name, variable)
            axes = conventions.infer_axes(
                where, VariableMetadata(names, _all_attributes(array), coordinates), array.shape
            )
        return axes, self.packing.dtype, {"dimensions": list(names)}

    def _shape_as_read(self, array: Any) -> tuple[int, ...]:
        """Return the extents of the dimensions; a variable may be shorter than an unlimited dimension."""
        import h5py

        extents = list(array.shape)
        if None not in array.maxshape:
            return tuple(extents)
        for axis, (_, scale) in enumerate(self._dimensions(array)):
            axis_by_user = dict(_addresses_of_dimension_users(scale)) if array.maxshape[axis] is None else {}
            for group in self._enclosing_groups() if axis_by_user else ():
                for _, user in iter_arrays(find_object(self._file, group)):
                    user_axis = axis_by_user.get(h5py.h5o.get_info(user.id).addr)
                    if user_axis is not None and user_axis < user.ndim:
                        extents[axis] = max(extents[axis], user.shape[user_axis])
        return tuple(extents)

    def _read(self, cells: Cells) -> np.ndarray:
        stored_cells = tuple(
            slice(min(cut.start, n), min(cut.stop, n)) for cut, n in zip(cells, self._array.shape, strict=True)
        )
        if stored_cells == cells:
            return self._unpack(super()._read(cells))
        shape = [cut.stop - cut.start for cut in cells]
        raw = np.full(shape, self._array.fillvalue, self._array.dtype)
        if all(cut.start < cut.stop for cut in stored_cells):
            raw[tuple(slice(0, cut.stop - cut.start) for cut in stored_cells)] = super()._read(stored_cells)
        return self._unpack(raw)

    def _variable_metadata(self, name: str, array: Any) -> VariableMetadata:
        if _lacks_coordinates(array):
            return VariableMetadata(())
        return VariableMetadata(tuple(dimension for dimension, _ in self._dimensions(array)), _all_attributes(array))

    def _enclosing_groups(self) -> list[str]:
        """Return the groups that contain the variable, the innermost first."""
        parent_name = self._array.parent.name
        groups = ["/"]
        for part in parent_name.strip("/").split("/") if parent_name != "/" else ():
            groups.append(f"{groups[-1].rstrip('/')}/{part}")
        return groups[::-1]

    def _find_in_scope(self, name: str) -> Any:
        """Return a variable by name from the innermost group that has it, or None."""
        for group in self._enclosing_groups() if not name.startswith("/") else [""]:
            variable = find_object(self._file, f"{group}/{_NON_COORDINATE_PREFIX}{name}") or find_object(
                self._file, f"{group}/{name}"
            )
            if isinstance(variable, type(self._array)):
                return variable
        return None

    def _dimensions(self, array: Any) -> list[tuple[str, Any]]:
        """Return the name and the variable of each dimension; '' and None for unnamed dimensions.

        Dimensions list the variables that use them. HDF5's references in these lists are compared as addresses and
        never dereferenced, since libhdf5 crashes on damaged references.
        """
        import h5py

        if array.name in self._dimensions_by_variable:
            return self._dimensions_by_variable[array.name]
        addr = h5py.h5o.get_info(array.id).addr
        scale_by_axis = dict[int, tuple[str, Any]]()
        ids = np.ravel(array.attrs[_DIMENSION_IDS]).tolist() if _has_numeric_attribute(array, _DIMENSION_IDS) else []
        ids = ids if "CLASS" in array.attrs and len(ids) == array.ndim else []
        for group in self._enclosing_groups():
            scales_by_user, scale_by_id = self._dimensions_of_group(group)
            own_scales = ((axis, scale_by_id[id]) for axis, id in enumerate(ids) if id in scale_by_id)
            for axis, scale in (*scales_by_user.get(addr, ()), *own_scales):
                scale_by_axis.setdefault(axis, scale)
        if not scale_by_axis and array.ndim == 1 and "CLASS" in array.attrs:
            scale_by_axis[0] = (array.name.rpartition("/")[2], array)
        self._dimensions_by_variable[array.name] = [scale_by_axis.get(axis, ("", None)) for axis in range(array.ndim)]
        return self._dimensions_by_variable[array.name]

    def _dimensions_of_group(self, group: str) -> tuple[dict[int, list[tuple[int, Any]]], dict[int, Any]]:
        """Return the dimensions of a group: by address of each variable that uses them, and by ID."""
        if group not in self._scales_by_group:
            scales_by_user = dict[int, list[tuple[int, Any]]]()
            scale_by_id = dict[int, Any]()
            self._scales_by_group[group] = scales_by_user, scale_by_id
            for name, scale in iter_arrays(find_object(self._file, group)):
                for at, axis in _addresses_of_dimension_users(scale):
                    scales_by_user.setdefault(at, []).append((axis, (name, scale)))
                if "CLASS" in scale.attrs and _has_numeric_attribute(scale, _DIMENSION_ID):
                    scale_by_id.setdefault(int(np.ravel(scale.attrs[_DIMENSION_ID])[0]), (name, scale))
        return self._scales_by_group[group]

    def auxiliary_variables(self) -> tuple[list[AuxiliaryVariable], list[str]]:
        """Return the file as '/', the variable as '', the variables it refers to, and the names of unreadable items."""
        array, unreadable = self._array, list[str]()
        with convert_hdf5_errors(Path(self.path)):
            variables = [AuxiliaryVariable("/", (), None, _storable_attributes(self._file, "", unreadable))]
            own = _storable_attributes(array, "", [])
            unreadable += [name for name in conventions.POSITION_ATTRIBUTES if name in array.attrs and name not in own]
            dimensions = [self._load_variable(name, one, unreadable) for name, one in self._dimensions(array) if name]
            variables += conventions.load_auxiliary_variables(
                own, dimensions, lambda name: self._load_variable(name, self._find_in_scope(name), unreadable)
            )
        return variables, list(dict.fromkeys(unreadable))

    def array_attributes(self) -> dict[str, Any]:
        """Return the attributes of the variable."""
        with convert_hdf5_errors(Path(self.path)):
            return {name: value for name, value in _all_attributes(self._array).items() if value is not None}

    def metadata_names(self) -> list[str]:
        """Return the names of the variable's metadata."""
        return list_metadata_names(*self.auxiliary_variables())

    def _load_variable(self, name: str, array: Any, unreadable: list[str]) -> AuxiliaryVariable:
        if array is None:
            unreadable.append(name)
            return AuxiliaryVariable(name, (), None, {})
        dimensions = tuple(dimension for dimension, _ in self._dimensions(array))
        if _lacks_coordinates(array):
            return AuxiliaryVariable(name, dimensions, None, {})
        if is_numeric(array) and "" not in dimensions and array.nbytes <= conventions.MAX_COORDINATE_BYTES:
            attributes = _storable_attributes(array, f"{name}:", unreadable)
            unread_names = [
                one for one, value in _all_attributes(array).items() if value is None and one not in _OWN_ATTRIBUTES
            ]
            return AuxiliaryVariable(name, dimensions, read_array(array, name), attributes, tuple(unread_names))
        unreadable.append(name)
        return AuxiliaryVariable(name, dimensions, None, {})


class NetCDFSink(HDF5Sink):
    """New NetCDF-4 file with one variable, and the dimensions, coordinates and projection of the `like` variable.

    Parameters
    ----------
    name : str
        Name of the variable, default 'predictions'.
    variables : sequence of (str, mapping), optional
        Name and attributes (numbers or text) of each channel's variable; without it, channels share one variable.

    Attributes
    ----------
    lost : list of str
        Names of metadata that cannot be stored.
    """

    default_options: ClassVar[dict[str, Any]] = {"name": "predictions", "variables": None}

    @property
    def one_array_per_channel(self) -> bool:
        """Whether the file has a variable for each channel."""
        return self._options["variables"] is not None

    def _create_layout(self, draft: Path, like: TileSource | None) -> CellLayout:
        if self.dtype == np.float16:  # other readers crash
            raise ConfigError(f"{self.path}: NetCDF files cannot store {self.dtype}; choose another dtype")
        return super()._create_layout(draft, like)

    def _output_array_names(self) -> list[str]:
        if not self.one_array_per_channel:
            return super()._output_array_names()
        names = [name for name, _ in self._options["variables"]]
        if len(names) != self.shape[-1] or len({*names}) < len(names):
            raise ConfigError(
                f"{self.path}: variables: {names} do not name {counted(self.shape[-1], 'channel')}; give"
                " each channel its own name"
            )
        return names

    def _write_metadata(self, arrays: Sequence[Any], like: TileSource | None) -> None:
        file, variables = arrays[0].file, list[AuxiliaryVariable]()
        dimension_names = dict[str, str]()
        if like is not None:
            variables, self.lost = like.auxiliary_variables()
            # this method completes `lost`, so `_list_lost_metadata` must add nothing
            self._copied_metadata = {name: set() for name in list_metadata_names(variables, self.lost)}
            stored_names = zip(like.stored_axes.letters, like.metadata.get("dimensions", ()), strict=False)
            dimension_names = {letter: name for letter, name in stored_names if name}
        sizes = self._dimension_sizes(dimension_names)
        own_dimensions = tuple(sizes)
        written = self._write_coordinates(file, variables, sizes)
        _write_dimensions(file, sizes, set(written))
        for array in arrays:
            array.attrs[_DIMENSION_IDS] = np.arange(len(own_dimensions), dtype=np.int32)
        own_arrays = [(array.name, own_dimensions) for array in arrays]
        for name, dimensions in [*own_arrays, *((one.name, one.dimensions) for one in written.values())]:
            for axis, dimension in enumerate(dimensions if name not in sizes else ()):
                file[name].dims[axis].attach_scale(file[dimension])
        for one in variables:
            if one.name in {"", "/", *written}:
                self._write_attributes([file[one.name]] if one.name else arrays, one, set(written))
        for array, (_, attributes) in zip(arrays, self._options["variables"] or (), strict=False):
            for key, value in attributes.items():
                array.attrs[key] = np.bytes_(value.encode()) if isinstance(value, str) else value
        self.lost = list(dict.fromkeys(self.lost))

    def _dimension_sizes(self, names: Mapping[str, str]) -> dict[str, int]:
        """Return the extent of each dimension by name; `names` maps axis letters to names in the `like` variable."""
        names = {**dict(zip("NTZYXC", ("sample", "time", "z", "y", "x", "channel"), strict=True)), **names}
        sizes = {names.get(axis, axis.lower()): n for axis, n in zip(self.axes, self.shape, strict=True)}
        if self.one_array_per_channel:
            sizes.popitem()  # channels
        return sizes

    def _write_coordinates(
        self, file: Any, variables: Sequence[AuxiliaryVariable], sizes: dict[str, int]
    ) -> dict[str, AuxiliaryVariable]:
        """Write and return the variables that fit the dimensions in `sizes`; add their other dimensions to `sizes`."""
        written = dict[str, AuxiliaryVariable]()
        for one in variables:
            if one.values is not None:
                extents = dict(zip(one.dimensions, one.values.shape, strict=True))
                if sizes | extents == extents | sizes and one.name not in self._output_array_names():
                    sizes.update(extents)
                    written[one.name] = one
                    file[one.name] = one.values
                else:
                    self.lost.append(one.name)
        return written

    def _write_attributes(self, objects: Sequence[Any], variable: AuxiliaryVariable, written: set[str]) -> None:
        """Write a variable's attributes, except those that refer to variables that are not written."""
        for key, value in variable.attributes.items():
            referenced = referenced_variables({key: value})
            if key == "coordinates" and not {*referenced} <= written:
                referenced = [name for name in referenced if name in written]
                value = np.bytes_(" ".join(referenced)) if referenced else None
            if value is not None and {*referenced} <= written:
                for item in objects:
                    item.attrs[key] = value
            else:
                self.lost.append(f"{variable.name}:{key}" if variable.name else key)


def _write_dimensions(file: Any, sizes: Mapping[str, int], coordinates: Container[str]) -> None:
    """Write the dimensions, those without coordinates as arrays of zeros that netCDF hides."""
    for number, (name, n) in enumerate(sizes.items()):
        if name not in coordinates:
            file[name] = np.zeros(n, ">f4")
        file[name].make_scale(name if name in coordinates else f"{_NO_COORDINATES_TEXT}{n:10d}")
        file[name].attrs[_DIMENSION_ID] = np.int32(number)


def _storable_attributes(item: Any, unreadable_prefix: str, unreadable: list[str]) -> dict[str, Any]:
    """Return attributes of numbers or fixed-length text; append other names, except netCDF's, to `unreadable`."""
    storable: dict[str, Any] = {}
    for name in item.attrs:
        if name in _OWN_ATTRIBUTES or name.startswith("_N"):
            continue
        if _has_text(item, name) or (is_numeric(item.attrs.get_id(name)) and item.attrs.get_id(name).shape is not None):
            storable[name] = item.attrs[name]
        else:
            unreadable.append(f"{unreadable_prefix}{name}")
    return storable


def _addresses_of_dimension_users(scale: Any) -> list[tuple[int, int]]:
    """Return the addresses of the variables that use a dimension, and the dimension's axis in each."""
    from h5py import h5t

    if _REFERENCE_LIST not in getattr(scale, "attrs", {}):
        return []
    attribute = scale.attrs.get_id(_REFERENCE_LIST)
    item_type = attribute.get_type()
    member_types = [item_type.get_member_type(n) for n in range(2)] if item_type.get_class() == h5t.COMPOUND else []
    if [(one.get_class(), one.get_size()) for one in member_types] != [(h5t.REFERENCE, 8), (h5t.INTEGER, 4)]:
        return []
    raw = np.empty(attribute.shape, f"V{item_type.get_size()}")
    attribute.read(raw, item_type)
    offsets = [item_type.get_member_offset(n) for n in range(2)]
    formats = ["=u8", "=i4"]
    fields: Any = {"names": ["at", "axis"], "formats": formats, "offsets": offsets, "itemsize": raw.itemsize}
    return [(int(one["at"]), int(one["axis"])) for one in raw.view(np.dtype(fields)).ravel()]


def _all_attributes(array: Any) -> dict[str, Any]:
    """Return all attributes: text as str, numbers as arrays, None for other types and for variable-length text."""
    values = dict.fromkeys(array.attrs) | _storable_attributes(array, "", [])
    return {name: v.decode(errors="replace") if isinstance(v, bytes) else v for name, v in values.items()}


def _has_numeric_attribute(item: Any, name: str) -> bool:
    return name in item.attrs and is_numeric(item.attrs.get_id(name))


def _lacks_coordinates(item: Any) -> bool:
    return (
        "NAME" in item.attrs
        and _has_text(item, "NAME")
        and get_text_attribute(item.attrs, "NAME").startswith(_NO_COORDINATES_TEXT)
    )


def _has_text(item: Any, name: str) -> bool:
    attribute = item.attrs.get_id(name)
    return attribute.dtype.kind == "S" and attribute.shape == ()
