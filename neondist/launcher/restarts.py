"""Restart of a run: its newest intact checkpoint, and the command that resumes from it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ..errors import DataError

MIN_KEPT_CHECKPOINTS = 2
"""Number of checkpoints to keep, as a fallback if the newest is damaged."""


def checkpoint_versions(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return the checkpoints of a folder, with inodes and times that identify each version."""
    from ..io.output import CHECKPOINT_PATTERNS

    stats = {path: path.stat() for name in CHECKPOINT_PATTERNS for path in folder.glob(name)}
    return {path: (stat.st_ino, stat.st_mtime_ns) for path, stat in stats.items()}


def restore_newest_checkpoint(folder: Path) -> Path:
    """Return the newest intact checkpoint of a run, copied over damaged newer files; the newest if all are damaged."""
    from ..io.checkpoint import list_step_checkpoints
    from ..io.checkpoint.checksum import verify_checksum
    from ..io.files import atomic_replacement
    from ..io.output import CHECKPOINT
    from ..io.regular_file import open_regular

    stages = sorted((path for path in folder.glob("pretrain_*.h5") if path.stem[9:].isdecimal()), key=_stage_number)
    path = folder / CHECKPOINT if (folder / CHECKPOINT).exists() or not stages else stages[-1]
    for candidate in (path, *list_step_checkpoints(path)):
        with suppress(DataError):
            verify_checksum(candidate)
            if candidate != path:
                with open_regular(candidate) as source, atomic_replacement(path) as target:
                    shutil.copyfileobj(source, target)
            return candidate
    return path  # the ranks report the damage


def resume_arguments(words: Sequence[str]) -> list[str]:
    """Return the arguments of a command that resumes its own run."""
    kept_words = []
    for previous, word in zip(["", *words], words, strict=False):
        is_replaced = word in ("--resume", "--overwrite") or word.startswith("--resume=")
        if not is_replaced and (previous, word) != ("--resume", "auto"):
            kept_words.append(word)
    return [*kept_words, "--resume", "auto"]


def _stage_number(stage: Path) -> int:
    return int(stage.stem[9:])
