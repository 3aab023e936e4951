"""Run folders and the files in them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ..comm import Transport, all_or_none
from ..errors import ConfigError, DataError
from .files import convert_file_errors, make_folder, partial_path
from .lock import LOCK_FILE_NAME as LOCK
from .lock import FolderLock
from .regular_file import open_regular

CHECKPOINT = "checkpoint.h5"
EVALUATIONS = "evaluations.jsonl"
TASKS = "tasks.sqlite"
SERVER_FOLDER = "servers"  # subfolder with the checkpoints of parameter servers and the task queue
BEST = "checkpoint_best.h5"
WEIGHTS = "weights.safetensors"
COMPLETE = "complete.json"  # marker file of a completed run
STAGE_CHECKPOINTS = "pretrain_*.h5"
CHECKPOINT_PATTERNS = (STAGE_CHECKPOINTS, "checkpoint-*.h5", CHECKPOINT)
GENERATIONS = "generations.jsonl"
CLASS_NAMES = "classes.json"
LOG_LINES_BEFORE_TRAINING = {"metrics.jsonl": 0, "pretrain.jsonl": 1}
"""Epoch logs, and the number of records that each has before the first resumable state."""
MAX_READ_LINE_BYTES = 1 << 24  # maximum number of bytes read from a line
RUN_FILES = (
    "experiment.yaml",
    "environment.json",
    CLASS_NAMES,
    "strategy.yaml",
    "pretrain.jsonl",
    STAGE_CHECKPOINTS,
    "reconstructions_*.png",
    "filters_*.png",
    "stimuli_*.png",
    "metrics.jsonl",
    EVALUATIONS,
    "evaluation/metrics.jsonl",
    f"{TASKS}*",
    CHECKPOINT,
    "checkpoint-*.h5",
    BEST,
    WEIGHTS,
    "ledger.jsonl",
    "summaries.jsonl",
    COMPLETE,
    GENERATIONS,
    "curves.png",
    "tiles.png",
    "worst.npz",
    "report.html",
)
"""Patterns of all files of a run."""


def prepare_run_folder(world: Transport, folder: Path, resume: bool | str = False, overwrite: bool = False) -> None:
    """Create the folder and check that a run may write there, on rank 0. Collective.

    Raises
    ------
    UserError
        On every rank: OutputError if the folder cannot be written or another run uses it; ConfigError if an earlier run
        would be lost; DataError if there is no run to resume.
    """
    with lock_folder(world, folder, resume, overwrite):
        pass


@contextmanager
def lock_folder(world: Transport, folder: Path, resume: bool | str = False, overwrite: bool = False) -> Iterator[None]:
    """Lock the folder for this run while the block runs. Collective. Raises the errors of `prepare_run_folder`."""
    lock: FolderLock | None = None
    created_folders: list[Path] = []
    with all_or_none(world):
        if world.rank == 0:
            created_folders = missing_folders(folder)
            if resume is True and folder in created_folders:
                raise DataError(f"{folder}: no run to resume; check the folder, or start a run with --resume auto")
            make_folder(folder)
            lock = FolderLock(folder)
            try:
                if not (resume or overwrite) and has_results(folder):
                    raise ConfigError(
                        f"output: {folder} has a run already; resume it (--resume), overwrite it (--overwrite), or"
                        " choose another folder (--output)"
                    )
            except BaseException:
                lock.release()
                raise
    try:
        yield
    except BaseException:
        if lock is not None:
            lock.release()
        remove_empty_folders(created_folders)
        raise
    if lock is not None:
        lock.release()


def missing_folders(folder: Path) -> list[Path]:
    """Return the folder and its parents that do not exist, the innermost first."""
    return [path for path in (folder, *folder.parents) if not os.path.exists(path)]  # False without permission


def remove_empty_folders(folders: Sequence[Path]) -> None:
    """Remove the folders that are empty."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


@contextmanager
def discard_run_if_untrained(world: Transport, folder: Path | None, is_untrained: Callable[[], bool]) -> Iterator[None]:
    """Remove the files of a run that a DataError ends before its first step, so that the folder counts as unused."""
    try:
        yield
    except DataError:
        if folder is not None and world.rank == 0 and is_untrained() and not any(folder.glob(STAGE_CHECKPOINTS)):
            remove_run_files(folder)
        raise


def has_results(folder: Path) -> bool:
    """Return whether the folder has results of a run: a checkpoint, or the record of an epoch."""
    with convert_file_errors(folder, "cannot be read"):
        return any(
            _count_lines_up_to_two(folder / name) > untrained for name, untrained in LOG_LINES_BEFORE_TRAINING.items()
        ) or any(path for name in CHECKPOINT_PATTERNS for path in folder.glob(name))


def _count_lines_up_to_two(log: Path) -> int:
    """Return the number of lines of a file, at most 2."""
    if not log.is_file():
        return 0
    with open_regular(log, log.parent) as file:
        return sum(bool(file.readline(MAX_READ_LINE_BYTES)) for _ in range(2))


def is_empty_or_untrained(folder: Path) -> bool:
    """Return whether the folder is empty, or has a run without results."""
    if has_results(folder):
        return False
    other_paths = [
        path
        for path in folder.iterdir()
        if path.name not in (GENERATIONS, SERVER_FOLDER)
        and not path.name.startswith(LOCK)
        and path.suffix != ".partial"
    ]
    return not other_paths or (folder / "environment.json").exists()


def remove_run_files(folder: Path, keep: Collection[str] = ()) -> None:
    """Remove the files of an earlier run except those in `keep`.

    Checkpoints are removed last: until then, the run can be resumed.
    """
    for name in (*(name for name in RUN_FILES if name not in (*CHECKPOINT_PATTERNS, *keep)), *CHECKPOINT_PATTERNS):
        for path in folder.glob(name):
            _remove_file(path)


def remove_partial_files(folder: Path) -> None:
    """Remove partially written files of an earlier run."""
    for name in RUN_FILES:
        for path in folder.glob(partial_path(Path(name)).name):
            _remove_file(path)


def _remove_file(path: Path) -> None:
    with convert_file_errors(path, "cannot be removed", "check permissions, or choose another output folder"):
        path.unlink(missing_ok=True)


def output_files(folder: Path) -> list[Path]:
    """Return the existing files of a run."""
    return [path for name in RUN_FILES for path in sorted(folder.glob(name)) if path.is_file()]
