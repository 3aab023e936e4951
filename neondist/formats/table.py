"""Table of file formats, built-in or from installed plugins, and of the classes that read and write them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ..arrays.precision import parse_dtype
from ..comm import ProcessGrid
from ..errors import ConfigError, DataError, MissingPackageError, OutputError
from ..registry.arguments import type_checked
from ..version import find_module_spec
from .axes import AXIS_ORDER, Axes
from .base import MAX_CHUNK_BYTES, TileSink, TileSource
from .channel_stack import ChannelStack, split_stack_name

PLUGIN_GROUP = "neondist.formats"  # group of entry points, each of which is a Format


@dataclass(frozen=True)
class Format:
    """File format, with its reader and writer.

    Attributes
    ----------
    name : display name
    suffixes : suffixes of its files, in lower case, with the dot
    source, sink : callable, or 'MODULE:NAME' that is imported on demand, or None
        source(path, name, level, axes) returns a TileSource; `name` is the name of the array in the file ('' if not
        given), and `axes` are its stored axes (None if not given). sink(path, shape, dtype, axes, chunks) returns a
        TileSink, such as a subclass of `DraftSink`; its keyword arguments are like, overwrite, resume, grid and the
        options of the format.
    package : required library, or ''
    """

    name: str
    suffixes: tuple[str, ...]
    source: str | Callable[..., TileSource] | None = None
    sink: str | Callable[..., TileSink] | None = None
    package: str = ""

    def import_factory(self, role: str, path: Path) -> Callable[..., Any]:
        """Return the factory of a 'source' or a 'sink'; ConfigError or MissingPackageError if it is not available."""
        factory = self.source if role == "source" else self.sink
        if factory is None:
            verb = "read" if role == "source" else "written"
            raise ConfigError(f"{path}: {self.name} cannot be {verb}; choose {_describe_formats(role)}")
        if not _is_installed(self):
            raise MissingPackageError(f"{path}: {self.name} needs {self.package}: pip install 'neondist[files]'")
        if callable(factory):
            return factory
        module, _, name = factory.partition(":")
        imported_factory: Callable[..., Any] = getattr(import_module(module), name)
        return imported_factory


def _create_built_in_format(
    name: str, suffixes: str, module: str, class_prefix: str, writable: bool = True, package: str = ""
) -> Format:
    location = f"{__package__}.{module}:{class_prefix}"
    return Format(name, tuple(suffixes.split()), location + "Source", location + "Sink" if writable else None, package)


_PICTURE_SUFFIXES = ".png .jpg .jpeg .bmp .pgm .ppm .gif .webp .tif .tiff"  # .tif, .tiff: if tifffile is not installed
_FOLDER_FORMAT = _create_built_in_format("a folder of images", "", "pictures", "Folder", writable=False)
BUILT_IN_FORMATS = (
    _create_built_in_format("HDF5", ".h5 .hdf5", "hdf5", "HDF5"),
    _create_built_in_format("NetCDF-4", ".nc .nc4", "netcdf", "NetCDF"),
    _create_built_in_format("NIfTI", ".nii .nii.gz", "nifti", "NIfTI", package="nibabel"),
    _create_built_in_format("NPY", ".npy", "npy", "NPY"),
    _create_built_in_format("TIFF", ".tif .tiff .svs .ndpi .scn .btf", "tiff", "TIFF", package="tifffile"),
    _create_built_in_format("PNG, JPEG", _PICTURE_SUFFIXES, "pictures", "Picture", package="PIL"),
    _create_built_in_format("Zarr", ".zarr", "zarr_files", "Zarr", package="zarr"),
)


def open_source(path: str | Path, *, level: int | None = None, axes: str | None = None) -> TileSource:
    """Open an array in a file for reading boxes; only metadata is read.

    Parameters
    ----------
    path : path
        A file of a known type, or a folder of images. 'FILE:NAME' selects an array in a file, 'PATH#2' the third
        resolution level; 'FILE,FILE' stacks the channels of files of the same extents.
    level : int, optional
        Resolution level; 0 (default) is the finest.
    axes : str, optional
        A letter for each stored axis, such as 'ZYX' or 'CYX', if the axes in the file are missing or incorrect.

    Raises
    ------
    DataError
        If the file is missing, damaged or of an unknown type, or has no such array or level.
    ConfigError, MissingPackageError
        If the format cannot be read, `axes` do not fit the array, or a library is not installed.

    Examples
    --------
    >>> with nd.open_source("slide.svs#1") as source:
    ...     tile = source.read([(0, 512), (512, 1024), (0, 3)])
    """
    name = str(path)
    if len(files := split_stack_name(name)) > 1:
        with ExitStack() as opened:
            stack = ChannelStack([opened.enter_context(open_source(file, level=level, axes=axes)) for file in files])
            opened.pop_all()
        return stack
    if level is None and not os.path.exists(name) and (match := re.fullmatch(r"(.+)#(\d+)", name)):
        name, level = match[1], int(match[2])
    file, array_name = _split_array_name(name)
    file_format = _format_by_suffix(file) or _format_of_folder(file)
    if file_format is None:
        problem = f"unknown file type; choose from {_describe_formats('source')}"
        if not os.path.exists(file):
            problem = "no such file"
        elif name.lower().endswith(".dcm"):
            problem = "DICOM files cannot be read; convert the series to NIfTI, for example with dcm2niix"
        raise DataError(f"{name}: {problem}")
    if not os.path.exists(file):  # unlike Path.exists, it does not raise for names that are too long
        raise DataError(f"{name}: no such file; check the path")
    source: TileSource = file_format.import_factory("source", file)(file, array_name, level or 0, axes)
    if not 0 <= (level or 0) < source.levels:
        source.close()
        raise DataError(f"{name}: has no level {level}; its levels are 0 to {source.levels - 1}")
    return source


@type_checked
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
    """Create a file whose type is given by its suffix, and return its sink. Collective over `grid`, if given.

    Parameters
    ----------
    path : path
    shape : tuple of int
        Global shape of the array, channels last.
    dtype : dtype
    axes : str
        A letter for each axis of `shape`, in the order N T Z Y X C, such as 'YXC'.
    chunks : tuple of int, optional
        Chunk shape of the file. Default: a shape that suits the format. Writing is most efficient if ranks write whole
        chunks.
    like : TileSource, optional
        An image whose georeference, affine or scale is copied.
    overwrite : bool
        Replace an existing file once the new one is complete.
    resume : bool
        Continue the uncommitted file of an earlier process, if any (`resumed` is then True); its shape, dtype, axes,
        chunks and options must match. Keep the file if this sink is closed without `commit`.
    grid : ProcessGrid, optional
        Grid whose ranks all write. Default: this process only.
    **options
        Options of the format.

    Raises
    ------
    OutputError
        On every rank, if the file exists or cannot be created, or there is not enough disk space.
    ConfigError
        If the file type is unknown, or cannot store such an array.
    MissingPackageError
        If a library is not installed.
    """
    path, file_format = Path(path), _format_by_suffix(Path(path))
    if file_format is None:
        raise ConfigError(f"{path}: unknown file type; choose from {_describe_formats('sink')}")
    create = file_format.import_factory("sink", path)
    extents, dtype = tuple(map(int, shape)), parse_dtype("create_sink: dtype", dtype)
    is_ordered = axes.endswith("C") and Axes(axes).channels_last_letters == axes
    if len(axes) != len(extents) or not is_ordered or min(extents) < 1:
        raise ConfigError(
            f"{path}: axes '{axes}' do not fit shape {list(extents)}; give one letter per axis, in order {AXIS_ORDER},"
            " ending with C"
        )
    if dtype.kind not in "fiub" or dtype.itemsize > 8:
        raise ConfigError(f"{path}: {dtype} is not numeric, or has more than 8 bytes; choose another dtype")
    if chunks is not None:
        if len(chunks) != len(extents) or min(chunks) < 1:
            raise ConfigError(f"{path}: chunks {[*chunks]} do not fit shape {[*extents]}; give one extent > 0 per axis")
        chunks = tuple(min(int(c), n) for c, n in zip(chunks, extents, strict=True))
        if np.prod(chunks, dtype=object) * dtype.itemsize > MAX_CHUNK_BYTES:
            raise ConfigError(f"{path}: chunks {list(chunks)} are larger than 1 GiB; give smaller chunks")
    if path.exists() and not overwrite:
        raise OutputError(f"{path}: already exists; choose another name, or overwrite it (--overwrite)")
    if like is not None:
        new_extents, like_extents = (
            {name: n for name, n in zip(letters, sizes, strict=True) if name in "ZYX"}
            for letters, sizes in ((axes, extents), (like.axes, like.shape))
        )
        if new_extents != like_extents:
            raise ConfigError(
                f"{path}: extents {new_extents} differ from {like_extents} of {like.path}, whose physical position"
                " would be wrong for this file; give like=None"
            )
    sink: TileSink = create(
        path, extents, dtype, axes, chunks, like=like, overwrite=overwrite, resume=resume, grid=grid, **options
    )
    return sink


def iter_formats() -> Iterator[Format]:
    """Yield all formats, built-in formats first."""
    yield from BUILT_IN_FORMATS
    from importlib.metadata import entry_points  # slow to import

    for point in entry_points(group=PLUGIN_GROUP):
        plugin = point.load()
        if not isinstance(plugin, Format):
            raise ConfigError(
                f"entry point {point.value} of {PLUGIN_GROUP} is not a neondist.formats.Format; correct the plugin"
            )
        yield plugin


def has_known_suffix(path: Path) -> bool:
    """Return whether the suffix belongs to a format."""
    return _format_by_suffix(path) is not None


def _format_by_suffix(path: Path) -> Format | None:
    """Return the format with the longest matching suffix, preferably one whose library is installed.

    Built-in formats take precedence over plugins.
    """
    name = path.name.lower()
    for formats in (BUILT_IN_FORMATS, iter_formats()):
        candidates = [
            (len(suffix), _is_installed(file_format), file_format)
            for file_format in formats
            for suffix in file_format.suffixes
            if name.endswith(suffix)
        ]
        if candidates:
            return max(candidates, key=lambda match: match[:2])[2]
    return None


def _format_of_folder(path: Path) -> Format | None:
    """Return the format of a folder by its content: a Zarr group or array, or images."""
    is_zarr = any(os.path.isfile(path / name) for name in ("zarr.json", ".zarray", ".zgroup"))
    if is_zarr:
        return next(file_format for file_format in BUILT_IN_FORMATS if file_format.name == "Zarr")
    return _FOLDER_FORMAT if os.path.isdir(path) else None


def _split_array_name(name: str) -> tuple[Path, str]:
    """Split 'FILE:NAME' into the file and the name of the array in it."""
    file, colon, array_name = name.rpartition(":")
    if colon and not os.path.exists(name) and _format_by_suffix(Path(file)) is not None:
        return Path(os.path.expanduser(file)), array_name
    return Path(os.path.expanduser(name)), ""


def _is_installed(file_format: Format) -> bool:
    return not file_format.package or find_module_spec(file_format.package) is not None


def _describe_formats(role: str) -> str:
    formats = [file_format for file_format in iter_formats() if getattr(file_format, role) is not None]
    packages = sorted({file_format.package for file_format in formats if not _is_installed(file_format)})
    listed = ", ".join(f"{file_format.name} ({' '.join(file_format.suffixes)})" for file_format in formats)
    return listed + (f"; {', '.join(packages)} not installed: pip install 'neondist[files]'" if packages else "")
