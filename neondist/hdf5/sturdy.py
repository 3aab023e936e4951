"""Writing HDF5 where the disk may become full."""

from __future__ import annotations

from typing import Any, BinaryIO

from .sink import Sink


class SturdyFile:
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

        self._sink = Sink(file)
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
