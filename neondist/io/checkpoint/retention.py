"""Older checkpoints, named by their step."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from ..files import atomic_replacement, convert_file_errors, partial_path
from ..regular_file import open_regular


def keep_copy_by_step(path: Path, keep: int, step: int) -> None:
    """Link or copy a file to a name with its step, and keep only the last `keep` such files; OutputError on failure."""
    copy_path = path.with_name(f"{path.stem}-{step:08d}{path.suffix}")
    partial_copy = partial_path(copy_path)
    with convert_file_errors(partial_copy, "cannot be removed"):
        partial_copy.unlink(missing_ok=True)
    try:
        os.link(path, partial_copy)  # the same bytes under two names
        os.replace(partial_copy, copy_path)
    except OSError:
        with contextlib.suppress(OSError):
            partial_copy.unlink()
        with atomic_replacement(copy_path) as copy, open_regular(path) as file:
            shutil.copyfileobj(file, copy)
    for old in list_step_checkpoints(path)[keep:]:
        with contextlib.suppress(OSError):
            old.unlink()


def list_step_checkpoints(path: Path) -> list[Path]:
    """Return the files with a step in their name, the most recently written first."""
    paths = path.parent.glob(f"{path.stem}-[0-9]*{path.suffix}")
    return sorted(paths, key=lambda file: (file.stat().st_mtime_ns, file.name), reverse=True)
