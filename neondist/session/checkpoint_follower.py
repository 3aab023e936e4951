"""Continuous evaluation of all checkpoints of a job, once each and in order of steps, until the job is complete."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..comm import ProcessGrid, Transport, all_or_none
from ..errors import ConfigError, DataError
from ..io.checkpoint import list_step_checkpoints, open_checkpoint
from ..io.checkpoint.read import CheckpointReader
from ..io.files import make_folder
from ..io.output import CHECKPOINT, CHECKPOINT_PATTERNS, COMPLETE, lock_folder
from ..terminal.console import emit, say
from ..train import EpochRecord, FitExperiment, Hook, TrainState
from ..train.callbacks.checkpoint import RunProgress, read_run_progress
from ..train.callbacks.hook import call_error_hooks
from ..train.callbacks.loggers import MetricLogger
from ..train.callbacks.metrics_log import MetricsLog, record_json_line
from ..train.checkpoint_evaluation import load_weights_and_normalisation, open_model_and_dataset
from ..train.html_report import read_epoch_records
from ..train.loop import evaluate_validation_and_test

EVALUATION_FOLDER = "evaluation"
"""Name of the folder of the results, in the folder of the checkpoints."""
METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class UnevaluatedCheckpoint:
    """A checkpoint that has not been evaluated yet.

    Attributes
    ----------
    path : the file
    file_identity : inode number and modification time, which distinguish the file from a later one of the same name
    """

    path: Path
    file_identity: tuple[int, int]


class CheckpointFollower:
    """Follower of the checkpoints of a job as they are written; its methods are collective.

    Parameters
    ----------
    folder : path
        Folder of the job, which may not exist yet.
    last_step : int
        The last evaluated step, -1 for none.
    interval : float
        Polling interval in seconds.
    max_time : float, optional
        Time limit in seconds, from now.
    clock, sleep : callable
        Replacements for time.monotonic and time.sleep, for tests.
    """

    def __init__(
        self,
        folder: Path,
        world: Transport,
        last_step: int = -1,
        interval: float = 30.0,
        max_time: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.folder, self.world, self.last_step, self.interval = folder, world, last_step, interval
        self.clock, self.sleep = clock, sleep
        self.deadline = math.inf if max_time is None else clock() + max_time
        self._seen_files: set[tuple[int, int]] = set()
        self._reported_paths: set[Path] = set()
        self._is_waiting = False

    def wait_for_next(self) -> UnevaluatedCheckpoint | None:
        """Return the next checkpoint, once there is one; None if the job is complete, or at the time limit."""
        while True:
            result: tuple[UnevaluatedCheckpoint | None, bool] = (None, False)
            with all_or_none(self.world):
                if self.world.rank == 0:
                    complete = (self.folder / COMPLETE).exists()  # before listing: a complete job writes no more files
                    result = self._find_next(), complete or self.clock() >= self.deadline
                    if result[0] is None and self.last_step < 0 and not (complete or self._is_waiting):
                        say(f"waiting for the first checkpoint in {self.folder}", sys.stderr)
                        self._is_waiting = True
            checkpoint, is_over = self.world.bcast(result)
            if checkpoint is not None or is_over:
                return checkpoint
            self.sleep(max(0.0, min(self.interval, self.deadline - self.clock())))

    def process(
        self, checkpoint: UnevaluatedCheckpoint, action: Callable[[CheckpointReader, RunProgress], None]
    ) -> bool:
        """Call `action` on a checkpoint from `wait_for_next`; return False if it is old, damaged or gone.

        Damaged files, such as those being copied, are reported once, and evaluated later if they change.

        Raises
        ------
        DataError
            On every rank: if the file does not match the model.
        """
        self._seen_files.add(checkpoint.file_identity)
        is_intact = False
        try:
            with open_checkpoint(checkpoint.path, self.world) as file:
                is_intact, progress = True, read_run_progress(file)
                if progress.step <= self.last_step:
                    if self.world.rank == 0:
                        self._report_restarted_run(progress.step)
                    return False
                action(file, progress)
        except DataError as error:
            exists = self.world.bcast(checkpoint.path.exists())
            if is_intact and exists:
                raise
            if self.world.rank == 0 and not exists:
                name = checkpoint.path.name
                say(f"{name} was removed before evaluation; keep more checkpoints, or poll more often", sys.stderr)
            elif self.world.rank == 0 and checkpoint.path not in self._reported_paths:
                say(f"waiting for the next checkpoint: {error}", sys.stderr)
                self._reported_paths.add(checkpoint.path)
            return False
        self._reported_paths.discard(checkpoint.path)
        self.last_step = progress.step
        return True

    def _find_next(self) -> UnevaluatedCheckpoint | None:
        """Return the next checkpoint, if any; files named by step are preferred if the job keeps several."""
        path = self.folder / CHECKPOINT
        file_by_step = {step: file for file in list_step_checkpoints(path) if (step := _step_in_name(file)) is not None}
        for step in sorted(file_by_step):
            if step > self.last_step and (checkpoint := self._create_unevaluated(file_by_step[step])) is not None:
                return checkpoint
        if file_by_step:
            self._report_restarted_run(max(file_by_step))
            return None
        return self._create_unevaluated(path)

    def _report_restarted_run(self, newest_step: int) -> None:
        """Report once that the run was started over, if its newest checkpoint precedes the last evaluated one."""
        if newest_step < self.last_step and self.folder not in self._reported_paths:
            say(
                f"{self.folder}: the newest checkpoint is of step {newest_step}, but evaluations continue after step"
                f" {self.last_step}; if the run was started over, remove their {METRICS_FILE} and evaluate again",
                sys.stderr,
            )
            self._reported_paths.add(self.folder)

    def _create_unevaluated(self, path: Path) -> UnevaluatedCheckpoint | None:
        try:
            status = path.stat()
        except FileNotFoundError:
            return None
        checkpoint = UnevaluatedCheckpoint(path, (status.st_ino, status.st_mtime_ns))
        return None if checkpoint.file_identity in self._seen_files else checkpoint


def _step_in_name(path: Path) -> int | None:
    match = re.search(r"-([0-9]+)$", path.stem)
    return None if match is None else int(match[1])


class EvaluationRecorder:
    """Recorder of evaluation results in metrics.jsonl; hooks are called as after an epoch, and loggers plot by step.

    Parameters
    ----------
    run : TrainState
        Its history receives one record per checkpoint.
    folder : path
        Folder of metrics.jsonl, whose existing records are kept, and of no other files of a run. Lock it.
    """

    def __init__(self, run: TrainState, folder: Path, hooks: Iterable[Hook] = ()) -> None:
        self.run, self.hooks = run, [MetricsLog(folder / METRICS_FILE), *hooks]
        for hook in self.hooks:
            if isinstance(hook, MetricLogger):
                hook.set_run_folder(folder)
                hook.step_field = "step"
        world = run.grid.world
        existing_records: list[EpochRecord] = []
        with all_or_none(world):
            if world.rank == 0:
                make_folder(folder)
                if any(path for name in CHECKPOINT_PATTERNS for path in folder.glob(name)):
                    raise ConfigError(
                        f"--output {folder}: evaluations would extend {METRICS_FILE} of a run; give another folder"
                    )
                existing_records = read_epoch_records(folder / METRICS_FILE, tolerate_incomplete_end=True)
        run.history = world.bcast(existing_records)

    @property
    def last_step(self) -> int:
        """The last evaluated step; -1 for none."""
        return max((record.get("step", -1) for record in self.run.history), default=-1)

    def call_before_run_hooks(self) -> None:
        """Call `before_run` of the hooks. Collective."""
        for hook in self.hooks:
            hook.before_run(self.run)

    def add_result(self, progress: RunProgress, results: Mapping[str, Any], seconds: float) -> EpochRecord:
        """Record the results of a checkpoint, call the hooks, and return the record. Collective."""
        run = self.run
        run.epoch, run.samples_seen = progress.epoch, progress.samples_seen
        run.history.append(EpochRecord(epoch=progress.epoch, step=progress.step, **results, seconds=seconds))
        for hook in self.hooks:
            hook.after_epoch(run)
        return run.history[-1]

    def call_final_hooks(self, error: BaseException | None = None) -> None:
        """Call `after_run` of the hooks, or `on_error`."""
        if error is not None:
            call_error_hooks(self.hooks, self.run, error)
            return
        for hook in self.hooks:
            hook.after_run(self.run)


def follow_checkpoints(
    experiment: FitExperiment,
    folder: str | Path,
    grid: ProcessGrid | None = None,
    output: str | Path | None = None,
    every: float = 30.0,
    max_time: float | None = None,
) -> list[EpochRecord]:
    """Evaluate each checkpoint of a job once, in order, until the job is complete. Collective.

    Parameters
    ----------
    experiment : FitExperiment
        Experiment with the model, data, metrics and loggers.
    folder : path
        Folder of the checkpoints of a run or session.
    grid : ProcessGrid, optional
        Default: `experiment.open_grid()`.
    output : path, optional
        Folder of metrics.jsonl and loggers; default: 'evaluation' in `folder`. Steps already in its metrics.jsonl
        are skipped.
    every : float
        Polling interval in seconds.
    max_time : float, optional
        Time limit in seconds.

    Returns
    -------
    list of EpochRecord
        One record per checkpoint evaluated by this call: epoch, step, losses and metrics of the validation and the test
        split, seconds.

    Raises
    ------
    UserError
        As in `evaluate_checkpoint`.
    """
    folder = Path(folder)
    output_folder = folder / EVALUATION_FOLDER if output is None else Path(output)
    with (
        open_model_and_dataset(experiment, grid) as (model, dataset),
        lock_folder(model.grid.world, output_folder, "auto"),
    ):
        world = model.grid.world
        state = TrainState(model, dataset, experiment.epochs, experiment.batch_size)
        recorder = EvaluationRecorder(state, output_folder, experiment.loggers)
        num_earlier = len(state.history)
        follower = CheckpointFollower(folder, world, recorder.last_step, every, max_time)

        def evaluate(file: CheckpointReader, progress: RunProgress) -> None:
            start_time = time.perf_counter()
            load_weights_and_normalisation(file, model, dataset)
            record = recorder.add_result(
                progress, evaluate_validation_and_test(state, experiment.metrics), time.perf_counter() - start_time
            )
            if world.rank == 0:
                emit(record_json_line(record).rstrip())

        recorder.call_before_run_hooks()
        try:
            while (checkpoint := follower.wait_for_next()) is not None:
                follower.process(checkpoint, evaluate)
        except BaseException as error:
            recorder.call_final_hooks(error)
            raise
        recorder.call_final_hooks()
        return state.history[num_earlier:]
