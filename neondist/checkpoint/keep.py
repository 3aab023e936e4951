"""Older checkpoints beside the newest, by their step."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from ..files import partial


def keep_copies(path: Path, keep: int, step: int) -> None:
    """Give the finished partial file a second name with its step, and remove all such files but the last `keep`."""
    name = path.with_name(f"{path.stem}-{step:08d}{path.suffix}")
    fresh = partial(name)
    fresh.unlink(missing_ok=True)
    try:
        os.link(partial(path), fresh)  # the same bytes under two names
    except OSError:
        shutil.copyfile(partial(path), fresh)
    os.replace(fresh, name)
    for old in kept_files(path)[keep:]:
        with contextlib.suppress(OSError):
            old.unlink()


def kept_files(path: Path) -> list[Path]:
    """Return the files with a step in their name, the last written first."""
    found = path.parent.glob(f"{path.stem}-[0-9]*{path.suffix}")
    return sorted(found, key=lambda file: (file.stat().st_mtime_ns, file.name), reverse=True)
