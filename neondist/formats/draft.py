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
from ..io.files import partial_path, rename_complete_file, write_text
from ..io.regular_file import read_bytes
from ..registry import suggest
from ..system.memory import format_bytes
from .base import AXIS_METADATA_DEFAULTS, TileSink, TileSource, convert_write_errors, raise_on_all_ranks

COMPRESSED_SUFFIX, LOCK_SUFFIX = ".packed", ".lock"
"""suffixes of a draft's compressed copy, and of its lock file for ranks that write to the same chunk"""
_CREATED_MEANWHILE_MESSAGE = "was created in the meantime; choose another name, or overwrite it (--overwrite)"
_MAX_NAME_LENGTH, _MAX_LISTED_NAMES = 80, 40
"""limits for messages: length of a metadata name, and number of names"""


class DraftSink(TileSink):
    """Sink whose file or folder is created by rank 0 and opened by all ranks; a JSON file beside it stores the request.

    A subclass implements `_create_empty_file`, `_open_created_file`, `_write`, `flush` and `_close_file`. The other
    ranks wait until the file is created, and an exception of one rank is raised on all.

    Attributes
    ----------
    default_options : dict
        Options of the format and their defaults.
    """

    default_options: ClassVar[dict[str, Any]] = {}

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
        unknown_options = sorted(set(options) - set(self.default_options))
        if unknown_options:
            raise ConfigError(
                f"{path}: the format has no option '{unknown_options[0]}'"
                f"{suggest(unknown_options[0], self.default_options) or '; leave it out'}"
            )
        self._options = {**self.default_options, **options}
        self._overwrite, self._keep_on_close, self._is_open = overwrite, resume, False
        self._copied_metadata = dict[str, set[str]]()
        self._temp_path = partial_path(path)
        self._description_path = _description_path_of(path)
        with raise_on_all_ranks(grid), convert_write_errors(path):
            if grid is None or grid.rank == 0:
                self._create_or_resume(like, resume)
        with raise_on_all_ranks(grid), convert_write_errors(path):
            description = json.loads(read_bytes(self._description_path))
            self.resumed, self.chunks = description["resumed"], description["chunks"] and tuple(description["chunks"])
            self.lost = description.get("lost", [])
            self._open_created_file(description["facts"])
            self._is_open = True

    @abstractmethod
    def _create_empty_file(self, like: TileSource | None) -> dict[str, Any]:
        """Create the file at `_temp_path` without its cells, on rank 0; return the arguments of `_open_created_file`.

        Set `chunks` to the chunk shape of the file.
        """

    @abstractmethod
    def _open_created_file(self, open_arguments: dict[str, Any]) -> None:
        """Open the file that rank 0 has created, on every rank."""

    @abstractmethod
    def _close_file(self) -> None:
        """Close the file."""

    def close(self) -> None:
        """Close the file, and remove it if it was neither committed nor created with `resume`."""
        if self._is_open:
            self._is_open = False
            self._close_file()
            if not self._keep_on_close and (self.grid is None or self.grid.rank == 0):
                with convert_write_errors(self.path):
                    self._remove_files()

    def _create_or_resume(self, like: TileSource | None, resume: bool) -> None:
        """Resume the file of an earlier process, or create a new one."""
        request = {
            "shape": list(self.shape), "dtype": self.dtype.str, "axes": self.axes,
            "chunks": self.chunks and list(self.chunks), "options": repr(sorted(self._options.items())),
        }  # fmt: skip
        if resume and self._description_path.exists() and self._temp_path.exists():
            with suppress(ValueError, KeyError):
                description = json.loads(read_bytes(self._description_path))
                if description["asked"] != request:
                    raise OutputError(
                        f"{self._temp_path}: was begun with a different shape, dtype, axes, chunks or options;"
                        " delete it to start over, or choose another name"
                    )
                write_text(self._description_path, json.dumps(description | {"resumed": True}))
                return
        # an earlier process was killed while it replaced the folder
        if not self.path.exists() and _replaced_path(self.path).exists():
            os.rename(_replaced_path(self.path), self.path)
            if not self._overwrite:
                raise OutputError(f"{self.path}: {_CREATED_MEANWHILE_MESSAGE}")
        self._remove_files()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            open_arguments = self._create_empty_file(like)
            if like is not None:
                self._list_lost_metadata(like)
            state = {"resumed": False, "chunks": self.chunks, "facts": open_arguments, "lost": self.lost}
            write_text(self._description_path, json.dumps({"asked": request} | state))
        except BaseException:
            self._remove_files()
            raise

    def _copy_metadata(self, like: TileSource | None, name: str, axes: str = "") -> Any:
        """Return an entry of the `like` image's metadata, and record that it is copied.

        Of an entry with a value per axis, return the values for `axes`, or {} if there is no entry.
        """
        value = None if like is None else like.metadata.get(name)
        if like is None or name in like.metadata:
            self._copied_metadata.setdefault(name, set()).update(axes)
        return (
            {axis: v for axis, v in (value or {}).items() if axis in axes} if name in AXIS_METADATA_DEFAULTS else value
        )

    def _list_lost_metadata(self, like: TileSource) -> None:
        """List in `lost` the metadata of the `like` image that the file does not store."""
        for name in like.metadata_names():
            copied_axes, defaults = self._copied_metadata.get(name), AXIS_METADATA_DEFAULTS.get(name, ())
            values = like.metadata.get(name, {}) if defaults else {}
            declared_axes = [axis for axis, v in values.items() if v not in defaults]
            lost_axes = [axis for axis in declared_axes if axis not in (copied_axes or ())]
            if defaults and lost_axes:
                self.lost.append(name if lost_axes == declared_axes else f"{name} of {' '.join(lost_axes)}")
            elif not defaults and copied_axes is None:
                self.lost.append(name)
        names = ["".join(c if c.isprintable() else "?" for c in name[:_MAX_NAME_LENGTH]) for name in self.lost]
        more = [f"{len(names) - _MAX_LISTED_NAMES} more"] if len(names) > _MAX_LISTED_NAMES else []
        self.lost = names[:_MAX_LISTED_NAMES] + more

    def _require_disk_space(self) -> None:
        required, free = prod(self.shape) * self.dtype.itemsize, shutil.disk_usage(self.path.parent).free
        if required > free:
            raise OutputError(
                f"{self.path}: needs {format_bytes(required)}, but only {format_bytes(free)} are free; free disk space"
            )

    def _remove_files(self) -> None:
        _remove_side_files(self.path)

    def _publish(self) -> None:
        if self.path.exists() and not self._overwrite:
            raise OutputError(f"{self.path}: {_CREATED_MEANWHILE_MESSAGE}")
        draft_path, replaced_path = self._finish_draft_file(), _replaced_path(self.path)
        draft_status = os.stat(draft_path)
        description = json.loads(read_bytes(self._description_path))
        write_text(self._description_path, json.dumps(description | {"named": draft_status.st_ino}))
        is_folder = self.path.is_dir()  # a rename cannot replace a folder
        if is_folder:
            _remove_path(replaced_path)
            os.rename(self.path, replaced_path)
        try:
            rename_complete_file(draft_path, self.path, draft_status)
        except OSError:
            if is_folder and not self.path.exists():
                os.rename(replaced_path, self.path)
            raise
        self._keep_on_close = True
        _remove_side_files(self.path)

    def _finish_draft_file(self) -> Path:
        """Complete the temporary file, and return its path."""
        return self._temp_path


