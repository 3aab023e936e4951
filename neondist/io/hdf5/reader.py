"""Safe reading of HDF5 files: access to groups and arrays, and conversion of errors.

libhdf5 follows every reference in a file: it blocks forever at a pipe, reads other users' files, and crashes if a
virtual array refers to itself. Links out of a file and arrays with external data are therefore rejected.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from ...errors import DataError, UserError
from ..regular_file import open_regular

HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_MAX_SOFT_LINKS = 16


def open_hdf5(path: Path, wrong_type_message: str | None = None) -> Any:
    """Open an h5py.File for reading.

    Parameters
    ----------
    path : path
    wrong_type_message : str, optional
        Message for files of another type, with its remedy.

    Raises
    ------
    DataError
        If the file is missing, not HDF5, or damaged.
    """
    import h5py

    with convert_hdf5_errors(path):
        with open_regular(path) as file:
            if file.read(len(HDF5_SIGNATURE)) != HDF5_SIGNATURE and not h5py.is_hdf5(path):
                creation_hint = f"not an HDF5 file; create one with: neondist data convert SOURCE --to {path}"
                raise DataError(f"{path}: {wrong_type_message or creation_hint}")
        try:
            return h5py.File(path, "r")
        except OSError as error:
            if "unable to lock" not in str(error):
                raise
            return h5py.File(path, "r", locking=False)  # some shared file systems do not support locks


def size_and_mtime(path: Path) -> tuple[int, int]:
    """Return the size and modification time (ns) of a file, to detect changes; (0, 0) if it is missing."""
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


@contextmanager
def convert_hdf5_errors(path: Path) -> Iterator[None]:
    """Convert exceptions that h5py raises on a damaged file into DataError; a UserError passes unchanged."""
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; check the path") from error
    except IsADirectoryError as error:
        raise DataError(f"{path}: is a folder; specify the HDF5 file in it") from error
    except PermissionError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error
    except (OSError, KeyError, ValueError, RuntimeError, TypeError, AttributeError, OverflowError) as error:
        reason = " ".join(str(error).strip("'\"").split())
        raise DataError(f"{path}: damaged, or of another file type ({reason}); restore it from a good copy") from error


def find_object(file: Any, name: str) -> Any:
    """Return the group or array at a path in an open file, or None; links inside the file are followed.

    Raises
    ------
    DataError
        If a link leads out of the file or to itself, or an array has external data.
    """
    import h5py

    node, path_parts, num_links = file["/"], _path_parts(name), 0
    while path_parts:
        part = path_parts.pop(0)
        link = node.get(part, getlink=True) if isinstance(node, h5py.Group) else None
        if link is None:
            return None
        if isinstance(link, h5py.SoftLink):
            num_links += 1
            if num_links > _MAX_SOFT_LINKS:
                raise DataError(f"{file.filename}: '{name}' is a link to itself; copy the array there")
            node, path_parts = file["/"] if link.path.startswith("/") else node, _path_parts(link.path) + path_parts
        elif isinstance(link, h5py.HardLink):
            node = node[part]
        else:
            raise DataError(f"{file.filename}: '{name}' is a link into another file; copy the array, or use that file")
    if isinstance(node, h5py.Dataset) and (node.is_virtual or node.external):
        raise DataError(
            f"{file.filename}: '{name}' stores its data in external files; copy it into one file, for instance"
            " with h5copy"
        )
    return node


def iter_arrays(group: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and the array of each hard link to an array in a group; other links are not followed."""
    import h5py

    for name in group:
        if isinstance(group.get(name, getlink=True), h5py.HardLink):
            item = group[name]
            if isinstance(item, h5py.Dataset):
                yield name, item


def array_names(file: Any, max_arrays: int = 10, max_groups: int = 100) -> list[str]:
    """Return names of at most `max_arrays` arrays of at most `max_groups` groups, breadth-first, skipping links."""
    import h5py

    names, queue, num_groups = list[str](), deque([("", file["/"])]), 1
    while queue:
        prefix, group = queue.popleft()
        for key in islice(group, 10 * max_groups):
            if not isinstance(group.get(key, getlink=True), h5py.HardLink):
                continue
            item = group.get(key, getclass=True)
            if item is h5py.Dataset:
                names.append(prefix + key)
                if len(names) >= max_arrays:
                    return names
            elif item is h5py.Group and num_groups < max_groups:
                num_groups += 1
                queue.append((f"{prefix}{key}/", group[key]))
    return names


def _path_parts(name: str) -> list[str]:
    return [part for part in name.split("/") if part not in ("", ".")]


def get_text_attribute(attributes: Any, name: str) -> str:
    """Return text written by `put_text_attribute`; KeyError if it is missing, ValueError for other types."""
    attribute = attributes.get_id(name)
    if attribute.dtype.kind != "S" or attribute.shape != ():
        raise ValueError(f"attribute {name} is not text of fixed length")
    return bytes(attributes[name]).decode()


def is_numeric(array: Any) -> bool:
    """Return whether a dataset (or attribute id) holds numbers, not text, references or records."""
    return array.dtype.kind in "biuf"
