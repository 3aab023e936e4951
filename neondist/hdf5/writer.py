"""A new HDF5 file: whole under its name, or not there at all."""

from __future__ import annotations

import uuid
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from ..files import finish
from .sturdy import SturdyFile

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
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._open = SturdyFile(self.part, libver=VERSION)
        self.file: Any = self._open.hdf5
        return self

    def check(self) -> None:
        """Raise OSError if something could not be written so far: call it now and then in a long block."""
        self._open.check()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self._open.close()
            if error is None:
                finish(self.path, self.part)
        finally:
            # gone already if it was renamed; left over only by a failure
            with suppress(OSError):
                self.part.unlink()
