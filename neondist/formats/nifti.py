"""NIfTI volumes, read and written with nibabel, including the affine."""

from __future__ import annotations

import gzip
import logging
import shutil
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError, DataError
from ..io.files import atomic_replacement
from ..io.regular_file import check_regular, open_regular
from .axes import Cells
from .base import TileSource, convert_read_errors
from .draft import COMPRESSED_SUFFIX
from .in_place import CellLayout, InPlaceSink
from .ome import base_unit, is_cell_size

_NIFTI_AXES = "XYZTC"  # in nibabel's order: the first axis varies fastest
_UNIT_CODES = {
    "meter": 1, "millimeter": 2, "micrometer": 3, "second": 8, "millisecond": 16, "microsecond": 24, "hertz": 32,
    "ppm": 40, "radian": 48,
}  # fmt: skip
_FIRST_TIME_UNIT_CODE = 8  # code of the first time unit
_UNIT_FACTORS = {"micrometer": 1e-6, "second": 1.0}
_AFFINE_FIELDS = (
    "qform_code", "sform_code", "quatern_b", "quatern_c", "quatern_d", "qoffset_x", "qoffset_y", "qoffset_z",
    "srow_x", "srow_y", "srow_z", "xyzt_units",
)  # fmt: skip
_TIMING_FIELDS = {
    "time offset": ("toffset",),
    "slice timing": ("dim_info", "slice_start", "slice_end", "slice_code", "slice_duration"),
}
_OTHER_METADATA_FIELDS = {
    "intent": ("intent_code", "intent_name", "intent_p1", "intent_p2", "intent_p3"),
    "display range": ("cal_min", "cal_max"),
    "description": ("descrip", "aux_file"),
}
"""metadata names, and the header fields of each"""
_SILENT_HANDLER = logging.NullHandler()
_HEADER_STARTS = b"\x5c\x01\0\0", b"\0\0\x01\x5c", b"\x1c\x02\0\0", b"\0\0\x02\x1c"
"""first bytes of NIfTI-1 and NIfTI-2, in either byte order"""
_MAX_DEFLATE_RATIO = 1032  # maximum compression ratio of deflate


class NIfTISource(TileSource):
    """Volume (X, Y, Z), time series, or volume with several values per voxel; values are scaled as the header declares.

    Each read of a .nii.gz decompresses all data before the box; decompress files that are read often.
    """

    def __init__(self, path: Path, name_in_file: str, level: int, axes: str | None) -> None:
        import nibabel

        with convert_read_errors(path), nibabel.imageglobals.LoggingOutputSuppressor():  # nibabel logs unusual files
            nibabel.imageglobals.logger.addHandler(_SILENT_HANDLER)  # otherwise Python prints warnings
            check_regular(path)
            with open_regular(path) as file:
                first_bytes = file.read(4)
            if path.suffix.lower() == ".gz" and first_bytes in _HEADER_STARTS:
                raise DataError(f"{path}: is not compressed, despite its name; rename it to {path.stem}")
            image: Any = nibabel.load(path, mmap=False)  # truncating a mapped file would kill the process
            array_proxy = image.dataobj
            shape, stored_dtype = tuple(map(int, array_proxy.shape)), array_proxy.dtype
            kept = [axis for axis, n in enumerate(shape) if axis < 2 or n != 1]
            if not shape or max(kept) >= len(_NIFTI_AXES):
                raise DataError(f"{path}: has an array of shape {list(shape)}; give one of up to 5 axes")
            file_size, nbytes = path.stat().st_size, prod(shape) * stored_dtype.itemsize
            if nbytes > (file_size - array_proxy.offset if path.suffix == ".nii" else _MAX_DEFLATE_RATIO * file_size):
                raise DataError(f"{path}: is truncated: its header specifies {list(shape)} voxels; restore the file")
            self._array_proxy, self._stored_axes = array_proxy, kept
            is_scaled = (array_proxy.slope, array_proxy.inter) != (1, 0)
            self._value_dtype = np.dtype(np.float64) if is_scaled else stored_dtype
            default_axes = "".join(_NIFTI_AXES[axis] for axis in kept)
            axes = axes or default_axes
            metadata = _volume_metadata(image.header, kept, axes, default_axes)
            super().__init__(path, axes, [shape[axis] for axis in kept], self._value_dtype, metadata=metadata)

    def affine(self) -> np.ndarray | None:
        """Return the affine that nibabel prefers."""
        header = self.metadata.get("affine")
        return None if header is None else np.asarray(header.get_best_affine())

    def _read(self, cells: Cells) -> np.ndarray:
        index: list[Any] = [0] * len(self._array_proxy.shape)
        for axis, cut in zip(self._stored_axes, cells, strict=True):
            index[axis] = cut
        return np.asarray(self._array_proxy[tuple(index)], self._value_dtype)


