"""Source of a restart: the newest complete checkpoint, and its description."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ..errors import DataError

KEEP = 2
"""Checkpoints that stay, so that there is one if the newest is damaged."""


def checkpoints(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return the checkpoints of a folder, with what changes when one is written."""
    from ..io.output import CHECKPOINTS

    stats = {path: path.stat() for name in CHECKPOINTS for path in folder.glob(name)}
    return {path: (stat.st_ino, stat.st_mtime_ns) for path, stat in stats.items()}


def make_whole(folder: Path) -> Path:
    """Return the newest whole checkpoint of a run, which takes the place of the newest where that is damaged."""
    from ..io.checkpoint import kept_files
    from ..io.checkpoint.checksum import check
    from ..io.files import replacing
    from ..io.output import CHECKPOINT
    from ..io.regular_file import open_regular

    stages = sorted((path for path in folder.glob("pretrain_*.h5") if path.stem[9:].isdecimal()), key=_number)
    path = folder / CHECKPOINT if (folder / CHECKPOINT).exists() or not stages else stages[-1]
    for candidate in (path, *kept_files(path)):
        with suppress(DataError):
            check(candidate)
            if candidate != path:
                with open_regular(candidate) as old, replacing(path) as new:
                    shutil.copyfileobj(old, new)
            return candidate
    return path  # the ranks will say what is wrong with it


def resuming_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command that goes on with its own run."""
    found = []
    for before, word in zip(["", *words], words, strict=False):
        told = word in ("--resume", "--overwrite") or word.startswith("--resume=")
        if not told and (before, word) != ("--resume", "auto"):
            found.append(word)
    return [*found, "--resume", "auto"]


def _number(stage: Path) -> int:
    return int(stage.stem[9:])
