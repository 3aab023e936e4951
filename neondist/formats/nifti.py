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
from ..io.files import replacing
from ..io.regular_file import check_regular, open_regular
from .axes import Cells
from .base import TileSource, faults
from .draft import PACKED
from .ome import base_unit, is_extent
from .placed import PlacedSink, Placement

_AXES = "XYZTC"  # in nibabel's order, the first one fastest
_UNITS = {
    "meter": 1, "millimeter": 2, "micrometer": 3, "second": 8, "millisecond": 16, "microsecond": 24, "hertz": 32,
    "ppm": 40, "radian": 48,
}  # fmt: skip
_TIME = 8  # code of the first time unit
_FACTORS = {"micrometer": 1e-6, "second": 1.0}
_AFFINE = (
    "qform_code", "sform_code", "quatern_b", "quatern_c", "quatern_d", "qoffset_x", "qoffset_y", "qoffset_z",
    "srow_x", "srow_y", "srow_z", "xyzt_units",
)  # fmt: skip
_TIMES = {
    "time offset": ("toffset",),
    "slice timing": ("dim_info", "slice_start", "slice_end", "slice_code", "slice_duration"),
}
_OTHERS = {
    "intent": ("intent_code", "intent_name", "intent_p1", "intent_p2", "intent_p3"),
    "display range": ("cal_min", "cal_max"),
    "description": ("descrip", "aux_file"),
}
"""metadata names, and the header fields of each"""
_SILENT = logging.NullHandler()
_MAX_RATIO = 1032  # maximal compression ratio of deflate


class NIfTISource(TileSource):
    """Volume (X, Y, Z), time series, or volume with several values per voxel; values are scaled as the header declares.

    Each read of a .nii.gz decompresses everything before it: decompress files that are read often.
    """

    def __init__(self, path: Path, inside: str, level: int, axes: str | None) -> None:
        import nibabel

        with faults(path), nibabel.imageglobals.LoggingOutputSuppressor():  # it prints warnings about unusual files
            nibabel.imageglobals.logger.addHandler(_SILENT)  # otherwise Python prints them
            check_regular(path)
            image: Any = nibabel.load(path, mmap=False)  # truncating a mapped file would kill the process
            proxy = image.dataobj
            shape, stored = tuple(map(int, proxy.shape)), proxy.dtype
            kept = [axis for axis, n in enumerate(shape) if axis < 2 or n != 1]
            if not shape or max(kept) >= len(_AXES):
                raise DataError(f"{path}: has an array of shape {list(shape)}; give one of up to 5 axes")
            size, needed = path.stat().st_size, prod(shape) * stored.itemsize
            if needed > (size - proxy.offset if path.suffix == ".nii" else _MAX_RATIO * size):
                raise DataError(f"{path}: is truncated: its header specifies {list(shape)} voxels; restore the file")
            self._proxy, self._stored_axes = proxy, kept
            scaled = (proxy.slope, proxy.inter) != (1, 0)
            self._dtype = np.dtype(np.float64) if scaled else stored
            usual = "".join(_AXES[axis] for axis in kept)
            facts = _facts(image.header, kept, axes or usual, usual)
            super().__init__(path, axes or usual, [shape[axis] for axis in kept], self._dtype, metadata=facts)

    def _read(self, cells: Cells) -> np.ndarray:
        index: list[Any] = [0] * len(self._proxy.shape)
        for axis, cut in zip(self._stored_axes, cells, strict=True):
            index[axis] = cut
        return np.asarray(self._proxy[tuple(index)], self._dtype)


