"""The folder that a run writes to."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ..comm import Transport, agree
from ..errors import ConfigError
from ..files import partial

CHECKPOINT = "checkpoint.h5"
CHECKPOINTS = ("pretrain_*.h5", "checkpoint-*.h5", CHECKPOINT)
FILES = (
    "experiment.yaml",
    "environment.json",
    "pretrain.jsonl",
    "pretrain_*.h5",
    "reconstructions_*.png",
    "filters_*.png",
    "stimuli_*.png",
    "metrics.jsonl",
    CHECKPOINT,
    "checkpoint-*.h5",
    "ledger.jsonl",
    "curves.png",
    "tiles.png",
)
"""All that a run may write; * stands for the number of a stage or of a step."""


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
    """Remove the files of an earlier run, and nothing else; checkpoints first, so that none meets newer files."""
    for name in (*CHECKPOINTS, *FILES):
        for path in (*folder.glob(name), *folder.glob(partial(Path(name)).name)):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()


def present(folder: Path) -> list[Path]:
    """Return the files of a run that are there."""
    return [path for name in FILES for path in sorted(folder.glob(name)) if path.is_file()]
