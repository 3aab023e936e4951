"""Execution of an experiment's run in a locked folder: data, model, hooks, training and the files of the run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..backends import backend_name, precision_note
from ..comm import ProcessGrid, all_or_none
from ..io.checkpoint import SnapshotStore
from ..io.files import write_text
from ..io.output import (
    CHECKPOINT,
    CLASS_NAMES,
    COMPLETE,
    GENERATIONS,
    discard_run_if_untrained,
    output_files,
    remove_partial_files,
    remove_run_files,
)
from ..plan import Plan
from ..system.job import GENERATION_VARIABLE
from ..system.memory import convert_memory_error
from .callbacks.best_epoch import BestCheckpointAndEarlyStopping
from .callbacks.checkpoint import Checkpoint
from .callbacks.completion_marker import CompletionMarker
from .callbacks.curves_picture import CurvesPicture
from .callbacks.hook import Hook
from .callbacks.ledger_log import LedgerLog
from .callbacks.master_statistics import JobStatisticsHook
from .callbacks.metrics_log import MetricsLog
from .callbacks.snapshots import Snapshots, open_snapshot_store
from .callbacks.tiles_picture import TilesPicture
from .callbacks.worst_samples import WorstSamples
from .class_names import format_class_names
from .consistency import check_same_data_on_ranks
from .loop import train_loop
from .pretrain import pretrain_stages
from .starting_point import initialise_or_resume_run
from .state import EpochRecord, Stop, TrainState
from .validate import Experiment

if TYPE_CHECKING:
    from ..services.training import AsyncWorkerSpec, ServerUpdate


@dataclass(frozen=True)
class RunResult:
    """Results of a run.

    Attributes
    ----------
    files : list of Path
        Written files.
    history : list of EpochRecord
        One record per complete epoch.
    stop : Stop or None
        Reason and exit code, if a hook or a signal has stopped the run.
    """

    files: list[Path] = field(default_factory=list)
    history: list[EpochRecord] = field(default_factory=list)
    stop: Stop | None = None


def run_in_locked_folder(
    experiment: Experiment,
    plan: Plan,
    grid: ProcessGrid,
    folder: Path | None,
    resume: bool | str,
    init_from: str | Path | None,
    yaml_text: str | None,
    hooks: list[Hook],
    snapshot: int | Literal["auto"] | None,
    worker: AsyncWorkerSpec | None,
) -> RunResult:
    """Run a validated experiment in a locked folder."""
    model, dataset = experiment.model, experiment.dataset
    dataset.open(grid.with_tiles(plan.overlapping_tiles), checked=True, augment=experiment.augment, seed=model.seed)
    check_same_data_on_ranks(grid, dataset)
    with all_or_none(grid.world), convert_memory_error("model", "fewer or smaller layers"):
        model.build(dataset.sample_shape, experiment.batch_size, grid, plan)
    model.step = model.steps_without_optimizer = 0
    run = TrainState(model, dataset, experiment.epochs, experiment.batch_size)
    run.start_messages += _start_messages(experiment, plan)
    under_supervisor = GENERATION_VARIABLE in os.environ
    store = open_snapshot_store(folder, grid.world) if folder is not None and (resume or under_supervisor) else None
    start = initialise_or_resume_run(run, folder, resume, init_from, store)
    model.remote_update = remote = _connect_to_servers(experiment, run, grid, worker, resume)
    # first, so that all other hooks see the completed record
    statistics = [JobStatisticsHook(worker)] if folder is not None and worker is not None and worker.index == 0 else []
    writers: list[Hook] = []
    if folder is not None:
        _write_initial_files(experiment, grid, folder, start.resumed, yaml_text, under_supervisor or worker is not None)
        checkpoint = Checkpoint(folder / CHECKPOINT, experiment.checkpoint, yaml_text)
        with_pictures = worker is None or worker.index == 0
        writers = _file_writing_hooks(folder, checkpoint, store, snapshot, with_pictures)
    with (
        closing(dataset),
        nullcontext() if remote is None else closing(remote),
        convert_memory_error("model", "smaller batches, or fewer or smaller layers"),
    ):
        if experiment.best is not None:
            best_hook = BestCheckpointAndEarlyStopping(experiment.best, experiment.metrics, folder, yaml_text)
            best_hook.end_if_already_stopped_early(run)
            writers.insert(0, best_hook)  # before the checkpoint from which a run resumes
        for logger in experiment.loggers:
            logger.set_run_folder(folder, yaml_text)
        writers.extend(experiment.loggers)
        if not start.pretraining_complete:
            pretraining_args = start.resumed_pretraining_stage, experiment.checkpoint, yaml_text
            run.stop = pretrain_stages(model, dataset, experiment.batch_size, hooks, folder, *pretraining_args)
        if run.stop is None:
            is_new = not (start.resumed or under_supervisor or worker)
            with discard_run_if_untrained(grid.world, folder, lambda: is_new and run.step == 0):
                train_loop(run, [*statistics, *hooks, *writers], experiment.metrics)
            if folder is not None:
                model.export(folder)
    files = output_files(folder) if folder is not None and grid.rank == 0 else []
    return RunResult(grid.world.bcast(files), run.history, run.stop)


def _start_messages(experiment: Experiment, plan: Plan) -> Iterator[str]:
    """Yield messages to the user before training."""
    model = experiment.model
    if plan.is_streamed and model.memory is None:
        yield f"a step does not fit into the available memory; {plan.stream}"
    if len(experiment.dataset.splits) == 1:
        yield "no validation or test split: only the training loss is reported"
    if note := precision_note(model.backend, model.precision):
        yield note


def _connect_to_servers(
    experiment: Experiment, run: TrainState, grid: ProcessGrid, worker: AsyncWorkerSpec | None, resume: bool | str
) -> ServerUpdate | None:
    """Return a worker's connection to its servers; without servers, count the updates in the checkpoint as steps."""
    model, updates = experiment.model, run.server_updates
    if worker is None or experiment.server_strategy is None:
        if updates is not None:  # the checkpoint is of a run with servers
            model.step, model.steps_without_optimizer = updates, 0
        return None
    from ..services.master_client import MasterClient
    from ..services.training import ServerUpdate  # gRPC

    settings = {"records": run.epoch_size, "batch_size": run.batch_size, "epochs": run.epochs, "seed": model.seed}
    is_first = worker.index == 0
    run.master_client = MasterClient(worker.master, worker.token, worker.name, grid.world, settings, is_first)
    minibatches = run.master_client.minibatches_before(run.epoch, run.samples_seen)
    samples = run.epoch * run.epoch_size + run.samples_seen
    updates = model.step - model.steps_without_optimizer if updates is None else updates
    arguments = grid.world, updates, run.master_client, minibatches, samples, is_first or not resume
    return ServerUpdate(worker, experiment.server_strategy, model, *arguments)