class NIfTISink(InPlaceSink):
    """New NIfTI file with the affine of the `like` volume; a .nii.gz is compressed at the end, by rank 0."""

    def _create_layout(self, draft: Path, like: TileSource | None) -> CellLayout:
        import nibabel

        extents = {name: n for name, n in zip(self.axes, self.shape, strict=True) if name != "C" or n > 1}
        if "N" in extents and "T" not in extents:
            extents["T"] = extents.pop("N")
        if not {"Y", "X"} <= set(extents) <= set(_NIFTI_AXES):
            raise ConfigError(
                f"{self.path}: NIfTI files support only axes {_NIFTI_AXES}, not '{self.axes}'; choose another format"
            )
        nifti_shape = [extents.get(name, 1) for name in _NIFTI_AXES]
        while len(nifti_shape) > 3 and nifti_shape[-1] == 1:
            nifti_shape.pop()
        header = (nibabel.Nifti1Header if max(nifti_shape) < 1 << 15 else nibabel.Nifti2Header)()
        try:
            header.set_data_dtype(self.dtype)
        except nibabel.spatialimages.HeaderDataError:
            raise ConfigError(f"{self.path}: NIfTI files cannot store {self.dtype}; choose another dtype") from None
        header.set_data_shape(nifti_shape)
        self._write_header_metadata(
            header, like, [name for name in _NIFTI_AXES if name in extents and name in self.axes]
        )
        data_offset = -(-(int(header["sizeof_hdr"]) + 4) // 16) * 16
        header.set_data_offset(data_offset)
        header.set_slope_inter(1, 0)
        with open(draft, "xb") as file:
            header.write_to(file)
        names = "".join(name for name in reversed(_NIFTI_AXES) if name in extents)
        shape = tuple(extents[name] for name in names)
        self.chunks = None
        axes = names.replace("T", "N") if "N" in self.axes else names
        return CellLayout(axes, self.dtype.str, shape, shape, (data_offset,))

    def _write_header_metadata(self, header: Any, like: TileSource | None, axes: list[str]) -> None:
        """Write metadata of the `like` image into a header: voxel sizes, units, affine, times."""
        units, sizes = ({} if like is None else like.metadata.get(name, {}) for name in ("units", "scale"))
        for candidates, base, standard in (("XYZ", "m", "micrometer"), ("T", "s", "second")):
            chosen = "".join(axis for axis in candidates if axis in axes and is_cell_size(axis, sizes.get(axis, 1.0)))
            scale, unit_names = self._copy_metadata(like, "scale", chosen), {units.get(axis, "") for axis in chosen}
            base_units = {axis: base_unit(units.get(axis, "")) or ("", 1.0) for axis in chosen}
            unit = unit_names.pop() if len(unit_names) == 1 else ""
            if unit not in _UNIT_CODES or (_UNIT_CODES[unit] < _FIRST_TIME_UNIT_CODE) != (base == "m"):
                unit = ""
                if chosen and len(scale) == len(chosen) and {kind for kind, _ in base_units.values()} == {base}:
                    unit = standard  # if units differ, or NIfTI has no code for them
                    scale = {axis: n * base_units[axis][1] / _UNIT_FACTORS[unit] for axis, n in scale.items()}
            if unit:
                self._copy_metadata(like, "units", chosen)
                header["xyzt_units"] += _UNIT_CODES[unit]
            for axis, n in scale.items():
                header["pixdim"][1 + _NIFTI_AXES.index(axis)] = n
        affine = self._copy_metadata(like, "affine")
        if affine is not None:
            header["pixdim"][:4] = affine["pixdim"][:4]
        for names, origin in (
            (_AFFINE_FIELDS, affine),
            *((_TIMING_FIELDS[name], self._copy_metadata(like, name)) for name in _TIMING_FIELDS),
        ):
            for name in names if origin is not None else ():
                header[name] = origin[name]

    def _finish_draft_file(self) -> Path:
        if self.path.suffix.lower() != ".gz":
            return self._temp_path
        compressed_path = self._temp_path.with_name(self._temp_path.name + COMPRESSED_SUFFIX)
        with (
            open_regular(self._temp_path) as plain,
            atomic_replacement(compressed_path) as file,
            gzip.GzipFile("", "wb", 6, file, 0) as into,
        ):
            shutil.copyfileobj(plain, into, 1 << 20)
        return compressed_path


def _volume_metadata(header: Any, kept_axes: list[int], axes: str, default_axes: str) -> dict[str, Any]:
    """Return the metadata of a volume: voxel sizes and units by axis; the value of every other entry is the header."""
    zooms, unit_code = header.get_zooms(), int(header["xyzt_units"])
    names = {number: unit for unit, number in _UNIT_CODES.items()}
    space, time = names.get(unit_code % _FIRST_TIME_UNIT_CODE), names.get(unit_code - unit_code % _FIRST_TIME_UNIT_CODE)
    units = {
        axis: time if name == "T" else space for axis, name in zip(axes, default_axes, strict=False) if name in "XYZT"
    }
    metadata: dict[str, Any] = {
        "scale": {axis: float(zooms[at]) for axis, at in zip(axes, kept_axes, strict=False) if at < len(zooms)},
        "units": {axis: unit for axis, unit in units.items() if unit},
    }
    if header["qform_code"] or header["sform_code"]:
        name = "affine" if axes == default_axes else f"affine of {default_axes}"  # for renamed axes, it is not copied
        metadata[name] = header
    for name, fields in (_TIMING_FIELDS | _OTHER_METADATA_FIELDS).items():
        if any(header[one].tobytes().strip(b"\0") for one in fields):
            metadata[name] = header
    return metadata | ({"extensions": header} if len(header.extensions) else {})
