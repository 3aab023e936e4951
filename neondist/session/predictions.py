"""The file that predictions go to: NPY or HDF5, block by block on rank 0."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ..comm import Transport
from ..errors import OutputError, UserError
from ..files import finish, partial
from ..hdf5 import SturdyFile
from .together import together


class Predictions:
    """A whole array on the disk that rank 0 fills; it gets its name when it is complete.

    Raises
    ------
    OutputError
        On every rank: the name has an unknown ending, or the place cannot be written or has no room.
    """

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: Any, world: Transport) -> None:
        self.path, self.world = path, world
        self.file: Any = None
        self.error: Exception | None = None
        with together(world):
            if path.suffix not in (".npy", ".h5", ".hdf5"):
                raise OutputError(f"{path}: is of no known kind; name a .npy or .h5 file")
            if world.rank == 0:
                self._attempt(lambda: self._make(shape, np.dtype(dtype)))
                if self.error is not None:
                    raise self.error

    def put(self, place: tuple[slice, ...], values: np.ndarray) -> None:
        """Write one block, on rank 0; an error is told by `close`, since the other ranks go on sending."""
        if self.error is None:
            self._attempt(lambda: self.cells.__setitem__(place, values))

    def close(self) -> None:
        """Give the file its name; collective."""
        with together(self.world):
            if self.world.rank == 0:
                if self.error is None:
                    self._attempt(self._finish)
                if self.error is not None:
                    raise self.error

    def _make(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.suffix == ".npy":
            self.cells: Any = np.lib.format.open_memmap(partial(self.path), "w+", dtype, shape)
            with partial(self.path).open("rb+") as file:  # a mapped file that finds no room would end the process
                os.posix_fallocate(file.fileno(), 0, max(1, os.fstat(file.fileno()).st_size))
        else:
            self.file = SturdyFile(partial(self.path))
            self.cells = self.file.hdf5.create_dataset("predictions", shape, dtype)

    def _finish(self) -> None:
        if self.file is not None:
            self.file.close()
        else:
            self.cells.flush()
        finish(self.path)

    def _attempt(self, action: Any) -> None:
        try:
            action()
        except UserError as problem:
            self.error = problem
        except (OSError, RuntimeError) as problem:
            number = getattr(problem, "errno", None)
            reason = os.strerror(number) if number else str(problem).split("\n")[0]
            self.error = OutputError(f"{self.path}: cannot be written ({reason}); choose a place that has room")
            with suppress(OSError):
                partial(self.path).unlink()
