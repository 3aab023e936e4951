"""Cache of this rank's part of a data set in an HDF5 file, rebuilt whenever it may be out of date.

A cache is used if its fingerprint (sources, tile, grid, format) and its checksums match, and rebuilt otherwise. It is
written under a temporary name and renamed, so that a partial file is never visible.
"""

from __future__ import annotations

import json
import os
import re
import stat
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from string import Formatter
from typing import BinaryIO

import numpy as np

from ..comm import ProcessGrid
from ..errors import ConfigError, DataError
from ..io import hdf5
from ..io.regular_file import open_regular
from .base import Dataset, Split, tile_slices
from .datasets.idx import READ_PIECE_BYTES

FORMAT_VERSION = 3
ArraysByName = dict[str, np.ndarray]


class CachedDataset(Dataset):
    """Base class of data sets of small images that each rank decodes once into in-memory tiles and caches in a file.

    A subclass implements `source_files`, the files of the images, and `decode`.
    """

    target_shape = ()
    mean: float | tuple[float, ...]
    std: float | tuple[float, ...]

    def __init__(self, serialized_path: str | os.PathLike[str] | None, validation: float | int | None) -> None:
        super().__init__(validation=validation)
        if serialized_path is not None:
            check_path_template(serialized_path)
        self.serialized_path = serialized_path

    @abstractmethod
    def source_files(self) -> list[Path]:
        """Return the files that the images and targets are read from."""

    @abstractmethod
    def decode(self, tile: tuple[slice, ...]) -> ArraysByName:
        """Return a tile of images (N, h, w, C) and targets (N,) of 'train' and 'test', and their hash, 'content'."""

    def open_splits(self, grid: ProcessGrid) -> tuple[Split, Split]:
        """Return the splits with this rank's tile, from the cache if it is valid."""
        build = partial(self.decode, tile_slices(grid, self.sample_shape))
        if self.serialized_path is None:
            arrays = build()
        else:
            fingerprint = cache_fingerprint(type(self).__name__, self.source_files(), grid, self.sample_shape[:-1])
            arrays = load_or_build(resolve_cache_path(self.serialized_path, grid), fingerprint, build)
        self.content_hash = arrays["content"].tobytes().hex()
        train, test = (
            Split(arrays[f"{name}/images"], arrays[f"{name}/targets"], self.mean, self.std)
            for name in ("train", "test")
        )
        return train, test


def cache_fingerprint(name: str, sources: Iterable[Path], grid: ProcessGrid, extent: tuple[int, ...]) -> str:
    """Return the properties that the cached tile depends on, as text; reads the sources once for their checksums."""
    box = grid.tile_box(extent)
    properties = {
        "format": FORMAT_VERSION,
        "data set": name,
        "sources": [_fingerprint_source(path) for path in sources],
        "extent": extent,
        "tile": [box.lo, box.hi],
        "ranks": grid.size,
    }
    return json.dumps(properties, sort_keys=True)


def load_or_build(path: Path, fingerprint: str, build: Callable[[], ArraysByName]) -> ArraysByName:
    """Return the arrays cached in `path` with this fingerprint; otherwise call `build` and cache its result.

    Raises
    ------
    DataError
        If the file cannot be written, is not a regular file, or belongs to another user.
    """
    with suppress(OSError):  # the file is missing, or writing it reports the error
        _require_own_file(path, os.stat(path))
    arrays = read_cache(path, fingerprint)
    if arrays is None:
        arrays = build()
        write_cache(path, fingerprint, arrays)
    return arrays


def _require_own_file(path: Path, status: os.stat_result) -> None:
    """Raise DataError for a file of another user, who could forge its fingerprint."""
    if stat.S_ISDIR(status.st_mode):
        return
    if not stat.S_ISREG(status.st_mode):  # a pipe would block, and a device would be replaced
        raise DataError(
            f"serialized_path: {path} exists but is not a regular file, so it is not used; choose another path"
        )
    if os.name == "posix" and status.st_uid not in (os.geteuid(), 0):
        raise DataError(
            f"serialized_path: {path} belongs to another user (uid {status.st_uid}), so it is not used; choose a"
            " folder of your own, for instance ~/.cache/neondist"
        )


def read_cache(path: Path, fingerprint: str) -> ArraysByName | None:
    """Return the arrays in `path`; None if it is missing, damaged, outdated, or writable by other users."""
    try:
        cache_file = open_regular(path)
    except OSError:
        return None
    with cache_file:
        _require_own_file(path, os.fstat(cache_file.fileno()))  # the file may have been replaced since the first check
        with suppress(Exception):  # HDF5 may raise nearly any error for a damaged file; the cache is rebuilt
            return _read_verified(cache_file, fingerprint)
    return None


