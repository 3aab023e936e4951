"""Files that many ranks write under a temporary name until they are complete, and that later processes can resume."""

from __future__ import annotations

import json
import os
import shutil
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..comm import ProcessGrid
from ..errors import ConfigError, OutputError
from ..io.files import give_name, partial, write_text
from ..io.regular_file import read_bytes
from ..registry import suggest
from ..system.memory import words
from .base import BY_AXIS, TileSink, TileSource, collective_errors, write_errors

PACKED, LOCK = ".packed", ".lock"
"""suffixes of a draft's name: its compressed copy, and the lock for ranks that write to the same chunk"""
_EXISTS = "has been created meanwhile; choose another name, or overwrite it (--overwrite)"
_MAX_LENGTH, _MAX_NAMES = 80, 40
"""limits for messages: length of a metadata name, and number of names"""


class DraftSink(TileSink):
    """Sink whose file or folder is created by rank 0 and opened by all ranks; a note beside it describes the request.

    Attributes
    ----------
    choices : dict
        Options of the format and their defaults.
    """

    choices: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        path: Path,
        shape: Sequence[int],
        dtype: np.dtype,
        axes: str,
        chunks: Sequence[int] | None,
        *,
        like: TileSource | None = None,
        overwrite: bool = False,
        resume: bool = False,
        grid: ProcessGrid | None = None,
        **options: Any,
    ) -> None:
        super().__init__(path, shape, dtype, axes, chunks, grid)
        unknown = sorted(set(options) - set(self.choices))
        if unknown:
            raise ConfigError(
                f"{path}: has no option '{unknown[0]}'{suggest(unknown[0], self.choices) or '; leave it out'}"
            )
        self._options = {**self.choices, **options}
        self._overwrite, self._keep, self._open = overwrite, resume, False
        self._copied = dict[str, set[str]]()
        self._part = partial(path)
        self._note = _note_path(path)
        with collective_errors(grid), write_errors(path):
            if grid is None or grid.rank == 0:
                self._begin(like, resume)
        with collective_errors(grid), write_errors(path):
            note = json.loads(read_bytes(self._note))
            self.resumed, self.chunks = note["resumed"], note["chunks"] and tuple(note["chunks"])
            self.lost = note.get("lost", [])
            self._attach(note["facts"])
            self._open = True

    @abstractmethod
    def _make(self, like: TileSource | None) -> dict[str, Any]:
        """Create the file at `_part` without its cells, on rank 0, and return the facts for `_attach`.

        Set `chunks` to those of the file.
        """

    @abstractmethod
    def _attach(self, facts: dict[str, Any]) -> None:
        """Open the file that rank 0 has created, on every rank."""

    @abstractmethod
    def _detach(self) -> None:
        """Close the file."""

    def close(self) -> None:
        """Close the file, and remove it if it was neither committed nor created with `resume`."""
        if self._open:
            self._open = False
            self._detach()
            if not self._keep and (self.grid is None or self.grid.rank == 0):
                with write_errors(self.path):
                    self._remove_files()

    def _begin(self, like: TileSource | None, resume: bool) -> None:
        """Resume the file of an earlier process, or create a new one."""
        request = {
            "shape": list(self.shape), "dtype": self.dtype.str, "axes": self.axes,
            "chunks": self.chunks and list(self.chunks), "options": repr(sorted(self._options.items())),
        }  # fmt: skip
        if resume and self._note.exists() and self._part.exists():
            with suppress(ValueError, KeyError):
                note = json.loads(read_bytes(self._note))
                if note["asked"] != request:
                    raise OutputError(f"{self._part}: belongs to another array; remove it, or choose another name")
                write_text(self._note, json.dumps(note | {"resumed": True}))
                return
        if not self.path.exists() and _replaced_path(self.path).exists():  # by a process that was killed
            os.rename(_replaced_path(self.path), self.path)
            if not self._overwrite:
                raise OutputError(f"{self.path}: {_EXISTS}")
        self._remove_files()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            facts = self._make(like)
            if like is not None:
                self._list_lost(like)
            note = {"asked": request, "resumed": False, "chunks": self.chunks, "facts": facts, "lost": self.lost}
            write_text(self._note, json.dumps(note))
        except BaseException:
            self._remove_files()
            raise

    def _copy_metadata(self, like: TileSource | None, name: str, axes: str = "") -> Any:
        """Return metadata of the `like` image by name, for the given axes if it is by axis, and note that it is copied.

        Missing metadata is None, or {} if it is by axis.
        """
        value = None if like is None else like.metadata.get(name)
        if like is None or name in like.metadata:
            self._copied.setdefault(name, set()).update(axes)
        return {axis: v for axis, v in (value or {}).items() if axis in axes} if name in BY_AXIS else value

    def _list_lost(self, like: TileSource) -> None:
        """List in `lost` the metadata of the `like` image that the file does not store."""
        for name in like.metadata_names():
            copied, defaults = self._copied.get(name), BY_AXIS.get(name, ())
            declared = [axis for axis, v in like.metadata[name].items() if v not in defaults] if defaults else []
            missing = [axis for axis in declared if axis not in (copied or ())]
            if defaults and missing:
                self.lost.append(name if missing == declared else f"{name} of {' '.join(missing)}")
            elif not defaults and copied is None:
                self.lost.append(name)
        names = ["".join(c if c.isprintable() else "?" for c in name[:_MAX_LENGTH]) for name in self.lost]
        self.lost = names[:_MAX_NAMES] + ([f"{len(names) - _MAX_NAMES} more"] if len(names) > _MAX_NAMES else [])

    def _require_room(self) -> None:
        """Raise OutputError if there is no disk space for all cells, uncompressed."""
        needed, free = prod(self.shape) * self.dtype.itemsize, shutil.disk_usage(self.path.parent).free
        if needed > free:
            raise OutputError(f"{self.path}: needs {words(needed)}, but only {words(free)} are free; free disk space")

    def _remove_files(self) -> None:
        _remove_side_files(self.path)

    def _publish(self) -> None:
        if self.path.exists() and not self._overwrite:
            raise OutputError(f"{self.path}: {_EXISTS}")
        part, old = self._complete_file(), _replaced_path(self.path)
        identity = os.stat(part)
        write_text(self._note, json.dumps(json.loads(read_bytes(self._note)) | {"named": identity.st_ino}))
        is_folder = self.path.is_dir()  # a rename cannot replace a folder
        if is_folder:
            _remove(old)
            os.rename(self.path, old)
        try:
            give_name(part, self.path, identity)
        except OSError:
            if is_folder and not self.path.exists():
                os.rename(old, self.path)
            raise
        self._keep = True
        _remove_side_files(self.path)

    def _complete_file(self) -> Path:
        """Return the complete file under its temporary name."""
        return self._part


def is_published(path: Path) -> bool:
    """Return whether the complete file of an interrupted job already has its final name; then remove leftover files.

    Only for jobs whose cells are all written; another file under that name is the one to be replaced.
    """
    note = _note_path(path)
    if not path.exists():
        return False
    if not note.exists():
        return not partial(path).exists()
    with write_errors(path):
        try:
            inode = json.loads(read_bytes(note))["named"]
        except (ValueError, KeyError, TypeError):
            return False
        if inode != os.stat(path).st_ino:
            return False
        _remove_side_files(path)
    return True


def _note_path(path: Path) -> Path:
    """Return the path of the note."""
    part = partial(path)
    return part.with_name(part.name + ".json")


def _replaced_path(path: Path) -> Path:
    """Return the temporary path of a folder that is being replaced."""
    return path.with_name(path.name + ".replaced")


def _remove_side_files(path: Path) -> None:
    """Remove all temporary files of a sink; the note last, since later processes find the others by it."""
    part = partial(path)
    packed = part.with_name(part.name + PACKED)
    for temporary in (_replaced_path(path), packed, partial(packed), part.with_name(part.name + LOCK), part):
        _remove(temporary)
    note = _note_path(path)
    for temporary in (partial(note), note):
        _remove(temporary)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
