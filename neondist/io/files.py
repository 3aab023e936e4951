"""Atomic writing of files; errors of the file system become OutputError.

write_text, write_figure: a whole file. atomic_replacement: a file written in pieces. append_text: add lines. DraftFile:
the underlying class, for callers that must not raise while other ranks send.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import ConfigError, OutputError, UserError
from ..terminal.console import say
from ..version import find_module_spec

WRITE_REMEDY = "free disk space or check permissions, or choose another path"
_REMEDY_BY_ERRNO = {
    errno.ENOSPC: "free disk space, or choose another path",
    errno.EACCES: "check permissions, or choose another path",
    errno.EEXIST: "choose another path, or remove the file",
    errno.ENOTDIR: "choose another path: part of this one is a file",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.EROFS: "choose another path",
}


def partial_path(path: Path) -> Path:
    """Return the temporary path of a file that is being written."""
    return path.parent / f"{path.name}.partial"  # the name of "." and of "/" is empty


class DraftFile:
    """New file, open for reading and writing, that appears under its name when it is complete.

    An existing file is kept until then. The file is unnamed, so that a killed process leaves none, or has a temporary
    name on file systems without unnamed files. A temporary file left by a killed process is removed; existing files are
    never opened, so links are not followed.

    Parameters
    ----------
    path : the file
    temporary_path : temporary path; default: `partial_path(path)`

    Attributes
    ----------
    file : binary file

    Raises
    ------
    OSError
        If the file cannot be created or, in `finish`, cannot be written.
    """

    def __init__(self, path: Path, temporary_path: Path | None = None) -> None:
        self.path, self.temporary_path, self._published = path, temporary_path or partial_path(path), False
        try:
            self.file: BinaryIO = os.fdopen(os.open(path.parent, os.O_TMPFILE | os.O_RDWR, 0o666), "rb+")
            self._is_unnamed = True
        except (AttributeError, OSError):  # not Linux, or not this file system
            self._open_named()

    def _open_named(self) -> None:
        try:
            self.file = open(self.temporary_path, "xb+")  # noqa: SIM115 (finish and discard close it)
        except FileExistsError:
            self.temporary_path.unlink()
            self.file = open(self.temporary_path, "xb+")  # noqa: SIM115
        self._is_unnamed = False

    def finish(self) -> None:
        """Flush the file to disk, and give it its final name."""
        self.file.flush()
        os.fsync(self.file.fileno())
        if self._is_unnamed:
            self._give_temporary_name()
        rename_complete_file(self.temporary_path, self.path, os.fstat(self.file.fileno()))
        self._published = True
        self.file.close()

    def _give_temporary_name(self) -> None:
        self.temporary_path.unlink(missing_ok=True)
        descriptor = self.file.fileno()
        try:
            os.link(f"/proc/self/fd/{descriptor}", self.temporary_path, src_dir_fd=descriptor)  # follows the link
            self._is_unnamed = False
        except OSError:
            with self.file as unnamed:
                self._open_named()
                unnamed.seek(0)
                shutil.copyfileobj(unnamed, self.file)
            self.file.flush()
            os.fsync(self.file.fileno())

    def discard(self) -> None:
        """Remove the file after an error; after `finish`, do nothing."""
        with suppress(OSError, ValueError):  # ValueError: the file is closed
            if not self._published and os.path.samestat(os.fstat(self.file.fileno()), os.lstat(self.temporary_path)):
                self.temporary_path.unlink()
        with suppress(OSError):
            self.file.close()


def rename_complete_file(temporary_path: Path, path: Path, expected_status: os.stat_result) -> None:
    """Rename a file whose content is on disk; OSError if it is not the file of `expected_status`."""
    if path.exists() and not (path.is_file() or path.is_dir()):  # os.replace reports folders
        raise OSError(errno.EEXIST, "it exists and is not a regular file", str(path))
    if not os.path.samestat(expected_status, os.lstat(temporary_path)):
        raise OSError(errno.EBUSY, "another process is writing it", str(path))
    os.replace(temporary_path, path)
    if os.name == "posix":  # sync the folder, so that a crash cannot lose the new name
        folder_descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder_descriptor)
        finally:
            os.close(folder_descriptor)


@contextmanager
def convert_file_errors(
    path: Path,
    problem: str = "cannot be written",
    remedy: str | None = None,
    error_type: type[UserError] = OutputError,
) -> Iterator[None]:
    """Convert OSError into `error_type`, with the path, the problem and a remedy in its message."""
    try:
        yield
    except OSError as error:
        remedy = remedy or _REMEDY_BY_ERRNO.get(error.errno or 0, WRITE_REMEDY)
        raise error_type(f"{path}: {problem} ({short_reason(error)}); {remedy}") from error


@contextmanager
def convert_path_errors() -> Iterator[None]:
    """Convert OSError of a path that is too long or not permitted; before Python 3.14, Path.exists etc. raise it."""
    try:
        yield
    except OSError as error:
        if error.filename is None or error.errno not in (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG):
            raise
        problem = f"cannot be accessed ({short_reason(error)})"
        raise ConfigError(f"{error.filename}: {problem}; check the path and its permissions") from error


def short_reason(error: BaseException) -> str:
    """Return a short description of an error of the file system or of HDF5."""
    errno_code = getattr(error, "errno", None)
    message = str(getattr(error, "strerror", None) or error).split("\n")[0]
    return os.strerror(errno_code) if errno_code and errno_code not in (errno.EEXIST, errno.EBUSY) else message


@contextmanager
def atomic_replacement(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file, which replaces the file at `path` unless the block raises.

    Raises
    ------
    OutputError
        If the file cannot be written.
    """
    with convert_file_errors(path):
        draft = DraftFile(path)
        try:
            yield draft.file
            draft.finish()
        finally:
            draft.discard()


