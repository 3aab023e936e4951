"""Preparation of a run: messages, connection to parameter servers, initial files, and hooks that write files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..backends import backend_name, precision_note
from ..comm import ProcessGrid, all_or_none
from ..io.checkpoint import SnapshotStore
from ..io.files import write_text
from ..io.output import CLASS_NAMES, COMPLETE, GENERATIONS, remove_partial_files, remove_run_files
from ..plan import Plan
from .callbacks.checkpoint import Checkpoint
from .callbacks.completion_marker import CompletionMarker
from .callbacks.curves_picture import CurvesPicture
from .callbacks.hook import Hook
from .callbacks.ledger_log import LedgerLog
from .callbacks.metrics_log import MetricsLog
from .callbacks.snapshots import Snapshots
from .callbacks.tiles_picture import TilesPicture
from .callbacks.worst_samples import WorstSamples
from .class_names import format_class_names
from .state import TrainState
from .validate import Experiment

if TYPE_CHECKING:
    from ..services.training import AsyncWorkerSpec, ServerUpdate


def start_messages(experiment: Experiment, plan: Plan) -> Iterator[str]:
    """Yield messages to the user before training."""
    model = experiment.model
    if plan.is_streamed and model.memory is None:
        yield f"a step does not fit into the available memory; {plan.stream}"
    yield from experiment.dataset.warnings
    if len(experiment.dataset.splits) == 1:
        yield "no validation or test split: only the training loss is reported"
    if note := precision_note(model.backend, model.precision):
        yield note


def connect_to_servers(
    experiment: Experiment, run: TrainState, grid: ProcessGrid, worker: AsyncWorkerSpec | None, resume: bool | str
) -> ServerUpdate | None:
    """Return a worker's connection to its servers; without servers, count the updates of an earlier run's servers."""
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


def write_initial_files(
    experiment: Experiment, grid: ProcessGrid, folder: Path, resume: bool, yaml_text: str | None, under_supervisor: bool
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


def file_writing_hooks(
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
