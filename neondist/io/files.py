"""The one way in which files are written: whole or not at all, and what the file system refuses is an OutputError.

write_text, write_figure: a whole file. replacing: one that is written piece by piece. append: more lines. Draft is what
they are made of, for those who have to go on while other ranks send.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import OutputError

REMEDY = "free disk space or check permissions, or choose another path"


def partial(path: Path) -> Path:
    """Return where a file is written before it gets its name."""
    return path.with_name(path.name + ".partial")


class Draft:
    """A new file beside its place, open for reading and writing, that gets its name when it is complete.

    What was there under the name stays until then. A draft that a killed process has left is removed; nothing is opened
    that is there already, so that a link in its place leads nowhere.

    Parameters
    ----------
    path : the file
    part : its name until it is complete, default that of `partial`

    Attributes
    ----------
    file : binary file

    Raises
    ------
    OSError
        It cannot be made; `finish` raises it too.
    """

    def __init__(self, path: Path, part: Path | None = None) -> None:
        self.path, self.part = path, part or partial(path)
        try:
            self.file: BinaryIO = open(self.part, "xb+")  # noqa: SIM115 (finish and discard close it)
        except FileExistsError:
            self.part.unlink()
            self.file = open(self.part, "xb+")  # noqa: SIM115
        self._who, self._named = os.fstat(self.file.fileno()), False

    def finish(self) -> None:
        """Give the file its name, once its content is on the disk."""
        self.file.flush()
        os.fsync(self.file.fileno())
        give_name(self.part, self.path, self._who)
        self._named = True
        self.file.close()

    def discard(self) -> None:
        """Leave nothing behind, after an error; after `finish`, do nothing."""
        with suppress(OSError):
            if not self._named and os.path.samestat(self._who, os.lstat(self.part)):
                self.part.unlink()
        with suppress(OSError):
            self.file.close()


def give_name(part: Path, path: Path, who: os.stat_result) -> None:
    """Give the file `part`, whose content is on the disk, its name; OSError if it is not that of `who`."""
    if path.exists() and not (path.is_file() or path.is_dir()):  # of a folder, os.replace tells
        raise OSError(errno.EEXIST, "it exists and is not a regular file", str(path))
    if not os.path.samestat(who, os.lstat(part)):
        raise OSError(errno.EBUSY, "another process is writing it", str(path))
    os.replace(part, path)
    if os.name == "posix":  # the folder's entry as well, so that a crash cannot lose the new name
        entry = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(entry)
        finally:
            os.close(entry)


@contextmanager
def file_errors(path: Path, what: str = "cannot be written", remedy: str = REMEDY) -> Iterator[None]:
    """Raise OutputError for what the file system refuses in the block: the path, what failed, the remedy."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{path}: {what} ({reason(error)}); {remedy}") from error


def reason(error: BaseException) -> str:
    """Return in a few words why the file system, or HDF5, has refused something."""
    number = getattr(error, "errno", None)
    text = str(getattr(error, "strerror", None) or error).split("\n")[0]
    return os.strerror(number) if number and number not in (errno.EEXIST, errno.EBUSY) else text


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file to write to, which replaces that at `path` if the block ends well; else that stays.

    Raises
    ------
    OutputError
        It cannot be written.
    """
    with file_errors(path):
        draft = Draft(path)
        try:
            yield draft.file
            draft.finish()
        finally:
            draft.discard()


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all; OutputError if that fails."""
    with replacing(path) as file:
        file.write(text.encode())


def can_draw() -> bool:
    """Return whether matplotlib is there, whose figures are written."""
    return find_spec("matplotlib") is not None


def write_figure(path: Path, figure: Any, dpi: int = 120) -> None:
    """Write a figure of matplotlib as the format that the name ends with; OutputError if that fails."""
    with replacing(path) as file:
        figure.savefig(file, dpi=dpi, format=path.suffix[1:])


def append(path: Path, text: str) -> None:
    """Add lines to a file; OutputError if that fails, and then no piece of them stays."""
    with file_errors(path):
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
        with open(os.open(path, flags, 0o666), "ab", buffering=0) as file:
            before = os.fstat(file.fileno()).st_size
            rest = memoryview(text.encode())
            try:
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:
                with suppress(OSError):
                    os.ftruncate(file.fileno(), before)
                raise


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, unless it is there; OutputError if that fails."""
    with file_errors(path, "the folder cannot be created"):
        path.mkdir(parents=True, exist_ok=True)