def write_text(path: Path, text: str) -> None:
    """Write a file atomically; OutputError if that fails. Paths in the text need not be valid UTF-8."""
    with atomic_replacement(path) as file:
        file.write(text.encode(errors="surrogateescape"))


@cache  # warns once
def has_matplotlib() -> bool:
    """Return whether matplotlib can be imported; warn about a broken installation."""
    if find_module_spec("matplotlib") is None:
        return False
    log, is_relevant = logging.getLogger("matplotlib"), lambda record: record.funcName != "_get_config_or_cache_dir"
    log.addFilter(is_relevant)  # do not report a home folder that cannot be written
    try:
        import matplotlib.figure  # noqa: F401
    except Exception as error:  # a broken installation fails in many ways
        problem = f"{type(error).__name__}: {error}"
        say(f"warning: no pictures are drawn: matplotlib cannot be imported ({problem}); reinstall it", sys.stderr)
        return False
    finally:
        log.removeFilter(is_relevant)
    return True


def write_figure(path: Path, figure: Any, dpi: int = 120) -> None:
    """Write a matplotlib figure in the format of the suffix, and clear it; OutputError if that fails."""
    image = BytesIO()  # drawing is slow: a process that is killed while drawing leaves no partial file
    figure.savefig(image, dpi=dpi, format=path.suffix[1:])
    with atomic_replacement(path) as file:
        file.write(image.getbuffer())
    figure.clear()  # reference cycles would keep its images


def append_text(path: Path, text: str) -> None:
    """Append lines to a file; if that fails, keep none of them and raise OutputError."""
    with convert_file_errors(path):
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
        with open(os.open(path, flags, 0o666), "ab", buffering=0) as file:
            old_size = os.fstat(file.fileno()).st_size
            unwritten = memoryview(text.encode(errors="surrogateescape"))
            try:
                while unwritten:
                    unwritten = unwritten[file.write(unwritten) :]
            except OSError:
                with suppress(OSError):
                    os.ftruncate(file.fileno(), old_size)
                raise


def make_folder(path: Path) -> None:
    """Create a folder and its parents unless it exists; OutputError if that fails."""
    with convert_file_errors(path, "the folder cannot be created"):
        path.mkdir(parents=True, exist_ok=True)
