"""A new HDF5 file: whole under its name, or not there at all, also where the disk becomes full."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from ..files import Draft

VERSION = ("v110", "v110")
"""metadata of this version have checksums"""


class NewFile:
    """A context in which a file is written beside its place; it gets its name when the block has ended well.

    What was there under the name stays until then, and stays if the block raises or the disk is full. Make arrays with
    `fletcher32=True`, and text with `put_text`.

    Parameters
    ----------
    path : Path
        Its folder is made if missing.
    private : bool
        Whether other processes are denied access to the file.

    Attributes
    ----------
    file : h5py.File
        Open for writing inside the block.

    Raises
    ------
    OSError
        When the block ends or in `check`: if the file cannot be written.
    """

    def __init__(self, path: Path, private: bool = False) -> None:
        self.path, self.private = path, private

    def __enter__(self) -> NewFile:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # a name of its own: several processes may write such a file at the same time
        self._draft = Draft(self.path, self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex}.tmp"))
        if self.private:
            with suppress(OSError):  # some file systems have no permissions
                os.chmod(self._draft.part, 0o600)
        try:
            self._open = DeferredErrorFile(self._draft.file, libver=VERSION)
        except BaseException:
            self._draft.discard()
            raise
        self.file: Any = self._open.hdf5
        return self

    def check(self) -> None:
        """Raise OSError if something could not be written so far: call it now and then in a long block."""
        self._open.check()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self._open.close()
            if error is None:
                self._draft.finish()
        finally:
            self._draft.discard()


def put_text(attributes: Any, name: str, text: str) -> None:
    """Write an attribute as text of fixed length, at most 60 kB; longer text belongs into an array of bytes."""
    attributes[name] = np.bytes_(text.encode())


class DeferredErrorFile:
    """A new HDF5 file whose writes always succeed as far as HDF5 knows; `close` raises the first error that there was.

    Parameters
    ----------
    file : binary file
        New, open for reading and writing; it stays open.
    options : of `h5py.File`

    Attributes
    ----------
    hdf5 : h5py.File
    """

    def __init__(self, file: BinaryIO, **options: Any) -> None:
        import h5py

        self._sink = _Sink(file)
        try:
            self.hdf5: Any = h5py.File(self._sink, "w", **options)
        except BaseException:
            self._sink.close()
            raise

    def check(self) -> None:
        """Raise the first error of the disk, if there was one."""
        if self._sink.error is not None:
            raise self._sink.error

    def close(self) -> None:
        """Write what HDF5 still holds, and raise the first error of the disk."""
        try:
            self.hdf5.close()
        finally:
            self._sink.close()
        self.check()


class _Sink:
    """File object for h5py that holds back a failure until it is asked for.

    libhdf5 cannot close a file that the disk has refused a part of: the file stays open, its room stays taken, and the
    process ends in a segmentation fault (libhdf5 2.0). So it is told that all is well, and nothing more is written.

    Attributes
    ----------
    error : the first failure, or None
    """

    def __init__(self, file: BinaryIO) -> None:
        self.error: OSError | None = None
        self._file = open(os.dup(file.fileno()), "rb+", buffering=0)  # noqa: SIM115

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to a place."""
        return self._attempt(lambda: self._file.seek(offset, whence), offset)

    def tell(self) -> int:
        """Return the place."""
        return self._attempt(self._file.tell, 0)

    def read(self, count: int = -1) -> bytes:
        """Return the next bytes: nothing asks for this, but h5py knows a file by it."""
        return self._file.read(count) or b""

    def readinto(self, buffer: memoryview) -> int:
        """Fill a buffer with the next bytes; what was never written is not looked at once there is an error."""
        self._attempt(lambda: self._file.readinto(buffer), 0)
        return memoryview(buffer).nbytes

    def write(self, data: memoryview) -> int:
        """Write bytes, or remember why they cannot be written."""
        rest = memoryview(data).cast("B")
        size = len(rest)
        while rest:
            rest = rest[self._attempt(lambda: self._file.write(rest), len(rest)) :]  # noqa: B023 called at once
        return size

    def truncate(self, size: int) -> int:
        """Set the length, or remember why it cannot be set."""
        return self._attempt(lambda: self._file.truncate(size), size)

    def flush(self) -> None:
        """Nothing is buffered here."""

    def close(self) -> None:
        """Close the file."""
        try:
            self._file.close()
        except OSError as problem:
            self.error = self.error or problem

    def _attempt(self, action: Callable[[], Any], otherwise: Any) -> Any:
        """Return what the action returns; once something has failed, `otherwise`."""
        if self.error is None:
            try:
                return action()
            except OSError as problem:
                self.error = problem
        return otherwise
