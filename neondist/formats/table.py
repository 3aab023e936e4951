"""Table of the classes that read and write files: built-in ones, and those of installed plugins."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ..comm import ProcessGrid
from ..errors import ConfigError, DataError, MissingPackageError, OutputError
from .axes import ORDER, Axes
from .base import LARGEST_CHUNK, TileSink, TileSource

PLUGINS = "neondist.formats"
"""the group of entry points, each of which is a Format"""


@dataclass(frozen=True)
class Format:
    """One kind of file, and what reads and writes it.

    Attributes
    ----------
    name : as people call it
    suffixes : of its files, lower case, with the dot
    source, sink : callable, or 'MODULE:NAME' that is imported when it is needed, or None
        source(path, inside, level, axes) returns a TileSource; `inside` names the array in the file, '' if not given,
        and `axes` are its axes as they lie in the file, None if not given. sink(path, shape, dtype, axes, chunks)
        returns a TileSink; like, overwrite, resume, grid and options of the format come by name.
    package : the library it needs, or ''
    """

    name: str
    suffixes: tuple[str, ...]
    source: str | Callable[..., TileSource] | None = None
    sink: str | Callable[..., TileSink] | None = None
    package: str = ""

    def load(self, what: str, path: Path) -> Callable[..., Any]:
        """Return what makes a 'source' or a 'sink'; MissingPackageError says what to install."""
        found = self.source if what == "source" else self.sink
        if found is None:
            verb = "read" if what == "source" else "written"
            raise ConfigError(f"{path}: {self.name} cannot be {verb} here; choose {_choices(what)}")
        if not _is_there(self):
            raise MissingPackageError(f"{path}: {self.name} needs {self.package}: pip install 'neondist[files]'")
        if callable(found):
            return found
        module, _, name = found.partition(":")
        maker: Callable[..., Any] = getattr(import_module(module), name)
        return maker


def _built_in(name: str, suffixes: str, module: str, kind: str, sink: bool = True, package: str = "") -> Format:
    place = f"{__package__}.{module}:{kind}"
    return Format(name, tuple(suffixes.split()), place + "Source", place + "Sink" if sink else None, package)


_PICTURES = ".png .jpg .jpeg .bmp .pgm .ppm .gif .webp .tif .tiff"  # the last two where there is no tifffile
_FOLDER = _built_in("a folder of images", "", "pictures", "Folder", sink=False)
FORMATS = (
    _built_in("HDF5", ".h5 .hdf5", "hdf5", "HDF5"),
    _built_in("NetCDF-4", ".nc .nc4", "netcdf", "NetCDF"),
    _built_in("NIfTI", ".nii .nii.gz", "nifti", "NIfTI", package="nibabel"),
    _built_in("NPY", ".npy", "npy", "NPY"),
    _built_in("TIFF", ".tif .tiff .svs .ndpi .scn .btf", "tiff", "TIFF", package="tifffile"),
    _built_in(
        "PNG, JPEG", ".png .jpg .jpeg .bmp .pgm .ppm .gif .webp .tif .tiff", "pictures", "Picture", package="PIL"
    ),
    _built_in("Zarr", ".zarr", "zarr_files", "Zarr", package="zarr"),
)


def open_source(path: str | Path, *, level: int | None = None, axes: str | None = None) -> TileSource:
    """Open an array in a file for reading boxes; only metadata is read.

    Parameters
    ----------
    path : path
        A file of a known type, or a folder of images. 'FILE:NAME' is an array in a file, 'PATH#2' its third resolution
        level.
    level : int, optional
        Resolution level; 0 (default) is the finest.
    axes : str, optional
        A letter for each stored axis, such as 'ZYX' or 'CYX', if the file does not specify them, or not correctly.

    Raises
    ------
    DataError
        If the file is missing, damaged or of an unknown type, or has no such array or level.
    MissingPackageError
        If a library is not installed.

    Examples
    --------
    >>> with nd.open_source("slide.svs#1") as source:
    ...     tile = source.read([(0, 512), (512, 1024), (0, 3)])
    """
    text = str(path)
    if level is None and not os.path.exists(text) and (found := re.fullmatch(r"(.+)#(\d+)", text)):
        text, level = found[1], int(found[2])
    file, inside = _parts(text)
    kind = _find(file) or _by_content(file)
    if kind is None:
        what = f"unknown file type; choose from {_choices('source')}" if os.path.exists(file) else "no such file"
        raise DataError(f"{text}: {what}")
    if not os.path.exists(file):  # and not Path.exists, which raises where a name is too long
        raise DataError(f"{text}: no such file; check the path")
    source: TileSource = kind.load("source", file)(file, inside, level or 0, axes)
    if not 0 <= (level or 0) < source.levels:
        source.close()
        raise DataError(f"{text}: has no level {level}; its levels are 0 to {source.levels - 1}")
    return source


def create_sink(
    path: str | Path,
    shape: Sequence[int],
    dtype: Any,
    axes: str,
    chunks: Sequence[int] | None = None,
    like: TileSource | None = None,
    *,
    overwrite: bool = False,
    resume: bool = False,
    grid: ProcessGrid | None = None,
    **options: Any,
) -> TileSink:
    """Create a file whose type is given by its suffix, and return its sink; collective over `grid`, if given.

    Parameters
    ----------
    path : path
    shape : tuple of int
        Global shape of the array, channels last.
    dtype : dtype
    axes : str
        A letter for each axis of `shape`, in the order N T Z Y X C, such as 'YXC'.
    chunks : tuple of int, optional
        Chunk shape of the file; default: suitable for the format. Writing is most efficient if ranks write whole
        chunks.
    like : TileSource, optional
        An image whose georeference, affine or scale is copied.
    overwrite : bool
        Replace an existing file once the new one is complete.
    resume : bool
        Resume an uncommitted file of an earlier process with the same description, as reported by `resumed`, and keep
        the file if this sink is closed without `commit`.
    grid : ProcessGrid, optional
        Grid whose ranks all write. Default: this process only.
    **options
        Options of the format.

    Raises
    ------
    OutputError
        On every rank: if the file exists, cannot be created, or there is not enough disk space.
    ConfigError
        If the file type is unknown, or cannot store such an array.
    MissingPackageError
        If a library is not installed.
    """
    path, kind = Path(path), _find(Path(path))
    if kind is None:
        raise ConfigError(f"{path}: unknown file type; choose from {_choices('sink')}")
    make = kind.load("sink", path)
    extents, dtype = tuple(map(int, shape)), np.dtype(dtype)
    if len(axes) != len(extents) or not axes.endswith("C") or Axes(axes).names != axes or min(extents) < 1:
        raise ConfigError(f"{path}: axes '{axes}' of shape {list(extents)}; name each in the order {ORDER}, C the last")
    if dtype.kind not in "fiub":
        raise ConfigError(f"{path}: {dtype} is not numeric; choose another dtype")
    if chunks is not None:
        if len(chunks) != len(extents) or min(chunks) < 1:
            raise ConfigError(f"{path}: chunks {list(chunks)} for shape {list(extents)}; give one number per axis")
        chunks = tuple(min(int(c), n) for c, n in zip(chunks, extents, strict=True))
        if np.prod(chunks, dtype=object) * dtype.itemsize > LARGEST_CHUNK:
            raise ConfigError(f"{path}: chunks {list(chunks)} are larger than 1 GiB; give smaller ones")
    if path.exists() and not overwrite:
        raise OutputError(f"{path}: exists already; choose another name, or overwrite it (--overwrite)")
    if like is not None:
        given, wanted = (
            {name: n for name, n in zip(of, on, strict=True) if name in "ZYX"}
            for of, on in ((axes, extents), (like.axes, like.shape))
        )
        if given != wanted:
            raise ConfigError(
                f"{path}: its extents {given} differ from {wanted}, those of {like.path}: its physical position"
                " would be wrong; give like=None"
            )
    sink: TileSink = make(
        path, extents, dtype, axes, chunks, like=like, overwrite=overwrite, resume=resume, grid=grid, **options
    )
    return sink


def formats() -> Iterator[Format]:
    """Yield all formats, the built-in ones first."""
    yield from FORMATS
    from importlib.metadata import entry_points  # slow to import, and `import neondist` is not to wait for it

    for point in entry_points(group=PLUGINS):
        found = point.load()
        if not isinstance(found, Format):
            raise ConfigError(
                f"entry point {point.value} of {PLUGINS} is not a neondist.formats.Format; correct the plugin"
            )
        yield found


def known(path: Path) -> bool:
    """Return whether the name is one of a format's files."""
    return _find(path) is not None


