"""A checkpoint file: whole arrays by name, and texts, with a checksum over them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ...comm import CALL, Transport, agree, check_alike
from ...errors import OutputError
from ..files import Draft, reason
from ..hdf5 import DeferredErrorFile
from .checksum import BLOCK, add_checksum
from .keep import keep_copies
from .pieces import Piece, Slices
from .stream import collect

SPARE = 1 << 16  # bytes that HDF5's own tables may take, beside SPARE_PER_ARRAY for each array
SPARE_PER_ARRAY = 2048


def write(
    path: Path, pieces: Sequence[Piece], texts: Mapping[str, str], world: Transport, keep: int = 1, step: int = 0
) -> None:
    """Write a file whole or not at all, on rank 0; parts of other ranks come in blocks; collective.

    Parameters
    ----------
    path : the file; what was there stays until the new one is on the disk
    pieces : all arrays, in the same order on every rank
    texts : what else the file holds, by name
    keep : how many of the last files stay; with more than one, each also under a name with its `step`

    Raises
    ------
    OutputError
        On every rank, if there is no room or no permission.
    """
    check_alike(world, {CALL: "writing a checkpoint"})
    file, error = None, None
    if world.rank == 0:
        try:
            file = _File(path, pieces, texts)
        except Exception as problem:
            error = problem
    try:
        for piece, place, values in collect(world, pieces):
            if error is None and file is not None:
                try:
                    file.put(piece, place, values)
                except Exception as problem:  # the others go on sending; it is raised when all are through
                    error = problem
        if file is not None:
            try:
                file.close()
                if error is None:
                    file.finish(keep, step)
            except Exception as problem:
                error = error or problem
    finally:
        if file is not None:
            file.draft.discard()
    agree(world, error and _told(path, error))


class _File:
    """The HDF5 file under its partial name."""

    def __init__(self, path: Path, pieces: Sequence[Piece], texts: Mapping[str, str]) -> None:
        needed = sum(prod(piece.shape) * piece.dtype.itemsize + SPARE_PER_ARRAY for piece in pieces)
        needed += SPARE + sum(map(len, texts.values()))
        if (free := shutil.disk_usage(path.parent).free) < needed:
            raise OutputError(_message(path, f"it needs {needed / 1e6:,.1f} MB, the disk has {free / 1e6:,.1f} MB"))
        self.draft = Draft(path)
        try:
            self.file = DeferredErrorFile(self.draft.file, userblock_size=BLOCK)
            self._make(pieces, texts)
        except BaseException:
            self.draft.discard()
            raise

    def _make(self, pieces: Sequence[Piece], texts: Mapping[str, str]) -> None:
        try:
            for name, text in texts.items():
                self.file.hdf5[name] = np.bytes_(text.encode())
            for piece in pieces:
                self.file.hdf5.create_dataset(piece.name, piece.shape, piece.dtype)
        except BaseException:
            self.close()
            raise

    def put(self, piece: Piece, place: Slices, values: Any) -> None:
        """Write one block."""
        self.file.hdf5[piece.name][place] = values
        self.file.check()

    def close(self) -> None:
        """Write what HDF5 still holds."""
        self.file.close()

    def finish(self, keep: int, step: int) -> None:
        """Seal the closed file and give it its name, then the one with its step: that is never the only one."""
        add_checksum(self.draft.file)
        self.draft.finish()
        if keep > 1:
            keep_copies(self.draft.path, keep, step)


def _told(path: Path, error: Exception) -> Exception:
    """Return an error of the file system, or of HDF5 about it, as one that the user can read."""
    if not isinstance(error, OSError | RuntimeError):
        return error
    return OutputError(_message(path, reason(error)))


def _message(path: Path, reason: str) -> str:
    return (
        f"{path}: the checkpoint cannot be written ({reason}); the previous one is unchanged; free disk space or"
        " check permissions, then continue with --resume, or choose another folder with --output"
    )
