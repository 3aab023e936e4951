"""Atomic writing of HDF5 files; an existing file survives even if the disk becomes full."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from ..files import DraftFile

HDF5_LIBRARY_VERSIONS = ("v110", "v110")
"""versions of the file format whose metadata have checksums"""


class NewHDF5File:
    """Context that writes a file under a temporary name, and renames it if the block succeeds.

    An existing file is kept until then, and remains if the block raises or the disk is full. Create arrays with
    `fletcher32=True`, and text with `put_text_attribute`.

    Parameters
    ----------
    path : Path
        Path of the file; its folder is created if missing.
    private : bool
        Whether other users are denied access to the file.

    Attributes
    ----------
    file : h5py.File
        The file, open for writing inside the block.

    Raises
    ------
    OSError
        If the file cannot be written; raised when the block ends, or in `raise_deferred_error`.
    """

    def __init__(self, path: Path, private: bool = False) -> None:
        self.path, self.private = path, private

    def __enter__(self) -> NewHDF5File:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # a unique name: several processes may write the same file concurrently
        self._draft = DraftFile(self.path, self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex}.tmp"))
        if self.private:
            with suppress(OSError):  # some file systems do not support permissions
                os.fchmod(self._draft.file.fileno(), 0o600)
        try:
            self._hdf5_file = DeferredErrorHDF5File(self._draft.file, libver=HDF5_LIBRARY_VERSIONS)
        except BaseException:
            self._draft.discard()
            raise
        self.file: Any = self._hdf5_file.hdf5
        return self

    def raise_deferred_error(self) -> None:
        """Raise OSError if a write has failed so far; call it regularly in long blocks."""
        self._hdf5_file.raise_deferred_error()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self._hdf5_file.close()
            if error is None:
                self._draft.finish()
        finally:
            self._draft.discard()


def put_text_attribute(attributes: Any, name: str, text: str) -> None:
    """Write an attribute of fixed-length text, at most 60 kB; store longer text in an array of bytes."""
    attributes[name] = np.bytes_(text.encode())


class DeferredErrorHDF5File:
    """New HDF5 file that hides write errors from HDF5; `raise_deferred_error` and `close` raise the first one.

    Parameters
    ----------
    file : binary file
        New file, open for reading and writing; it is not closed.
    options : keyword arguments of `h5py.File`

    Attributes
    ----------
    hdf5 : h5py.File
    """

    def __init__(self, file: BinaryIO, **options: Any) -> None:
        import h5py

        self._deferring_file = _ErrorDeferringFile(file)
        try:
            self.hdf5: Any = h5py.File(self._deferring_file, "w", **options)
        except BaseException:
            self._deferring_file.close()
            raise

    def raise_deferred_error(self) -> None:
        """Raise the first write error, if any."""
        if self._deferring_file.error is not None:
            raise self._deferring_file.error

    def close(self) -> None:
        """Close the HDF5 file, writing buffered data, and raise the first write error."""
        try:
            self.hdf5.close()
        finally:
            self._deferring_file.close()
        self.raise_deferred_error()


class _ErrorDeferringFile:
    """File object for h5py that stores errors instead of raising them.

    libhdf5 cannot close a file after a failed write: the file stays open, its disk space stays occupied, and the
    process crashes (libhdf5 2.0). After an error, therefore, writes pretend to succeed, but write nothing.

    Attributes
    ----------
    error : first error, or None
    """

    def __init__(self, file: BinaryIO) -> None:
        self.error: OSError | None = None
        self._file = open(os.dup(file.fileno()), "rb+", buffering=0)  # noqa: SIM115

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._attempt(lambda: self._file.seek(offset, whence), offset)

    def tell(self) -> int:
        return self._attempt(self._file.tell, 0)

    def read(self, count: int = -1) -> bytes:
        """Return the next bytes; not called, but h5py requires this method."""
        return self._file.read(count) or b""

    def readinto(self, buffer: memoryview) -> int:
        """Fill a buffer with the next bytes; after an error, leave the buffer unchanged."""
        self._attempt(lambda: self._file.readinto(buffer), 0)
        return memoryview(buffer).nbytes

    def write(self, data: memoryview) -> int:
        """Write bytes, or store the error."""
        rest = memoryview(data).cast("B")
        size = len(rest)
        while rest:
            rest = rest[self._attempt(lambda: self._file.write(rest), len(rest)) :]  # noqa: B023 called at once
        return size

    def truncate(self, size: int) -> int:
        """Set the length, or store the error."""
        return self._attempt(lambda: self._file.truncate(size), size)

    def flush(self) -> None:
        """Do nothing, since no data are buffered."""

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as problem:
            self.error = self.error or problem

    def _attempt(self, action: Callable[[], Any], default: Any) -> Any:
        """Return the result of the action; after an error, `default`."""
        if self.error is None:
            try:
                return action()
            except OSError as problem:
                self.error = problem
        return default
