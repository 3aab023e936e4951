"""A file that many ranks make under another name, which gets its own at the end, and a later process finds again."""

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
from .base import BY_AXIS, TileSink, TileSource, agreed_on, refused

PACKED, LOCK = ".packed", ".lock"
"""after the name of a draft: what it is packed to, and what ranks lock that write to the same chunk"""
_EXISTS = "has been created meanwhile; choose another name, or overwrite it (--overwrite)"
_LONGEST, _MOST = 80, 40
"""letters of a name that a file gives, and such names, in a message"""


class DraftSink(TileSink):
    """A sink whose file, or folder, is made by rank 0 and opened by all; what was asked for is noted beside it.

    Attributes
    ----------
    choices : dict
        The options of the format and their defaults.
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
        self._overwrite, self._stays, self._open = overwrite, resume, False
        self._kept = dict[str, set[str]]()
        self._part = partial(path)
        self._note = _note_of(path)
        with agreed_on(grid), refused(path):
            if grid is None or grid.rank == 0:
                self._begin(like, resume)
        with agreed_on(grid), refused(path):
            note = json.loads(read_bytes(self._note))
            self.resumed, self.chunks = note["resumed"], note["chunks"] and tuple(note["chunks"])
            self.lost = note.get("lost", [])
            self._attach(note["facts"])
            self._open = True

    @abstractmethod
    def _make(self, like: TileSource | None) -> dict[str, Any]:
        """Make the file at `_part`, without its cells, on rank 0; return what `_attach` has to know.

        It sets `chunks` to what they become.
        """

    @abstractmethod
    def _attach(self, facts: dict[str, Any]) -> None:
        """Open the file that rank 0 has made, on every rank."""

    @abstractmethod
    def _detach(self) -> None:
        """Close it."""

    def close(self) -> None:
        """Let go of the file; not committed and not to be resumed, it is removed."""
        if self._open:
            self._open = False
            self._detach()
            if not self._stays and (self.grid is None or self.grid.rank == 0):
                with refused(self.path):
                    self._forget()

    def _begin(self, like: TileSource | None, resume: bool) -> None:
        """Find the file of an earlier process, or make a new one."""
        asked = {
            "shape": list(self.shape), "dtype": self.dtype.str, "axes": self.axes,
            "chunks": self.chunks and list(self.chunks), "options": repr(sorted(self._options.items())),
        }  # fmt: skip
        if resume and self._note.exists() and self._part.exists():
            with suppress(ValueError, KeyError):
                note = json.loads(read_bytes(self._note))
                if note["asked"] != asked:
                    raise OutputError(f"{self._part}: belongs to another array; remove it, or choose another name")
                write_text(self._note, json.dumps(note | {"resumed": True}))
                return
        if not self.path.exists() and _replaced(self.path).exists():  # by a process that ended before it named its own
            os.rename(_replaced(self.path), self.path)
            if not self._overwrite:
                raise OutputError(f"{self.path}: {_EXISTS}")
        self._forget()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            facts = self._make(like)
            if like is not None:
                self._name_losses(like)
            note = {"asked": asked, "resumed": False, "chunks": self.chunks, "facts": facts, "lost": self.lost}
            write_text(self._note, json.dumps(note))
        except BaseException:
            self._forget()
            raise

    def _keep(self, like: TileSource | None, name: str, axes: str = "") -> Any:
        """Return what is known of the image that the file is like, and note that the file keeps it.

        Of what is known by axis, only these axes; where nothing is known, None, or by axis {}.
        """
        found = None if like is None else like.metadata.get(name)
        if like is None or name in like.metadata:
            self._kept.setdefault(name, set()).update(axes)
        return {axis: value for axis, value in (found or {}).items() if axis in axes} if name in BY_AXIS else found

    def _name_losses(self, like: TileSource) -> None:
        """Note in `lost` what is known of the image that the file is like, and what the file does not keep."""
        for name in like.known():
            kept, by_axis = self._kept.get(name), BY_AXIS.get(name, ())
            rest = [axis for axis, value in like.metadata[name].items() if value not in by_axis] if by_axis else []
            gone = [axis for axis in rest if axis not in (kept or ())]
            if by_axis and gone:
                self.lost.append(name if gone == rest else f"{name} of {' '.join(gone)}")
            elif not by_axis and kept is None:
                self.lost.append(name)
        names = ["".join(one if one.isprintable() else "?" for one in name[:_LONGEST]) for name in self.lost]
        self.lost = names[:_MOST] + ([f"{len(names) - _MOST} more"] if len(names) > _MOST else [])

    def _require_room(self) -> None:
        """Raise OutputError if the disk cannot take all cells as they are."""
        needed, free = prod(self.shape) * self.dtype.itemsize, shutil.disk_usage(self.path.parent).free
        if needed > free:
            raise OutputError(f"{self.path}: needs {words(needed)}, but only {words(free)} are free; free disk space")

    def _forget(self) -> None:
        _remove_beside(self.path)

    def _name(self) -> None:
        if self.path.exists() and not self._overwrite:
            raise OutputError(f"{self.path}: {_EXISTS}")
        part, old = self._finished(), _replaced(self.path)
        who = os.stat(part)
        write_text(self._note, json.dumps(json.loads(read_bytes(self._note)) | {"named": who.st_ino}))
        moved = self.path.is_dir()  # no folder is replaced by a rename
        if moved:
            _remove(old)
            os.rename(self.path, old)
        try:
            give_name(part, self.path, who)
        except OSError:
            if moved and not self.path.exists():
                os.rename(old, self.path)
            raise
        self._stays = True
        _remove_beside(self.path)

    def _finished(self) -> Path:
        """Return the complete file under its temporary name."""
        return self._part


def is_named(path: Path) -> bool:
    """Whether the file of an unfinished job has its name already; removes what a process that ended then has left.

    Of a job whose cells are all written: what else lies under the name is the file that is to be replaced.
    """
    note = _note_of(path)
    if not path.exists():
        return False
    if not note.exists():
        return not partial(path).exists()
    with refused(path):
        try:
            named = json.loads(read_bytes(note))["named"]
        except (ValueError, KeyError, TypeError):
            return False
        if named != os.stat(path).st_ino:
            return False
        _remove_beside(path)
    return True


def _note_of(path: Path) -> Path:
    """Return where it is noted what was asked for."""
    part = partial(path)
    return part.with_name(part.name + ".json")


def _replaced(path: Path) -> Path:
    """Return where a folder lies that another one is to replace."""
    return path.with_name(path.name + ".replaced")


def _remove_beside(path: Path) -> None:
    """Remove all that a sink makes beside its file; the note last, which tells a later process of the others."""
    part = partial(path)
    packed = part.with_name(part.name + PACKED)
    for one in (_replaced(path), packed, partial(packed), part.with_name(part.name + LOCK), part):
        _remove(one)
    note = _note_of(path)
    for one in (partial(note), note):
        _remove(one)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
