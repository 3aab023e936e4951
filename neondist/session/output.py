"""The folder that a run writes to."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ..comm import Transport, agree
from ..errors import ConfigError

FILES = (
    "experiment.yaml",
    "environment.json",
    "pretrain.jsonl",
    "pretrain_*.h5",
    "metrics.jsonl",
    "checkpoint.h5",
    "curves.png",
    "tiles.png",
)
"""All that a run may write; * stands for the number of a stage."""


def prepare(world: Transport, folder: Path) -> None:
    """Make the folder and try to write to it, on rank 0; collective.

    Raises
    ------
    ConfigError
        On every rank, if nothing can be written there.
    """
    error: ConfigError | None = None
    if world.rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            trial = partial(folder / f"trial-{os.getpid()}")
            trial.touch()
            trial.unlink()
        except OSError as problem:
            reason = problem.strerror or problem
            error = ConfigError(f"output: cannot write to {folder} ({reason}); choose another folder with --output")
    agree(world, error)


def clear(folder: Path) -> None:
    """Remove the files of an earlier run, and nothing else."""
    for name in FILES:
        for path in (*folder.glob(name), *folder.glob(partial(Path(name)).name)):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()


def present(folder: Path) -> list[Path]:
    """Return the files of a run that are there."""
    return [path for name in FILES for path in sorted(folder.glob(name)) if path.is_file()]


def partial(path: Path) -> Path:
    """Return where a file is written before it gets its name."""
    return path.with_name(path.name + ".partial")


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    partial(path).write_text(text, encoding="utf-8")
    finish(path)


def finish(path: Path) -> None:
    """Give the partial file its name, once its content is on the disk."""
    with partial(path).open("rb+") as file:
        os.fsync(file.fileno())
    os.replace(partial(path), path)
    if os.name == "posix":  # the folder's entry as well, so that a crash cannot lose the new name
        entry = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(entry)
        finally:
            os.close(entry)
