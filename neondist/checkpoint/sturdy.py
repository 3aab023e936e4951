"""Writing HDF5 where the disk may become full: HDF5 itself crashes at the end if one of its writes fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


class SturdyFile:
    """A new HDF5 file whose writes always succeed as far as HDF5 knows; `close` raises the first error that there was.

    Attributes
    ----------
    hdf5 : h5py.File
    """

    def __init__(self, path: Path, userblock: int = 0) -> None:
        import h5py

        self._disk = _Disk(path)
        try:
            self.hdf5 = h5py.File(self._disk, "w", userblock_size=userblock)
        except BaseException:
            self._disk.file.close()
            raise

    def check(self) -> None:
        """Raise the first error of the disk, if there was one."""
        if self._disk.error is not None:
            raise self._disk.error

    def close(self) -> None:
        """Write what HDF5 still holds, and raise the first error of the disk."""
        try:
            self.hdf5.close()
        finally:
            self._disk.attempt(self._disk.file.close, None)
        self.check()


class _Disk:
    """What h5py asks of a file; after an error it takes everything and keeps nothing."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("wb+", buffering=0)
        self.error: OSError | None = None

    def attempt(self, action: Callable[[], Any], otherwise: Any) -> Any:
        """Return what the action returns; once the disk has failed, `otherwise`."""
        if self.error is None:
            try:
                return action()
            except OSError as problem:
                self.error = problem
        return otherwise

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        while len(rest):
            rest = rest[self.attempt(lambda: self.file.write(rest), len(rest)) :]  # noqa: B023 called at once
        return size

    def read(self, size: int = -1) -> bytes:
        """Nothing asks for this, but h5py knows a file by it."""
        return self.file.read(size) or b""

    def readinto(self, buffer: Any) -> int:
        size = len(memoryview(buffer).cast("B"))
        self.attempt(lambda: self.file.readinto(buffer), 0)
        return size  # what was never written is not looked at once `error` is set

    def seek(self, offset: int, whence: int = 0) -> int:
        return self.attempt(lambda: self.file.seek(offset, whence), offset)

    def tell(self) -> int:
        return self.attempt(self.file.tell, 0)

    def truncate(self, size: int) -> int:
        return self.attempt(lambda: self.file.truncate(size), size)

    def flush(self) -> None:
        """Nothing is buffered."""