class NIfTISink(PlacedSink):
    """New NIfTI file with the affine of the `like` volume; a .nii.gz is compressed at the end, by rank 0."""

    def _lay_out(self, part: Path, like: TileSource | None) -> Placement:
        import nibabel

        extents = {name: n for name, n in zip(self.axes, self.shape, strict=True) if name != "C" or n > 1}
        if "N" in extents and "T" not in extents:
            extents["T"] = extents.pop("N")
        if not {"Y", "X"} <= set(extents) <= set(_AXES):
            raise ConfigError(
                f"{self.path}: NIfTI files have axes of {_AXES}, not '{self.axes}'; choose another format"
            )
        full = [extents.get(name, 1) for name in _AXES]
        while len(full) > 3 and full[-1] == 1:
            full.pop()
        header = (nibabel.Nifti1Header if max(full) < 1 << 15 else nibabel.Nifti2Header)()
        try:
            header.set_data_dtype(self.dtype)
        except nibabel.spatialimages.HeaderDataError:
            raise ConfigError(f"{self.path}: NIfTI files cannot store {self.dtype}; choose another dtype") from None
        header.set_data_shape(full)
        self._calibrate(header, like, [name for name in _AXES if name in extents and name in self.axes])
        start = -(-(int(header["sizeof_hdr"]) + 4) // 16) * 16
        header.set_data_offset(start)
        header.set_slope_inter(1, 0)
        with open(part, "xb") as file:
            header.write_to(file)
        names = "".join(name for name in reversed(_AXES) if name in extents)
        shape = tuple(extents[name] for name in names)
        self.chunks = None
        axes = names.replace("T", "N") if "N" in self.axes else names
        return Placement(axes, self.dtype.str, shape, shape, (start,))

    def _calibrate(self, header: Any, like: TileSource | None, axes: list[str]) -> None:
        """Write metadata of the `like` image into a header: voxel sizes, units, affine, times."""
        units, sizes = ({} if like is None else like.metadata.get(name, {}) for name in ("units", "scale"))
        for candidates, base, standard in (("XYZ", "m", "micrometer"), ("T", "s", "second")):
            chosen = "".join(axis for axis in candidates if axis in axes and is_extent(axis, sizes.get(axis, 1.0)))
            scale, named = self._copy_metadata(like, "scale", chosen), {units.get(axis, "") for axis in chosen}
            measures = {axis: base_unit(units.get(axis, "")) or ("", 1.0) for axis in chosen}
            unit = named.pop() if len(named) == 1 else ""
            if unit not in _UNITS or (_UNITS[unit] < _TIME) != (base == "m"):
                unit = ""
                if chosen and len(scale) == len(chosen) and {kind for kind, _ in measures.values()} == {base}:
                    unit = standard  # for several units, or one that NIfTI does not have
                    scale = {axis: n * measures[axis][1] / _FACTORS[unit] for axis, n in scale.items()}
            if unit:
                self._copy_metadata(like, "units", chosen)
                header["xyzt_units"] += _UNITS[unit]
            for axis, n in scale.items():
                header["pixdim"][1 + _AXES.index(axis)] = n
        source = self._copy_metadata(like, "affine")
        if source is not None:
            header["pixdim"][:4] = source["pixdim"][:4]
        for names, origin in ((_AFFINE, source), *((_TIMES[name], self._copy_metadata(like, name)) for name in _TIMES)):
            for name in names if origin is not None else ():
                header[name] = origin[name]

    def _complete_file(self) -> Path:
        if self.path.suffix.lower() != ".gz":
            return self._part
        packed = self._part.with_name(self._part.name + PACKED)
        with open_regular(self._part) as plain, replacing(packed) as file, gzip.GzipFile("", "wb", 6, file, 0) as into:
            shutil.copyfileobj(plain, into, 1 << 20)
        return packed


def _facts(header: Any, kept: list[int], axes: str, usual: str) -> dict[str, Any]:
    """Return the metadata of a volume: voxel sizes and units by axis, and the header for other metadata."""
    zooms, code = header.get_zooms(), int(header["xyzt_units"])
    names = {number: unit for unit, number in _UNITS.items()}
    space, time = names.get(code % _TIME), names.get(code - code % _TIME)
    units = {axis: time if name == "T" else space for axis, name in zip(axes, usual, strict=False) if name in "XYZT"}
    facts: dict[str, Any] = {
        "scale": {axis: float(zooms[at]) for axis, at in zip(axes, kept, strict=False) if at < len(zooms)},
        "units": {axis: unit for axis, unit in units.items() if unit},
    }
    if header["qform_code"] or header["sform_code"]:
        facts["affine" if axes == usual else f"affine of {usual}"] = header  # under another name if axes are renamed
    for name, fields in (_TIMES | _OTHERS).items():
        if any(header[one].tobytes().strip(b"\0") for one in fields):
            facts[name] = header
    return facts | ({"extensions": header} if len(header.extensions) else {})