def _write_initial_files(
    experiment: Experiment,
    grid: ProcessGrid,
    folder: Path,
    resume: bool,
    yaml_text: str | None,
    under_supervisor: bool,
) -> None:
    """Remove leftovers from the folder and write the files that are known before training.

    Files of an earlier run are removed only after new ones are on disk, so that the earlier run survives a full disk.
    """
    from ..io.environment import describe_environment, to_json  # slow import

    model = experiment.model
    dtype_fields = {"dtype": str(model.dtype), "precision": model.precision.name}
    env = describe_environment(grid, backend=backend_name(model.backend), **dtype_fields, seed=model.seed)
    with all_or_none(grid.world):
        if grid.rank == 0:
            remove_partial_files(folder)
            texts = {"environment.json": to_json(env)} | ({} if yaml_text is None else {"experiment.yaml": yaml_text})
            chosen = model.compiled.parameters.strategy if model.remote_update is None else model.remote_update.strategy
            texts["strategy.yaml"] = chosen.to_yaml()
            if names := format_class_names(experiment.dataset):
                texts[CLASS_NAMES] = names
            for name, text in texts.items():
                write_text(folder / name, text)
            if not resume:
                remove_run_files(folder, keep=[*texts, *([GENERATIONS] if under_supervisor else [])])


def _file_writing_hooks(
    folder: Path, checkpoint: Checkpoint, snapshot_store: SnapshotStore | None,
    snapshot_interval: int | Literal["auto"] | None, with_pictures: bool,
) -> list[Hook]:  # fmt: skip
    """Return the hooks that write files; the log is written before the checkpoint from which a run resumes."""
    picture_hooks = [
        CurvesPicture(folder / "curves.png"),
        TilesPicture(folder / "tiles.png"),
        WorstSamples(folder / "worst.npz"),
    ]
    return [
        MetricsLog(folder / "metrics.jsonl"),
        LedgerLog(folder / "ledger.jsonl"),
        checkpoint,
        CompletionMarker(folder / COMPLETE),
        *([Snapshots(snapshot_store, snapshot_interval, checkpoint)] if snapshot_store is not None else []),
        *(picture_hooks if with_pictures else []),
    ]
