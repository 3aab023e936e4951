"""Reader and writer of one array in an HDF5 file; reads verify checksums if the file has any."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..errors import ConfigError, DataError
from ..io.hdf5 import (
    CheckedArray,
    DeferredErrorHDF5File,
    array_names,
    convert_hdf5_errors,
    find_object,
    get_text_attribute,
    iter_arrays,
    open_hdf5,
    put_text_attribute,
    size_and_mtime,
)
from .axes import Cells, guess_axes, squeeze_channels
from .base import TileSource
from .in_place import CellLayout, InPlaceSink
from .tiles import default_chunks

_DEFAULT_ARRAY_NAMES = ("images", "predictions")
_AXES_ATTRIBUTE = "axes"
_OWN_ATTRIBUTES = {
    *(_AXES_ATTRIBUTE, "CLASS", "NAME", "DIMENSION_LIST", "DIMENSION_LABELS", "REFERENCE_LIST"),
    *("_Netcdf4Coordinates", "_Netcdf4Dimid"),
}
"""Attributes that name the axes, or that HDF5 and NetCDF use internally."""


class HDF5Source(TileSource):
    """Array in an HDF5 file: by default 'images', 'predictions' or the only array; attribute 'axes' names its axes."""

    wrong_type_message: ClassVar[str | None] = None

    def __init__(self, path: Path, name_in_file: str, level: int, axes: str | None) -> None:
        self._file, self._file_state = open_hdf5(path, self.wrong_type_message), size_and_mtime(path)
        self._whole_array: CheckedArray | None = None
        self._axes_option = axes
        try:
            with convert_hdf5_errors(path):
                self._name = self._resolve_name(name_in_file.strip("/")) or self._choose_default_array(path)
                array = find_object(self._file, self._name)
                if not _is_array(array):
                    names = ", ".join(self._root_array_names() or array_names(self._file))
                    choices = f"choose one of {names}" if names else "specify another file"
                    raise DataError(f"{path}: has no array '{self._name}'; {choices}")
                self._array = array
                stored_axes, dtype, metadata = self._axes_dtype_metadata(array)
                axes, name = axes or stored_axes, f"{path}:{self._name}" if name_in_file else path
                shape, chunks = self._shape_as_read(array), array.chunks
                super().__init__(
                    name,
                    axes or guess_axes(shape, name),
                    shape,
                    dtype,
                    chunks,
                    metadata=metadata,
                    axes_given=axes is not None,
                )
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _resolve_name(self, name: str) -> str:
        return name

    def _root_array_names(self) -> list[str]:
        return [name for name, _ in iter_arrays(self._file)]

    def _choose_default_array(self, path: Path) -> str:
        names = self._root_array_names()
        for name in (*_DEFAULT_ARRAY_NAMES, *(names if len(names) == 1 else ())):
            if name in names:
                return name
        choices = ", ".join(f"{path}:{name}" for name in names or array_names(self._file))
        problem = f"{'several arrays' if names else 'arrays in groups'}; specify one of {choices}"
        raise DataError(f"{path}: contains {problem if choices else 'no array; specify another file'}")

    def _axes_dtype_metadata(self, array: Any) -> tuple[str | None, Any, dict[str, Any]]:
        """Return the axes (None if the file does not name them), the dtype of the values, and metadata for sinks."""
        # HDF5's own dimension labels are not used: libhdf5 crashes on damaged labels
        attribute, axes = array.attrs.get_id(_AXES_ATTRIBUTE) if _AXES_ATTRIBUTE in array.attrs else None, ""
        if attribute is not None and attribute.shape == () and self._axes_option is None:
            if attribute.dtype.kind == "O":  # libhdf5 crashes on damaged text of variable length
                raise DataError(
                    f"{self._file.filename}: the attribute axes of {self._name} is variable-length text, which is not"
                    " supported; write it with h5py as np.bytes_('YXC'), or give axes"
                )
            axes = get_text_attribute(array.attrs, _AXES_ATTRIBUTE) if attribute.dtype.kind == "S" else ""
        axes = axes if axes.isascii() and axes.isupper() and axes.isalpha() else ""
        metadata = {name: None for name in array.attrs if name not in _OWN_ATTRIBUTES}
        return axes if len(axes) == len({*axes}) == array.ndim else None, array.dtype, metadata

    def _shape_as_read(self, array: Any) -> tuple[int, ...]:
        return tuple(array.shape or ())  # a null dataspace has no shape

    def _read(self, cells: Cells) -> np.ndarray:
        path = Path(self._file.filename)
        samples, *tile = cells
        out = np.empty([cut.stop - cut.start for cut in cells], self._array.dtype)
        with convert_hdf5_errors(path):
            if self._whole_array is None:
                self._whole_array = self._tile_reader = CheckedArray(self._file, self._name)
            if self._tile_reader.tile != tuple(tile):
                self._tile_reader = self._whole_array.part(tuple(tile))
            self._tile_reader.read(samples.start, out)
        if size_and_mtime(path) != self._file_state:
            raise DataError(f"{self.path}: has changed since it was opened; run the command again")
        return out


class HDF5Sink(InPlaceSink):
    """New HDF5 file with one uncompressed array, whose chunks every rank writes in place.

    Parameters
    ----------
    name : str
        Name of the array, default 'predictions'.
    channels : bool
        If False, a single channel gets no axis.
    """

    default_options: ClassVar[dict[str, Any]] = {"name": "predictions", "channels": True}

    @property
    def one_array_per_channel(self) -> bool:
        """Whether the file has an array for each channel."""
        return False

    def _create_layout(self, draft: Path, like: TileSource | None) -> CellLayout:
        names = self._output_array_names()
        self.chunks = self.chunks or default_chunks(self.shape, self.axes, self.dtype)
        axes, shape = squeeze_channels(self.axes, self.shape, self._options)
        by_channel = self.one_array_per_channel
        self.chunks = (*self.chunks[:-1], 1) if by_channel else self.chunks
        chunks = self.chunks[: len(shape)]
        array_ndim = len(shape) - by_channel
        chunk_offsets: dict[tuple[int, ...], int] = {}
        with open(draft, "xb+") as file:
            new = DeferredErrorHDF5File(file, libver="v110")
            try:
                arrays = [self._create_array(new.hdf5, name, shape[:array_ndim], chunks[:array_ndim]) for name in names]
                self._write_metadata(arrays, like)
                new.hdf5.flush()
                for number, array in enumerate(arrays):
                    channel = (number,) if by_channel else ()

                    def record_offset(chunk: Any, channel: tuple[int, ...] = channel) -> None:
                        chunk_offsets[(*chunk.chunk_offset, *channel)] = chunk.byte_offset

                    array.id.chunk_iter(record_offset)
            finally:
                new.close()
        return CellLayout(axes, self.dtype.str, shape, chunks, tuple(chunk_offsets[at] for at in sorted(chunk_offsets)))

    def _create_array(self, file: Any, name: str, shape: Sequence[int], chunks: Sequence[int]) -> Any:
        """Return a new array, whose chunks are allocated on creation."""
        import h5py

        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_chunk(tuple(chunks))
        properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        properties.set_obj_track_times(False)  # equal data must give equal files
        hdf5_type, dataspace = h5py.h5t.py_create(self.dtype, logical=True), h5py.h5s.create_simple(tuple(shape))
        return h5py.Dataset(h5py.h5d.create(file.id, name.encode(), hdf5_type, dataspace, properties))

    def _output_array_names(self) -> list[str]:
        """Return the names of the arrays: one, or one for each channel."""
        name = self._options["name"]
        if not name or "/" in name:
            raise ConfigError(f"{self.path}: invalid name {name!r}; give one without '/', such as predictions")
        return [name]

    def _write_metadata(self, arrays: Sequence[Any], like: TileSource | None) -> None:
        """Write the names of the axes, and other metadata."""
        for array in arrays:
            put_text_attribute(array.attrs, _AXES_ATTRIBUTE, self.axes[: array.ndim])


def _is_array(item: Any) -> bool:
    import h5py

    return isinstance(item, h5py.Dataset)
