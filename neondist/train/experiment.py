"""Experiments: a model, a data set, training settings, and their run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..arrays.precision import ComputePrecision, PrecisionName
from ..backends import get_backend
from ..comm import ProcessGrid, all_or_none
from ..data import Dataset
from ..data.augment import Transform
from ..errors import ConfigError
from ..io.output import CHECKPOINT, discard_run_if_untrained, lock_folder, output_files
from ..metrics import Metric, Misclassification
from ..models import TrainableModel
from ..plan import Plan
from ..registry import Registered
from ..registry.arguments import type_checked
from ..registry.ranges import Count, Index
from ..strategies import Strategy, StrategyBuilder, as_strategy
from ..strategies.auto import resolve_grid
from ..system.job import GENERATION_VARIABLE
from ..system.memory import convert_memory_error, min_free_bytes_per_rank
from .callbacks.best_epoch import Best, BestCheckpointAndEarlyStopping
from .callbacks.checkpoint import Checkpoint, CheckpointSchedule
from .callbacks.hook import Hook, open_hooks
from .callbacks.loggers import MetricLogger
from .callbacks.master_statistics import JobStatisticsHook
from .callbacks.progress_bar import ProgressBar
from .callbacks.snapshots import open_snapshot_store
from .consistency import check_same_data_on_ranks, check_same_lines_on_ranks, format_settings_to_compare
from .grid_factors import apply_dist_mode, parse_grid_factors
from .loop import train_loop
from .pretrain import pretrain_stages
from .run_setup import connect_to_servers, file_writing_hooks, start_messages, write_initial_files
from .starting_point import initialise_or_resume_run
from .state import RESERVED_METRIC_NAMES, EpochRecord, Stop, TrainState
from .validate import validate_experiment

if TYPE_CHECKING:
    from ..services.training import AsyncWorkerSpec


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


class FitExperiment(Registered):
    """Train a model on a data set and evaluate it after every epoch.

    Parameters
    ----------
    dataset : Dataset
    model : Model, or neondist.torch.TorchModel
    batch_size : int
        Samples per update, over all replicas.
    epochs : int
    dist_flag : bool
        True: images are tiled over the ranks. False: serial classes in one process.
    dist_mode : {'halopar', 'vecpar', 'datapar', 'halodatapar'}, optional
        Shorthand for a grid. halopar: one replica, images tiled over all ranks; vecpar: the same, with fully connected
        layers partitioned alternately by outputs and inputs, one reduction per pair; datapar: one replica per rank;
        halodatapar: tiled replicas; `grid` sets their number, or the tiles of each.
    grid : mapping, optional
        replicas (default 1), planes (default 1), rows, cols (default: as square as the number of ranks permits).
    backend, dtype, precision, seed : optional
        Override those of the model.
    metrics : sequence of Metric, optional
        Metrics to evaluate in addition to the misclassification rate.
    augment : sequence of Transform, optional
        Random augmentations of the training images, redrawn in every epoch: nd.Flip, nd.Shift, nd.Noise and others.
    checkpoint : mapping, optional
        every_steps, every_epochs, every_minutes: interval between checkpoints, default every epoch; a checkpoint is
        always written at the end. keep: number of checkpoints to keep, default 1.
    loggers : sequence of MetricLogger, optional
        TensorBoard or MLflow, which log every epoch in addition to metrics.jsonl.
    best : Best, optional
        Keep the best epoch as checkpoint_best.h5, and stop early after `patience` epochs without improvement.
    nonfinite : {'stop', 'skip'}
        Action when a loss or gradient is not finite: raise an error that names the layer and the step, or skip the
        update.
    accumulate, sync, recompute, strips, memory, strategy : optional
        Settings for the execution of a step, as in Model; override those of the model.

    Raises
    ------
    ConfigError
        A field has the wrong type or is out of range.

    Examples
    --------
    >>> nd.FitExperiment(nd.MNIST(), model, epochs=3).run(output="runs/first")  # doctest: +SKIP
    """

    def __init__(
        self,
        dataset: Dataset,
        model: TrainableModel,
        *,
        batch_size: Count = 128,
        epochs: Count = 1,
        dist_flag: bool = True,
        dist_mode: Literal["halopar", "vecpar", "datapar", "halodatapar"] | None = None,
        grid: Mapping[str, Count | None] | None = None,
        backend: str | None = None,
        dtype: Literal["float32", "float64"] | None = None,
        precision: PrecisionName | None = None,
        seed: Index | None = None,
        metrics: Sequence[Metric] | None = None,
        augment: Sequence[Transform] | None = None,
        checkpoint: Mapping[str, float | int | None] | None = None,
        best: Best | None = None,
        loggers: Sequence[MetricLogger] | None = None,
        nonfinite: Literal["stop", "skip"] = "stop",
        accumulate: Count | None = None,
        sync: Literal["allreduce", "bucketed"] | None = None,
        recompute: bool | None = None,
        strips: Count | Literal["auto"] | None = None,
        memory: int | str | None = None,
        strategy: StrategyBuilder | Strategy | str | None = None,
    ) -> None:
        self.dataset, self.model = dataset, model
        self.batch_size, self.epochs, self.dist_flag = int(batch_size), int(epochs), bool(dist_flag)
        self.dist_mode = dist_mode
        self.grid = apply_dist_mode(dist_mode, parse_grid_factors(grid))
        if dist_mode is not None and not self.dist_flag:
            raise ConfigError(f"dist_mode: {dist_mode} requires dist_flag: true; leave out one of the two fields")
        if dist_mode == "vecpar":
            if model.vector_parallel is None:
                class_name = type(model).__name__
                raise ConfigError(
                    f"dist_mode: vecpar partitions fully connected layers, but {class_name} has none; use halopar"
                )
            model.vector_parallel = True
        self.metrics, self.augment = add_misclassification(metrics), list(augment or ())
        self.checkpoint, self.best = CheckpointSchedule.from_fields(checkpoint), best
        self.loggers = list(loggers or ())
        override_model_settings(model, backend, dtype, seed, precision)
        overrides: dict[str, object] = {"backend": backend, "dtype": dtype, "seed": seed, "precision": precision}
        overrides |= {"accumulate": accumulate, "sync": sync, "recompute": recompute}
        overrides |= {"strips": strips, "memory": memory, "strategy": strategy}
        self.overridden_model_fields = frozenset(name for name, value in overrides.items() if value is not None)
        strategy = as_strategy(strategy) if isinstance(strategy, str) else strategy
        self.grid = resolve_grid(strategy, self.grid)
        model.configure_execution(accumulate, sync, recompute, strips, memory, strategy)
        model_strategy = model.strategy
        self.server_strategy = model_strategy if model_strategy is not None and model_strategy.needs_servers else None
        if self.server_strategy is not None:
            model.strategy = None  # the ranks of a worker use no strategy
            if model.num_pretrain_epochs:
                raise ConfigError(
                    "strategy: pretraining needs sync: true and staleness: 0; set them, or num_pretrain_epochs: 0"
                )
            if model.precision.new_scaler() is not None:
                raise ConfigError(
                    "precision: float16 needs a loss scale that all ranks share in a step, but servers apply updates"
                    " one by one; set precision: bfloat16, or sync: true and staleness: 0 in the strategy"
                )
        model.nonfinite = nonfinite

    def use_servers(self) -> None:
        """Use parameter servers even for synchronous strategies with owners."""
        self.server_strategy, self.model.strategy = self.server_strategy or self.model.strategy, None

    @type_checked
    def validate(self, ranks: int = 1) -> None:
        """Check everything that can be checked before ranks are started; needs no MPI.

        Raises
        ------
        UserError
            GridError, DataError, ShapeError or ConfigError; `subject`, if set, is the object at fault.
        """
        validate_experiment(self, ranks)

    def open_grid(self, comm: Any = None) -> ProcessGrid:
        """Create the experiment's grid over all ranks of `comm` (default: all ranks). Collective."""
        return ProcessGrid(comm, **self.grid) if self.dist_flag else ProcessGrid.serial()

    @type_checked
    def run(
        self,
        grid: ProcessGrid | None = None,
        output: str | Path | None = None,
        resume: bool | str = False,
        init_from: str | Path | None = None,
        yaml_text: str | None = None,
        hooks: Iterable[Hook] | None = None,
        overwrite: bool = False,
        snapshot: Count | Literal["auto"] | None = None,
        worker: AsyncWorkerSpec | None = None,
    ) -> RunResult:
        """Train the model. Collective; the result is the same on every rank.

        Parameters
        ----------
        grid : ProcessGrid, optional
            Default: `open_grid()`.
        output : path, optional
            Folder for experiment.yaml, environment.json, strategy.yaml, metrics.jsonl, ledger.jsonl, checkpoint.h5,
            curves.png, tiles.png, worst.npz, complete.json and, for a PyTorch module, weights.safetensors. The folder
            is locked against other runs. Default: nothing is written.
        resume : bool or 'auto'
            Resume from checkpoint.h5 in `output`, written on any number of ranks, or start from scratch if the run
            has no checkpoint yet; 'auto': also start a new run if the folder contains no run.
        init_from : path, optional
            A checkpoint whose weights and running statistics initialise arrays of the same name and shape; a note lists
            missing and unused arrays.
        yaml_text : str, optional
            Text of experiment.yaml.
        hooks : iterable of Hook, optional
            Hooks called in addition to those that write the files. Default: a ProgressBar.
        overwrite : bool
            Replace the files of an earlier run in `output`; if False, an earlier run is an error.
        snapshot : int or 'auto', optional
            In a job supervised by `neondist run`: write a snapshot to the shared memory of the nodes every `snapshot`
            steps, or, with 'auto', as often as 2 % of the run time permits. A resumed run uses the newest snapshot.
        worker : AsyncWorkerSpec, optional
            For strategies with asynchronous updates: the index of this worker and the addresses of the servers.

        Raises
        ------
        UserError
            As in `validate`; OutputError if nothing can be written to `output`; ConfigError if an earlier run would be
            lost; DataError if there is no run to resume.
        """
        if resume and output is None:
            raise ConfigError("resume: requires the folder of the run to resume; set output")
        if resume not in (False, True, "auto"):
            raise ConfigError(f"resume: {resume!r} is invalid; expected True, False or 'auto'")
        if resume and overwrite:
            raise ConfigError("overwrite: pass only one of resume and overwrite (options --resume, --overwrite)")
        if resume is True and init_from is not None:
            raise ConfigError(
                "init_from: a resumed run already has weights; pass only one of resume and init_from"
                " (--resume, --init-from)"
            )
        if (self.server_strategy is None) != (worker is None):
            raise ConfigError(
                "strategy: updates on servers need workers and servers, which neondist run FILE.yaml -n P starts if P"
                " ranks form several replicas; elsewhere use sync: true and staleness: 0"
            )
        grid = self.open_grid() if grid is None else grid
        folder = None if output is None else Path(output)
        hooks = [ProgressBar()] if hooks is None else list(hooks)
        arguments = {"output": output, "resume": resume, "overwrite": overwrite, "init_from": init_from}
        grid.check("run", arguments | {"snapshot": snapshot})
        with open_hooks(hooks):
            get_free_bytes_per_rank = get_backend(self.model.backend).kernels.available_memory
            available_bytes = min_free_bytes_per_rank(grid.world, get_free_bytes_per_rank)
            with all_or_none(grid.world):  # validate everything before files of an earlier run are touched
                plan = validate_experiment(self, grid.size, grid.shape, available_bytes)
                settings = format_settings_to_compare(self, plan, resume)
            check_same_lines_on_ranks(grid.world, settings)
            with lock_folder(grid.world, folder, resume, overwrite) if folder is not None else nullcontext():
                return _run_in_locked_folder(
                    self, plan, grid, folder, resume, init_from, yaml_text, hooks, snapshot, worker
                )


