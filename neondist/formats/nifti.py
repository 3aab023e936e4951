"""NIfTI volumes, by nibabel: the affine that says where they lie is kept."""

from __future__ import annotations

import gzip
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
from .placed import PlacedSink, Placement

_AXES = "XYZTC"  # as nibabel has them, the first fastest
_MOST_PACKED = 1032  # deflate cannot pack more bytes into one


class NIfTISource(TileSource):
    """A volume (X, Y, Z), a series of them, or one with several numbers a voxel; scaled where the file says how.

    Of a .nii.gz each read unpacks all that lies before: unpack files that are read often.
    """

    def __init__(self, path: Path, inside: str, level: int, axes: str | None) -> None:
        import nibabel

        with faults(path), nibabel.imageglobals.LoggingOutputSuppressor():  # it prints what it notes about odd files
            check_regular(path)
            found: Any = nibabel.load(path, mmap=False)  # a file that becomes shorter would end the process
            proxy = found.dataobj
            shape, stored = tuple(map(int, proxy.shape)), proxy.dtype
            kept = [axis for axis, n in enumerate(shape) if axis < 2 or n > 1]
            if not shape or max(kept) >= len(_AXES):
                raise DataError(f"{path}: has an array of shape {list(shape)}; give one of up to 5 axes")
            size, needed = path.stat().st_size, prod(shape) * stored.itemsize
            if needed > (size - proxy.offset if path.suffix == ".nii" else _MOST_PACKED * size):
                raise DataError(
                    f"{path}: promises {list(shape)} voxels, more than the file holds; put back a good copy"
                )
            self._proxy, self._kept = proxy, kept
            scaled = (proxy.slope, proxy.inter) != (1, 0)
            self._as = np.dtype(np.float64) if scaled else stored
            super().__init__(
                path,
                axes or "".join(_AXES[axis] for axis in kept),
                [shape[axis] for axis in kept],
                self._as,
                metadata={"affine": found.affine, "header": found.header},
            )

    def _read(self, cells: Cells) -> np.ndarray:
        index: list[Any] = [0] * len(self._proxy.shape)
        for axis, cut in zip(self._kept, cells, strict=True):
            index[axis] = cut
        return np.asarray(self._proxy[tuple(index)], self._as)


class NIfTISink(PlacedSink):
    """A new NIfTI file, with the affine of the volume that it belongs to; a .nii.gz is packed at the end, by rank 0."""

    def _lay(self, part: Path, like: TileSource | None) -> Placement:
        import nibabel

        extents = {name: n for name, n in zip(self.axes, self.shape, strict=True) if name != "C" or n > 1}
        if "N" in extents and "T" not in extents:
            extents["T"] = extents.pop("N")
        if not {"Y", "X"} <= set(extents) <= set(_AXES):
            raise ConfigError(f"{self.path}: NIfTI files have axes of {_AXES}, not '{self.axes}'; choose another kind")
        full = [extents.get(name, 1) for name in _AXES]
        while len(full) > 3 and full[-1] == 1:
            full.pop()
        header = (nibabel.Nifti1Header if max(full) < 1 << 15 else nibabel.Nifti2Header)()
        try:
            header.set_data_dtype(self.dtype)
        except nibabel.spatialimages.HeaderDataError:
            raise ConfigError(f"{self.path}: NIfTI files cannot hold {self.dtype}; choose another dtype") from None
        header.set_data_shape(full)
        given = {} if like is None else like.metadata
        if "affine" in given:
            header.set_xyzt_units(*given["header"].get_xyzt_units())
            header.set_qform(given["affine"], int(given["header"]["qform_code"]))
            header.set_sform(given["affine"], int(given["header"]["sform_code"]))
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

    def _finished(self) -> Path:
        if self.path.suffix.lower() != ".gz":
            return self._part
        packed = self._part.with_name(self._part.name + ".packed")
        with open_regular(self._part) as plain, replacing(packed) as file, gzip.GzipFile("", "wb", 6, file, 0) as into:
            shutil.copyfileobj(plain, into, 1 << 20)
        return packed
