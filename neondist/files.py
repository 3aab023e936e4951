"""Files that are there whole or not at all, whenever a process is killed."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def partial(path: Path) -> Path:
    """Return where a file is written before it gets its name."""
    return path.with_name(path.name + ".partial")


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    partial(path).write_text(text, encoding="utf-8")
    finish(path)


def finish(path: Path, part: Path | None = None) -> None:
    """Give the partial file, or `part`, its name, once its content is on the disk.

    Raises
    ------
    OSError
        The disk is full, or what has the name is no regular file: a device, say, which a rename would replace.
    """
    part = part or partial(path)
    if path.exists() and not (path.is_file() or path.is_dir()):  # of a folder, os.replace tells
        raise OSError(errno.EEXIST, "something that is no regular file is there", str(path))
    with part.open("rb+") as file:
        os.fsync(file.fileno())
    os.replace(part, path)
    if os.name == "posix":  # the folder's entry as well, so that a crash cannot lose the new name
        entry = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(entry)
        finally:
            os.close(entry)
