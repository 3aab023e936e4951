"""Opening of files for reading: regular files only, and optionally no links that point outside a folder.

Named pipes and sockets block the reader forever, devices may be endless, and reading a terminal stops a job.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from ..errors import DataError

DEFAULT_MAX_BYTES = 1 << 30  # default limit in bytes for files that are read whole
_UNSUPPORTED_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_OPEN_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_CLOEXEC", 0)


def open_regular(path: str | os.PathLike[str], root: str | os.PathLike[str] | None = None) -> BinaryIO:
    """Open a regular file for reading; the open file is checked as well as the path.

    Parameters
    ----------
    path : path
    root : path, optional
        Folder that contains the file, such as a run or a Zarr store: links that point outside it are rejected.

    Raises
    ------
    OSError
        As from `open`, if the path is missing, a folder, or not readable.
    DataError
        If the path is a pipe, a socket or a device, or lies outside `root`.
    """
    target = os.fspath(path)
    if root is not None:
        target, real_root = os.path.realpath(path), os.path.realpath(root)
        if not Path(target).is_relative_to(real_root):
            raise DataError(f"{path}: is a link that points outside {root}; put the file itself there")
    _require_regular(path, os.stat(target))  # before opening, which would rewind a tape
    file = open(target, "rb", opener=lambda name, flags: os.open(name, flags | _OPEN_FLAGS))  # noqa: SIM115
    try:
        _require_regular(path, os.fstat(file.fileno()))
    except BaseException:
        file.close()
        raise
    return file


def check_regular(path: str | os.PathLike[str], root: str | os.PathLike[str] | None = None) -> None:
    """Raise the errors of `open_regular`, for libraries that open files by name."""
    open_regular(path, root).close()


def read_bytes(
    path: str | os.PathLike[str], max_bytes: int = DEFAULT_MAX_BYTES, root: str | os.PathLike[str] | None = None
) -> bytes:
    """Return the content of a file; raise the errors of `open_regular`, and DataError for more than `max_bytes`."""
    with open_regular(path, root) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise DataError(f"{path}: is larger than {max_bytes:,} bytes, the limit for such files; use a smaller one")
    return content


def _require_regular(path: str | os.PathLike[str], status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(status.st_mode):
        file_kind = _UNSUPPORTED_KINDS.get(stat.S_IFMT(status.st_mode), "a special file")
        raise DataError(f"{path}: is {file_kind}, which is not supported; give a regular file")
