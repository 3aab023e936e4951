"""Writing of checkpoint files: global arrays and texts by name, with a checksum."""

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

SPARE = 1 << 16  # bytes for HDF5's own tables, plus SPARE_PER_ARRAY for each array
SPARE_PER_ARRAY = 2048


def write(
    path: Path, pieces: Sequence[Piece], texts: Mapping[str, str], world: Transport, keep: int = 1, step: int = 0
) -> None:
    """Write a file atomically on rank 0, which receives the parts of other ranks in blocks; collective.

    Parameters
    ----------
    path : the file; an existing one is replaced once the new one is on disk
    pieces : all arrays, in the same order on every rank
    texts : texts by name
    keep : number of recent files to keep; if more than one, each also gets a name with its `step`

    Raises
    ------
    OutputError
        On every rank, if there is no disk space or no permission.
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
                except Exception as problem:  # raised after all ranks have sent their parts
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
    agree(world, error and _to_output_error(path, error))


class _File:
    """HDF5 file under its temporary name."""

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
        """Close the HDF5 file, writing buffered data."""
        self.file.close()

    def finish(self, keep: int, step: int) -> None:
        """Add the checksum to the closed file, publish it, and then keep a copy named by its step."""
        add_checksum(self.draft.file)
        self.draft.finish()
        if keep > 1:
            keep_copies(self.draft.path, keep, step)


def _to_output_error(path: Path, error: Exception) -> Exception:
    """Convert an error of the file system or of HDF5 into OutputError; return others unchanged."""
    if not isinstance(error, OSError | RuntimeError):
        return error
    return OutputError(_message(path, reason(error)))


def _message(path: Path, reason: str) -> str:
    return (
        f"{path}: the checkpoint cannot be written ({reason}); the previous one is unchanged; free disk space or"
        " check permissions, then continue with --resume, or choose another folder with --output"
    )