def _find(path: Path) -> Format | None:
    """Return the format with the longest suffix that the name ends with, one whose library is there before others.

    Plugins come after what is built in.
    """
    name = path.name.lower()
    for kinds in (FORMATS, formats()):
        fits = [
            (len(suffix), _is_there(kind), kind) for kind in kinds for suffix in kind.suffixes if name.endswith(suffix)
        ]
        if fits:
            return max(fits, key=lambda found: found[:2])[2]
    return None


def _by_content(path: Path) -> Format | None:
    """Return the format of a folder, whose name tells nothing: inside of a Zarr folder, or with images."""
    inside_zarr = any(os.path.isfile(path / name) for name in ("zarr.json", ".zarray", ".zgroup"))
    if inside_zarr:
        return next(kind for kind in FORMATS if kind.name == "Zarr")
    return _FOLDER if os.path.isdir(path) else None


def _parts(text: str) -> tuple[Path, str]:
    """Return the file and the name of the array in it, of 'FILE:NAME'."""
    file, colon, inside = text.rpartition(":")
    if colon and not os.path.exists(text) and _find(Path(file)) is not None:
        return Path(file).expanduser(), inside
    return Path(text).expanduser(), ""


def _is_there(kind: Format) -> bool:
    return not kind.package or find_spec(kind.package) is not None


def _choices(what: str) -> str:
    kinds = [kind for kind in formats() if getattr(kind, what) is not None]
    missing = sorted({kind.package for kind in kinds if not _is_there(kind)})
    listed = ", ".join(f"{kind.name} ({' '.join(kind.suffixes)})" for kind in kinds)
    return listed + (f"; {', '.join(missing)} not installed: pip install 'neondist[files]'" if missing else "")
