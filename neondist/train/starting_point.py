"""Start of an experiment: new weights, weights of a file, or an earlier run's checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..comm import Transport, all_or_none
from ..io import checkpoint
from ..io.checkpoint import SnapshotStore
from ..io.output import CHECKPOINT, has_results, is_empty_or_untrained
from .callbacks.snapshots import restore_newest_snapshot_or_checkpoint
from .pretrain import find_interrupted_stage
from .state import TrainState


@dataclass(frozen=True)
class RunStartingPoint:
    """Starting point of an experiment.

    Attributes
    ----------
    resumed : whether the files of the earlier run are kept
    resumed_pretraining_stage : pretraining stage whose checkpoint is loaded, 0 for none
    pretraining_complete : whether pretraining is complete
    """

    resumed: bool = False
    resumed_pretraining_stage: int = 0
    pretraining_complete: bool = False


def initialise_or_resume_run(
    run: TrainState,
    folder: Path | None,
    resume: bool | str,
    init_from: str | Path | None,
    snapshot_store: SnapshotStore | None,
) -> RunStartingPoint:
    """Initialise the weights and the position of `run`. Collective.

    Raises
    ------
    DataError
        On every rank: a file is missing, damaged or does not match the model.
    """
    if resume and folder is not None:
        stage = find_interrupted_stage(run.grid.world, folder) if run.model.whole_model.num_pretrain_epochs else 0
        if stage:
            return RunStartingPoint(True, stage)
        if not _starts_from_scratch(run.grid.world, folder, resume):
            restore_newest_snapshot_or_checkpoint(folder / CHECKPOINT, run, snapshot_store)
            return RunStartingPoint(True, pretraining_complete=True)
        run.start_messages.append("no earlier run has written a checkpoint: starting from scratch")
    if init_from is not None:
        with checkpoint.open_checkpoint(Path(init_from), run.grid.world) as file:
            load_summary = checkpoint.load_weights(file, run.model.checkpoint_arrays()["model"])
            run.start_messages.append(f"weights from {init_from}: {load_summary}")
    return RunStartingPoint()


def _starts_from_scratch(world: Transport, folder: Path, resume: bool | str) -> bool:
    is_new = False
    with all_or_none(world):
        if world.rank == 0:
            is_new = not has_results(folder) if resume == "auto" else is_empty_or_untrained(folder)
    return bool(world.bcast(is_new))
