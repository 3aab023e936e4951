"""What lies in a file itself: no link leads out of it, no array has its cells elsewhere.

libhdf5 follows whatever a file names: a pipe, for which it waits for ever; a file of somebody else; or, in a virtual
array, the array itself, until the process dies.
"""

from __future__ import annotations

from typing import Any

from ..errors import DataError

_MOST_LINKS = 16


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
            f"{file.filename}: '{name}' has its cells in other files; copy them here, for instance by h5copy"
        )
    return at


def _parts(name: str) -> list[str]:
    return [part for part in name.split("/") if part not in ("", ".")]