def _run_in_locked_folder(
    experiment: FitExperiment,
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
    run.start_messages += start_messages(experiment, plan)
    under_supervisor = GENERATION_VARIABLE in os.environ
    store = open_snapshot_store(folder, grid.world) if folder is not None and (resume or under_supervisor) else None
    start = initialise_or_resume_run(run, folder, resume, init_from, store)
    model.remote_update = remote = connect_to_servers(experiment, run, grid, worker, resume)
    # first, so that all other hooks see the completed record
    statistics = [JobStatisticsHook(worker)] if folder is not None and worker is not None and worker.index == 0 else []
    writers: list[Hook] = []
    if folder is not None:
        write_initial_files(experiment, grid, folder, start.resumed, yaml_text, under_supervisor or worker is not None)
        checkpoint = Checkpoint(folder / CHECKPOINT, experiment.checkpoint, yaml_text)
        with_pictures = worker is None or worker.index == 0
        writers = file_writing_hooks(folder, checkpoint, store, snapshot, with_pictures)
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


def add_misclassification(metrics: Sequence[Metric] | None) -> list[Metric]:
    """Return the misclassification rate and the given metrics; raise ConfigError for duplicate or reserved names."""
    metric_by_name: dict[str, Metric] = {}
    for metric in metrics or ():
        if metric.name in metric_by_name:
            raise ConfigError(f"metrics: two metrics are named '{metric.name}'; leave one out")
        if metric.name in RESERVED_METRIC_NAMES:
            raise ConfigError(f"metrics: '{metric.name}' names another value of the records; rename the metric")
        metric_by_name[metric.name] = metric
    return list({Misclassification.name: Misclassification(), **metric_by_name}.values())


def override_model_settings(
    model: TrainableModel, backend: str | None, dtype: str | None, seed: int | None, precision: str | None = None
) -> None:
    """Override settings of the model with those of the experiment."""
    if backend is not None:
        model.backend = backend
    if dtype is not None:
        model.dtype = np.dtype(dtype)
    if precision is not None:
        model.precision = ComputePrecision(precision)
    if seed is not None:
        model.seed = int(seed)
