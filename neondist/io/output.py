"""The folder that a run writes to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ..comm import Transport, all_or_none
from ..errors import ConfigError, DataError
from .files import file_errors, make_folder, partial
from .lock import NAME as LOCK
from .lock import FolderLock
from .regular_file import open_regular

CHECKPOINT = "checkpoint.h5"
EVALUATIONS = "evaluations.jsonl"
TASKS = "tasks.sqlite"
RECOVERY = "servers"
"""The folder, in that of a run, of the checkpoints of its servers, with its queue."""
BEST = "checkpoint_best.h5"
WEIGHTS = "weights.safetensors"
COMPLETE = "complete.json"
"""The mark of a run that has nothing left to train."""
STAGES = "pretrain_*.h5"
CHECKPOINTS = (STAGES, "checkpoint-*.h5", CHECKPOINT)
GENERATIONS = "generations.jsonl"
LOGS = {"metrics.jsonl": 0, "pretrain.jsonl": 1}
"""The logs of epochs, and how many records of each are written before anything is trained and can be resumed."""
LONGEST = 1 << 24
"""Bytes of a line that are read at most."""
FILES = (
    "experiment.yaml",
    "environment.json",
    "strategy.yaml",
    "pretrain.jsonl",
    STAGES,
    "reconstructions_*.png",
    "filters_*.png",
    "stimuli_*.png",
    "metrics.jsonl",
    EVALUATIONS,
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
"""All that a run may write; * stands for the number of a stage or of a step."""


def prepare(world: Transport, folder: Path, resume: bool | str = False, overwrite: bool = False) -> None:
    """Make the folder and find out whether a run may write there, on rank 0; collective.

    Raises
    ------
    UserError
        On every rank: OutputError if nothing can be written there, or another run does; ConfigError if an earlier run
        would be lost; DataError if there is nothing to resume.
    """
    with held(world, folder, resume, overwrite):
        pass


@contextmanager
def held(world: Transport, folder: Path, resume: bool | str = False, overwrite: bool = False) -> Iterator[None]:
    """Have the folder for one run alone while the block runs; collective. It raises what `prepare` does."""
    lock: FolderLock | None = None
    made: list[Path] = []
    with all_or_none(world):
        if world.rank == 0:
            made = missing(folder)
            if resume is True and not folder.exists():
                raise DataError(f"{folder}: no run to resume; check --output, or give --resume auto")
            make_folder(folder)
            lock = FolderLock(folder)
            try:
                if not (resume or overwrite) and has_run(folder):
                    raise ConfigError(
                        f"output: {folder} has a run already; continue it with --resume, replace it with"
                        " --overwrite, or choose another folder with --output"
                    )
            except BaseException:
                lock.release()
                raise
    try:
        yield
    except BaseException:
        if lock is not None:
            lock.release()
        remove_empty(made)
        raise
    if lock is not None:
        lock.release()


def missing(folder: Path) -> list[Path]:
    """Return the folder and those above it that do not exist, the innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove folders that are empty."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


@contextmanager
def discarded_untrained(world: Transport, folder: Path | None, is_untrained: Callable[[], bool]) -> Iterator[None]:
    """Remove the files of a run that bad data end before its first step, so that they do not count as a run."""
    try:
        yield
    except DataError:
        if folder is not None and world.rank == 0 and is_untrained() and not any(folder.glob(STAGES)):
            clear(folder)
        raise


def has_run(folder: Path) -> bool:
    """Return whether there is anything of a run that is worth keeping: a checkpoint, or the record of an epoch."""
    with file_errors(folder, "cannot be read"):
        return any(_lines(folder / name) > untrained for name, untrained in LOGS.items()) or any(
            path for name in CHECKPOINTS for path in folder.glob(name)
        )


def _lines(log: Path) -> int:
    """Return how many lines a file has, up to two."""
    if not log.is_file():
        return 0
    with open_regular(log, log.parent) as file:
        return sum(bool(file.readline(LONGEST)) for _ in range(2))


def is_new(folder: Path) -> bool:
    """Return whether a run has begun here, or was about to, and is worth nothing yet."""
    if has_run(folder):
        return False
    others = [
        path
        for path in folder.iterdir()
        if path.name not in (LOCK, GENERATIONS, RECOVERY) and path.suffix != ".partial"
    ]
    return not others or (folder / "environment.json").exists()


def clear(folder: Path, keep: Collection[str] = ()) -> None:
    """Remove the files of an earlier run but those to `keep`, and nothing else.

    Its checkpoint goes last: until then the run can be resumed.
    """
    for name in (*(name for name in FILES if name not in (*CHECKPOINTS, *keep)), *CHECKPOINTS):
        for path in folder.glob(name):
            _remove(path)


def tidy(folder: Path) -> None:
    """Remove what an earlier run has left half written."""
    for name in FILES:
        for path in folder.glob(partial(Path(name)).name):
            _remove(path)


def _remove(path: Path) -> None:
    with file_errors(path, "cannot be removed", "check permissions, or choose another folder with --output"):
        path.unlink(missing_ok=True)


def present(folder: Path) -> list[Path]:
    """Return the files of a run that are there."""
    return [path for name in FILES for path in sorted(folder.glob(name)) if path.is_file()]