def _read_verified(cache_file: BinaryIO, fingerprint: str) -> ArraysByName | None:
    import h5py

    is_shared = os.fstat(cache_file.fileno()).st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    with h5py.File(cache_file, "r") as file:
        if is_shared or hdf5.get_text_attribute(file.attrs, "stamp") != fingerprint:
            return None
        expected_checksums: dict[str, str] = json.loads(hdf5.get_text_attribute(file.attrs, "checksums"))
        hdf5_objects = {name: hdf5.find_object(file, name) for name in expected_checksums}
        arrays = {name: np.asarray(array[()]) for name, array in hdf5_objects.items() if hdf5.is_numeric(array)}
    return arrays if checksums(arrays) == expected_checksums else None


def write_cache(path: Path, fingerprint: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Write the arrays atomically to `path`; DataError if `path` cannot be written, or is a file of another kind."""
    if _is_not_a_cache(path):
        raise DataError(
            f"serialized_path: {path} exists but is not a neondist cache, so it is not replaced; choose another name"
        )
    try:
        with hdf5.NewHDF5File(path, private=True) as new:
            for name, array in arrays.items():
                new.file[name] = array
            hdf5.put_text_attribute(new.file.attrs, "stamp", fingerprint)
            hdf5.put_text_attribute(new.file.attrs, "checksums", json.dumps(checksums(arrays)))
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(
            f"serialized_path: {path} cannot be written ({reason}); choose a writable path with enough free space,"
            " or leave serialized_path out"
        ) from error


def checksums(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Return shape, dtype and crc of each array, as text by name."""
    return {n: f"{a.shape} {a.dtype} {zlib.crc32(np.ascontiguousarray(a).data):08x}" for n, a in arrays.items()}


def _is_not_a_cache(path: Path) -> bool:
    """Return whether a file is certainly not a cache of any version, intact or damaged."""
    import h5py

    try:
        with open_regular(path) as opened:
            signature = opened.read(len(hdf5.HDF5_SIGNATURE))
            if signature != hdf5.HDF5_SIGNATURE:
                return bool(signature) and path.suffix not in (".h5", ".hdf5")
            with h5py.File(opened, "r") as file:
                return "stamp" not in file.attrs
    except FileNotFoundError:
        return False
    # the file is damaged or unreadable: the error is raised when it is written
    except Exception:
        return False


def _fingerprint_source(path: Path) -> list[str | int]:
    crc = 0
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            while piece := file.read(READ_PIECE_BYTES):
                crc = zlib.crc32(piece, crc)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from error
    return [path.name, status.st_size, status.st_mtime_ns, crc]


_FORMAT_SPEC = re.compile(r"(0?[1-9])?d?")  # limits the width: format strings could exhaust the memory
_PATH_EXAMPLE = "for instance ~/.cache/neondist/mnist_{rank}_of_{size}.h5"


def check_path_template(template: object) -> None:
    """Raise ConfigError unless `template` is a path whose only fields are {rank} and {size}."""
    if not isinstance(template, (str, os.PathLike)) or not os.fspath(template):
        raise ConfigError(f"serialized_path: {template!r} is not a path; give one, {_PATH_EXAMPLE}")
    text = os.fspath(template)
    try:
        unknown_names = _template_field_names(text) - {"rank", "size"}
        fields = _parse_template_fields(text)
        bad_specs = [spec for _, _, spec, conversion in fields if conversion or not _FORMAT_SPEC.fullmatch(spec or "")]
        if bad_specs:
            raise ValueError(f"'{bad_specs[0]}' is not a valid format width" if bad_specs[0] else "it has a conversion")
        if "\0" in text:
            raise ValueError("it has a null character")
    except (ValueError, KeyError, IndexError) as error:
        raise ConfigError(
            f"serialized_path: {text!r} is not a template ({error}); write it as a path, {_PATH_EXAMPLE}"
        ) from error
    if unknown_names:
        names = ", ".join("{" + name + "}" for name in sorted(unknown_names))
        raise ConfigError(
            f"serialized_path: unknown field {names} in {text!r}; only {{rank}} and {{size}} are valid, {_PATH_EXAMPLE}"
        )


def resolve_cache_path(template: str | os.PathLike[str], grid: ProcessGrid) -> Path:
    """Return the path of this rank's cache; ConfigError if ranks, even of different replicas, would share a file."""
    check_path_template(template)
    text = os.fspath(template)
    if grid.size > 1 and "rank" not in _template_field_names(text):
        raise ConfigError(
            f"serialized_path: {text!r} has no {{rank}}, but each of the {grid.size} ranks needs a file of its own; add"
            f" {{rank}} to the name, {_PATH_EXAMPLE}"
        )
    return Path(os.path.expanduser(text.format(rank=grid.rank, size=grid.size)))


def _template_field_names(text: str) -> set[str]:
    return {name for _, name, _, _ in _parse_template_fields(text)}


def _parse_template_fields(text: str) -> list[tuple[str, str, str | None, str | None]]:
    """Return literal text, name, width and conversion of each field."""
    return [
        (literal, name, spec, conversion)
        for literal, name, spec, conversion in Formatter().parse(text)
        if name is not None
    ]
