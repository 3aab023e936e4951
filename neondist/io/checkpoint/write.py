"""Writing of checkpoint files: global arrays and texts by name, with a checksum."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ...comm import CALL_KEY, Transport, check_equal_on_ranks, raise_if_any_failed
from ...errors import OutputError
from ...system.memory import format_bytes
from ..files import DraftFile, short_reason
from ..hdf5 import DeferredErrorHDF5File
from .checksum import USER_BLOCK_SIZE, add_checksum
from .pieces import ArrayPart, Slices
from .retention import keep_copy_by_step
from .stream import gather_to_root

HDF5_TABLES_BYTES = 1 << 16  # bytes for HDF5's own tables, plus HDF5_TABLES_BYTES_PER_ARRAY for each array
HDF5_TABLES_BYTES_PER_ARRAY = 2048


def write_checkpoint(
    path: Path, pieces: Sequence[ArrayPart], texts: Mapping[str, str], world: Transport, keep: int = 1, step: int = 0
) -> None:
    """Write a file atomically on rank 0, which receives the parts of other ranks in blocks. Collective.

    Parameters
    ----------
    path : the file; an existing one is replaced once the new one is on disk
    pieces : all arrays, in the same order on every rank
    texts : texts by name
    keep : number of recent files to keep; if more than one, each file also gets a name with its `step`

    Raises
    ------
    OutputError
        On every rank, if the disk is full or write permission is missing.
    """
    check_equal_on_ranks(world, {CALL_KEY: "writing a checkpoint"})
    draft, error = None, None
    if world.rank == 0:
        try:
            draft = _CheckpointDraft(path, pieces, texts)
        except Exception as problem:
            error = problem
    try:
        for piece, file_slices, values in gather_to_root(world, pieces):
            if error is None and draft is not None:
                try:
                    draft.write_block(piece, file_slices, values)
                except Exception as problem:  # raised after all ranks have sent their parts
                    error = problem
        if draft is not None:
            try:
                draft.close()
                if error is None:
                    draft.finish(keep, step)
            except Exception as problem:
                error = error or problem
    finally:
        if draft is not None:
            draft.discard()
    raise_if_any_failed(world, error and _to_output_error(path, error))


class _CheckpointDraft:
    """Checkpoint in an HDF5 file under a temporary name."""

    def __init__(self, path: Path, pieces: Sequence[ArrayPart], texts: Mapping[str, str]) -> None:
        nbytes = sum(prod(piece.global_shape) * piece.dtype.itemsize + HDF5_TABLES_BYTES_PER_ARRAY for piece in pieces)
        nbytes += HDF5_TABLES_BYTES + sum(map(len, texts.values()))
        if (free := shutil.disk_usage(path.parent).free) < nbytes:
            raise OutputError(
                _write_error_message(path, f"it needs {format_bytes(nbytes)}, but {format_bytes(free)} are free")
            )
        self._draft_file = DraftFile(path)
        try:
            self.file = DeferredErrorHDF5File(self._draft_file.file, userblock_size=USER_BLOCK_SIZE)
            self._create_arrays(pieces, texts)
        except BaseException:
            self.discard()
            raise

    def _create_arrays(self, pieces: Sequence[ArrayPart], texts: Mapping[str, str]) -> None:
        try:
            for name, text in texts.items():
                self.file.hdf5[name] = np.bytes_(text.encode())
            for piece in pieces:
                self.file.hdf5.create_dataset(piece.name, piece.global_shape, piece.dtype)
        except BaseException:
            self.close()
            raise

    def write_block(self, piece: ArrayPart, file_slices: Slices, values: Any) -> None:
        self.file.hdf5[piece.name][file_slices] = values
        self.file.raise_deferred_error()

    def close(self) -> None:
        self.file.close()

    def finish(self, keep: int, step: int) -> None:
        """Add the checksum to the closed file, publish it, and then keep a copy named by its step."""
        add_checksum(self._draft_file.file)
        self._draft_file.finish()
        if keep > 1:
            keep_copy_by_step(self._draft_file.path, keep, step)

    def discard(self) -> None:
        self._draft_file.discard()


def _to_output_error(path: Path, error: Exception) -> Exception:
    """Convert an error of the file system or of HDF5 into OutputError; return other errors unchanged."""
    if not isinstance(error, OSError | RuntimeError):
        return error
    return OutputError(_write_error_message(path, short_reason(error)))


def _write_error_message(path: Path, reason: str) -> str:
    note = "; the previous one is unchanged" if path.exists() else ""
    return (
        f"{path}: the checkpoint cannot be written ({reason}){note}; free disk space or check permissions, then"
        " resume the run (--resume), or choose another output folder"
    )