def clean_up_if_published(path: Path) -> bool:
    """Return whether the complete file of an interrupted job already has its final name; if so, remove leftover files.

    Call this only once all cells of a job are written. Another file at `path`, which the job would replace, is kept.
    """
    description_path = _description_path_of(path)
    if not path.exists():
        return False
    if not description_path.exists():
        return not partial_path(path).exists()
    with convert_write_errors(path):
        try:
            inode = json.loads(read_bytes(description_path))["named"]
        except (ValueError, KeyError, TypeError):
            return False
        if inode != os.stat(path).st_ino:
            return False
        _remove_side_files(path)
    return True


def _description_path_of(path: Path) -> Path:
    draft_path = partial_path(path)
    return draft_path.with_name(draft_path.name + ".json")


def _replaced_path(path: Path) -> Path:
    """Return the temporary path of a folder that is being replaced."""
    return path.with_name(path.name + ".replaced")


def _remove_side_files(path: Path) -> None:
    """Remove all temporary files of a sink; the description last, since later processes find the rest through it."""
    draft_path = partial_path(path)
    packed, lock_path = (draft_path.with_name(draft_path.name + suffix) for suffix in (COMPRESSED_SUFFIX, LOCK_SUFFIX))
    for temporary in (_replaced_path(path), packed, partial_path(packed), lock_path, draft_path):
        _remove_path(temporary)
    description_path = _description_path_of(path)
    for temporary in (partial_path(description_path), description_path):
        _remove_path(temporary)


def _remove_path(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
