"""A new HDF5 file: whole under its name, or not there at all."""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from .sink import Sink

VERSION = ("v110", "v110")
"""metadata of this version have checksums"""


class NewFile:
    """A context in which a file is written beside its place; it gets its name when the block has ended well.

    What was there under the name stays until then, and stays if the block raises or the disk is full. Make arrays with
    `fletcher32=True`, and text with `put_text`.

    Parameters
    ----------
    path : Path
        Its folder is made if missing.

    Attributes
    ----------
    file : h5py.File
        Open for writing inside the block.

    Raises
    ------
    OSError
        When the block ends or in `check`: if the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")

    def __enter__(self) -> NewFile:
        import h5py

        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._sink = Sink(self.part)
        self.file: Any = h5py.File(self._sink, "w", libver=VERSION)
        return self

    def check(self) -> None:
        """Raise OSError if something could not be written so far: call it now and then in a long block."""
        if self._sink.error is not None:
            raise self._sink.error

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self.file.close()
            self._sink.sync()
            self._sink.close()
            if error is None:
                self.check()
                os.replace(self.part, self.path)
                _sync_folder(self.path.parent)
        finally:
            # gone already if it was renamed; left over only by a failure
            with suppress(OSError):
                self.part.unlink()


def _sync_folder(folder: Path) -> None:
    """Write the folder's entry to the disk as well, so that a crash cannot lose the new name."""
    if os.name != "posix":
        return
    entry = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(entry)
    finally:
        os.close(entry)
