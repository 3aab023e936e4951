"""An open HDF5 file: what may be read of it, and what lies in it; its faults are told in one message.

libhdf5 follows whatever a file names: a pipe, for which it waits for ever; a file of somebody else; or, in a virtual
array, the array itself, until the process dies. So no link is followed out of a file, and no array has cells elsewhere.
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

SIGNATURE = b"\x89HDF\r\n\x1a\n"
_MOST_LINKS = 16


def open_file(path: Path, refusal: str | None = None) -> Any:
    """Return an h5py.File, open for reading.

    Parameters
    ----------
    path : path
    refusal : str, optional
        The message for another kind of file, with its remedy.

    Raises
    ------
    DataError
        It is missing, not HDF5, or damaged.
    """
    import h5py

    with faults(path):
        with open_regular(path) as file:
            if file.read(len(SIGNATURE)) != SIGNATURE and not h5py.is_hdf5(path):
                refusal = refusal or f"not an HDF5 file; create one with: neondist data convert SOURCE --to {path}"
                raise DataError(f"{path}: {refusal}")
        try:
            return h5py.File(path, "r")
        except OSError as error:
            if "unable to lock" not in str(error):
                raise
            return h5py.File(path, "r", locking=False)  # some shared file systems know no locks


def state(path: Path) -> tuple[int, int]:
    """Return what changes when a file is written to: its size, and when it was written last (ns); 0 if it is gone."""
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


@contextmanager
def faults(path: Path) -> Iterator[None]:
    """Raise DataError for whatever a damaged file makes h5py raise in the block; a UserError passes."""
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; check the path") from error
    except IsADirectoryError as error:
        raise DataError(f"{path}: is a folder; name the HDF5 file in it") from error
    except PermissionError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error
    except (OSError, KeyError, ValueError, RuntimeError, TypeError, AttributeError, OverflowError) as error:
        reason = " ".join(str(error).strip("'\"").split())
        raise DataError(f"{path}: damaged, or of another file type ({reason}); restore it from a good copy") from error


def find(file: Any, name: str) -> Any:
    """Return the group or array of a path in an open file, or None; links inside the file are followed.

    Raises
    ------
    DataError
        A link leads out of the file or in a circle, or an array has its cells in other files.
    """
    import h5py

    at, parts, links = file["/"], _parts(name), 0
    while parts:
        part = parts.pop(0)
        link = at.get(part, getlink=True) if isinstance(at, h5py.Group) else None
        if link is None:
            return None
        if isinstance(link, h5py.SoftLink):
            links += 1
            if links > _MOST_LINKS:
                raise DataError(f"{file.filename}: '{name}' is a link to itself; copy the array there")
            at, parts = file["/"] if link.path.startswith("/") else at, _parts(link.path) + parts
        elif isinstance(link, h5py.HardLink):
            at = at[part]
        else:
            raise DataError(f"{file.filename}: '{name}' is a link into another file; copy the array, or name that file")
    if isinstance(at, h5py.Dataset) and (at.is_virtual or at.external):
        raise DataError(
            f"{file.filename}: '{name}' stores its data in external files; copy it into one file, for instance by"
            " h5copy"
        )
    return at


def arrays_in(group: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and the array of each hard link in a group: nothing behind other links, which lead anywhere."""
    import h5py

    for name in group:
        if isinstance(group.get(name, getlink=True), h5py.HardLink):
            found = group[name]
            if isinstance(found, h5py.Dataset):
                yield name, found


def array_names(file: Any, most: int = 10, groups: int = 100) -> list[str]:
    """Return the names of a few arrays, the outer ones first; of so many groups, and nothing behind a link."""
    import h5py

    found, waiting, seen = list[str](), deque([("", file["/"])]), 1
    while waiting:
        prefix, group = waiting.popleft()
        for key in islice(group, 10 * groups):
            if not isinstance(group.get(key, getlink=True), h5py.HardLink):
                continue
            item = group.get(key, getclass=True)
            if item is h5py.Dataset:
                found.append(prefix + key)
                if len(found) >= most:
                    return found
            elif item is h5py.Group and seen < groups:
                seen += 1
                waiting.append((f"{prefix}{key}/", group[key]))
    return found


def _parts(name: str) -> list[str]:
    return [part for part in name.split("/") if part not in ("", ".")]


def get_text(attributes: Any, name: str) -> str:
    """Return what `put_text` wrote; KeyError or ValueError if it is missing or something else."""
    found = attributes.get_id(name)
    if found.dtype.kind != "S" or found.shape != ():
        raise ValueError(f"attribute {name} is not text of fixed length")
    return bytes(attributes[name]).decode()


def plain(array: Any) -> bool:
    """Return whether the cells of a dataset (or of an attribute's id) are numbers: no text, references or records."""
    return array.dtype.kind in "biuf"
