"""A new HDF5 file: whole under its name, or not there at all."""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from ..files import Draft
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
    private : bool
        Whether nobody else may read or write the file.

    Attributes
    ----------
    file : h5py.File
        Open for writing inside the block.

    Raises
    ------
    OSError
        When the block ends or in `check`: if the file cannot be written.
    """

    def __init__(self, path: Path, private: bool = False) -> None:
        self.path, self.private = path, private

    def __enter__(self) -> NewFile:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # a name of its own: several processes may write such a file at the same time
        self._draft = Draft(self.path, self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex}.tmp"))
        if self.private:
            with suppress(OSError):  # some file systems have no permissions
                os.chmod(self._draft.part, 0o600)
        try:
            self._open = SturdyFile(self._draft.file, libver=VERSION)
        except BaseException:
            self._draft.discard()
            raise
        self.file: Any = self._open.hdf5
        return self

    def check(self) -> None:
        """Raise OSError if something could not be written so far: call it now and then in a long block."""
        self._open.check()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self._open.close()
            if error is None:
                self._draft.finish()
        finally:
            self._draft.discard()
