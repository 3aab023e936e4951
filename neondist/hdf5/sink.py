"""Where the bytes of a new HDF5 file go."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, BinaryIO


class Sink:
    """What h5py writes to instead of a new file, which keeps a failure to itself until it is asked for.

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
