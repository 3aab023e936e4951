"""The file that predictions go to: NPY or HDF5, block by block on rank 0."""

from __future__ import annotations

import os
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..comm import Transport, all_or_none
from ..errors import OutputError, UserError
from ..io.files import REMEDY, Draft, reason
from ..io.hdf5 import DeferredErrorFile


class Predictions:
    """A whole array on the disk that rank 0 fills; it gets its name when it is complete.

    Raises
    ------
    OutputError
        On every rank: the name has an unknown ending, or the place cannot be written or has no room.
    """

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: Any, world: Transport) -> None:
        self.path, self.world = path, world
        self.draft: Draft | None = None
        self.file: DeferredErrorFile | None = None
        self.error: Exception | None = None
        with all_or_none(world):
            if path.suffix not in (".npy", ".h5", ".hdf5"):
                raise OutputError(f"{path}: is of no known kind; name a .npy or .h5 file")
            if world.rank == 0:
                self._attempt(lambda: self._make(shape, np.dtype(dtype)))
                if self.error is not None:
                    raise self.error

    def put(self, place: tuple[slice, ...], values: np.ndarray) -> None:
        """Write one block, on rank 0; an error is told by `close`, since the other ranks go on sending."""
        if self.error is None:
            self._attempt(lambda: self._put(place, values))

    def close(self) -> None:
        """Give the file its name; collective."""
        with all_or_none(self.world):
            if self.world.rank == 0:
                if self.error is None:
                    self._attempt(self._finish)
                if self.error is not None:
                    raise self.error

    def discard(self) -> None:
        """Leave nothing behind, unless it is complete."""
        if self.file is not None:
            with suppress(OSError, RuntimeError):
                self.file.close()
        if self.draft is not None:
            self.draft.discard()

    def _put(self, place: tuple[slice, ...], values: np.ndarray) -> None:
        self.cells[place] = values
        if self.file is not None:
            self.file.check()

    def _make(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.draft = Draft(self.path)
        if self.path.suffix == ".npy":
            self.cells: Any = _mapped(self.draft.file, shape, dtype)
        else:
            self.file = DeferredErrorFile(self.draft.file)
            self.cells = self.file.hdf5.create_dataset("predictions", shape, dtype)

    def _finish(self) -> None:
        if self.file is not None:
            self.file.close()
        else:
            self.cells.flush()
        if self.draft is not None:
            self.draft.finish()

    def _attempt(self, action: Any) -> None:
        try:
            action()
        except UserError as problem:
            self.error = problem
        except (OSError, RuntimeError) as problem:
            self.error = OutputError(f"{self.path}: cannot be written ({reason(problem)}); {REMEDY}")
            self.discard()


def _mapped(file: BinaryIO, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Write the head of a .npy file and return its cells, mapped."""
    head = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, head)
    file.flush()
    begin, size = file.tell(), dtype.itemsize * prod(shape)
    if not size:  # nothing can be mapped
        return np.empty(shape, dtype)
    os.posix_fallocate(file.fileno(), 0, begin + size)  # a mapped file that finds no room would end the process
    return np.memmap(file, dtype, "r+", begin, shape)
