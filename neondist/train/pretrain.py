"""Unsupervised stage-wise pretraining before supervised training."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ..arrays.namespace import to_host
from ..comm import Transport
from ..data import Dataset, Split
from ..metrics import Metric
from ..models import Autoencoder, AutoencoderReconstruction, Model, TrainableModel
from ..registry.arguments import type_checked
from .callbacks.checkpoint import Checkpoint, CheckpointSchedule, restore_checkpoint
from .callbacks.hook import Hook, open_hooks
from .callbacks.metrics_log import MetricsLog
from .callbacks.stage_pictures import PretrainingPictures
from .loop import evaluate_validation_and_test, train_loop
from .state import EpochRecord, Stop, TrainState


@type_checked
def pretrain(model: Model, dataset: Dataset, batch_size: int = 128, hooks: Iterable[Hook] = ()) -> list[EpochRecord]:
    """Train every stage of a model for its `num_pretrain_epochs`. Collective; all ranks get the same records.

    The loop is that of `nd.fit`, with the stage's autoencoder as the model, which hooks access as `run.model`.

    Parameters
    ----------
    model : GB
        A model built for the grid on which the data set was opened. Models without stages are not trained.
    dataset : Dataset
        An opened data set.
    batch_size : int
        Samples per update, over all replicas.
    hooks : iterable of Hook

    Returns
    -------
    list of EpochRecord
        One record per stage and epoch; epoch 0 is the state before training. 'test_loss' is the mean cost of a test
        sample, 'reconstruction_error' the fraction of the input's variance not reconstructed.
    """
    history: list[EpochRecord] = []
    hooks = list(hooks)
    model.grid.check("pretrain", {"batch_size": batch_size})
    with open_hooks(hooks):
        for stage in model.stages if model.num_pretrain_epochs else ():
            run = TrainState(stage, dataset, model.num_pretrain_epochs, batch_size, history=history)
            _pretrain_stage(run, stage, hooks, None)
            history = run.history
    return history


def pretrain_stages(
    model: TrainableModel,
    dataset: Dataset,
    batch_size: int,
    hooks: Iterable[Hook],
    folder: Path | None,
    resumed_pretraining_stage: int,
    checkpoint_schedule: CheckpointSchedule,
    yaml_text: str | None,
) -> Stop | None:
    """Pretrain a model's stages, resuming at stage `resumed_pretraining_stage` unless it is 0, and write to `folder`.

    Only hooks that run during pretraining are called. Returns the reason for an early stop, if any. Collective.
    """
    hooks = [hook for hook in hooks if hook.runs_during_pretraining]
    history: list[EpochRecord] = []
    for number, stage in enumerate(model.stages if model.num_pretrain_epochs else (), 1):
        if number >= resumed_pretraining_stage:
            run = TrainState(stage, dataset, model.num_pretrain_epochs, batch_size, history=history)
            writer_hooks: list[Hook] = []
            if folder is not None:
                checkpoint = Checkpoint(folder / f"pretrain_{number}.h5", checkpoint_schedule, yaml_text)
                writer_hooks = [MetricsLog(folder / "pretrain.jsonl"), checkpoint, PretrainingPictures(folder)]
            resumed_path = folder / f"pretrain_{number}.h5" if folder and number == resumed_pretraining_stage else None
            _pretrain_stage(run, stage, [*hooks, *writer_hooks], resumed_path)
            if run.stop is not None:
                return run.stop
            history = run.history
    return None


def find_interrupted_stage(world: Transport, folder: Path) -> int:
    """Return the stage at which an interrupted run stopped, or 0 if it was not in pretraining. Collective."""
    stage = 0
    if world.rank == 0 and not (folder / "checkpoint.h5").exists():
        while (folder / f"pretrain_{stage + 1}.h5").exists():
            stage += 1
    return int(world.bcast(stage))


def _pretrain_stage(run: TrainState, stage: Autoencoder, hooks: list[Hook], resumed_checkpoint: Path | None) -> None:
    stage.begin_epoch(0)
    if resumed_checkpoint is not None:
        restore_checkpoint(resumed_checkpoint, run)
    metrics: list[Any] = [ReconstructionErrorMetric(stage, run.dataset.train.without_augmentation(), run.batch_size)]
    if resumed_checkpoint is None:
        evaluation = evaluate_validation_and_test(run, metrics)
        run.history = [*run.history, EpochRecord(stage=stage.name, epoch=0, step=0, **evaluation)]
    train_loop(run, [StageNameRecorder(stage.name), *hooks], metrics)
    stage.close()


class StageNameRecorder(Hook):
    """Add the stage's name to its records."""

    def __init__(self, stage_name: str) -> None:
        self.stage_name = stage_name

    def after_epoch(self, run: TrainState) -> None:
        """Add the name to the epoch's record."""
        run.history[-1] = EpochRecord(stage=self.stage_name, **run.history[-1])


class ReconstructionErrorMetric:
    """‖x − Wᵀ(Wx)‖² divided by ‖x − mean of x‖², both summed over samples and cells; the mean is taken per cell.

    A metric for `evaluate` of AutoencoderReconstruction outputs; creation is collective.

    Parameters
    ----------
    stage : Autoencoder
    split : Split
        Samples over which the mean is computed.
    batch_size : int
        Samples per pass, over all replicas.
    """

    name, needs_numpy = "reconstruction_error", False
    create_meter, result = Metric.create_meter, Metric.result  # not inherited: a subclass would get a YAML tag

    def __init__(self, stage: Autoencoder, split: Split, batch_size: int) -> None:
        grid, cell_sums = stage.grid, np.zeros(stage.output.local_shape[1:])
        for start in range(0, len(split), batch_size):
            sample_numbers = np.arange(start, min(start + batch_size, len(split)))
            lo, hi = grid.sample_range(len(sample_numbers))
            x = to_host(stage.compute_stage_input(split.images(sample_numbers[lo:hi], stage.dtype)))
            cell_sums += x.sum(axis=0, dtype=np.float64)
        grid.replica_comm.allreduce(cell_sums)
        self.cell_means = (cell_sums / max(1, len(split))).astype(stage.dtype)

    def local_sums(self, y: AutoencoderReconstruction, targets: np.ndarray | None = None) -> tuple[float, float]:
        """Return the two sums over the local cells."""
        return _sum_of_squares(to_host(y.residual)), _sum_of_squares(to_host(y.x) - self.cell_means)


def _sum_of_squares(array: np.ndarray) -> float:
    return float(np.sum(array * array, dtype=np.float64))
