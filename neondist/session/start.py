"""Where a run begins: at first weights, at those of a checkpoint, or in the middle of an earlier run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..checkpoint import kept_files, opened, take
from .checkpoint import restore
from .output import CHECKPOINT
from .pretrain import last_stage
from .run import Run


@dataclass(frozen=True)
class Start:
    """How an experiment begins.

    Attributes
    ----------
    resumed : whether the files of the earlier run stay
    stage : the stage of pretraining whose checkpoint is to be read, 0 for none
    pretrained : whether pretraining is over
    """

    resumed: bool = False
    stage: int = 0
    pretrained: bool = False


def start(run: Run, folder: Path | None, resume: bool, init_from: str | Path | None) -> Start:
    """Give `run` the weights, and the position, that it begins with; collective.

    Raises
    ------
    DataError
        On every rank: a file is missing, damaged or does not fit.
    """
    if init_from is not None:
        with opened(Path(init_from), run.grid.world) as file:
            run.notes.append(f"weights from {init_from}: {take(file, run.model.kept_arrays()['model'])}")
    if not resume or folder is None:
        return Start()
    stage = last_stage(run.grid.world, folder) if run.model.num_pretrain_epochs else 0
    if stage:
        return Start(True, stage)
    if _ended_before_its_first_checkpoint(run, folder):
        run.notes.append("the earlier run ended before its first checkpoint: it begins anew")
        return Start()
    restore(folder / CHECKPOINT, run)
    return Start(True, pretrained=True)


def _ended_before_its_first_checkpoint(run: Run, folder: Path) -> bool:
    """Tell whether the folder shows the beginning of a run, and no more; collective."""
    log = folder / "metrics.jsonl"
    begun = (folder / "environment.json").exists() and not (log.exists() and log.stat().st_size)
    files = (folder / CHECKPOINT).exists() or kept_files(folder / CHECKPOINT)
    return bool(run.grid.world.bcast(begun and not files))
