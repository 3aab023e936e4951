"""Where the bytes of a new HDF5 file go."""

from __future__ import annotations

import os
from pathlib import Path


class Sink:
    """A file for h5py to write to, which keeps a failure to itself until it is asked for.

    libhdf5 cannot close a file that the disk has refused a part of: the file stays open, its room stays taken, and the
    process ends in a segmentation fault (libhdf5 2.0). So it is told that all is well, and nothing more is written.

    Attributes
    ----------
    error : the first failure, or None
    """

    def __init__(self, path: Path) -> None:
        self.error: OSError | None = None
        self._file = open(path, "x+b", buffering=0)  # noqa: SIM115 (closed by close)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a place."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """Return the place."""
        return self._file.tell()

    def read(self, count: int = -1) -> bytes:
        """Return the next bytes."""
        return self._file.read(count)

    def readinto(self, buffer: memoryview) -> int:
        """Fill a buffer with the next bytes."""
        return self._file.readinto(buffer)

    def write(self, data: memoryview) -> int:
        """Write bytes, or remember why they cannot be written."""
        view = memoryview(data).cast("B")
        try:
            left = view if self.error is None else view[:0]
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            self.error = error
        return len(view)

    def truncate(self, size: int) -> int:
        """Set the length, or remember why it cannot be set."""
        try:
            if self.error is None:
                self._file.truncate(size)
        except OSError as error:
            self.error = error
        return size

    def flush(self) -> None:
        """Nothing is buffered here."""

    def sync(self) -> None:
        """Wait until all is on the disk."""
        try:
            if self.error is None:
                os.fsync(self._file.fileno())
        except OSError as error:
            self.error = error

    def close(self) -> None:
        """Close the file."""
        self._file.close()
