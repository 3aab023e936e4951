"""Continuous evaluation: each checkpoint of a job once, in the order of their steps, until the job is complete."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..comm import ProcessGrid, Transport, all_or_none
from ..errors import DataError
from ..io.checkpoint import kept_files, opened
from ..io.checkpoint.read import Opened
from ..io.files import make_folder
from ..io.output import CHECKPOINT, COMPLETE
from ..terminal.console import emit, say
from ..train import FitExperiment, Hook, Record, TrainState
from ..train.apply import opened_for_evaluation
from ..train.callbacks.checkpoint import Progress
from ..train.callbacks.loggers import Logger
from ..train.callbacks.metrics_log import MetricsLog, line
from ..train.html_report import read_records
from ..train.loop import judge
from ..train.weights import take_weights

FOLDER = "evaluation"
"""Below the folder of the checkpoints."""
METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class Found:
    """A checkpoint that has not been evaluated.

    Attributes
    ----------
    path : the file
    state : its number and its time of change, by which it is told from a later one under the same name
    """

    path: Path
    state: tuple[int, int]


class Follower:
    """Finds the checkpoints of a job one after the other; collective.

    Parameters
    ----------
    folder : path
        Of the job, which may not be there yet.
    world : Transport
    done : int
        The last step that has been evaluated, -1 for none.
    every : float
        Seconds between two looks at the folder.
    max_time : float, optional
        Seconds from now on after which nothing more is waited for.
    clock, sleep : callable
        time.monotonic and time.sleep, but for tests.

    Attributes
    ----------
    done : int
    """

    def __init__(
        self,
        folder: Path,
        world: Transport,
        done: int = -1,
        every: float = 30.0,
        max_time: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.folder, self.world, self.done, self.every = folder, world, done, every
        self.clock, self.sleep = clock, sleep
        self.end = math.inf if max_time is None else clock() + max_time
        self._seen: set[tuple[int, int]] = set()

    def next(self) -> Found | None:
        """Wait for the next checkpoint; None once the job is complete and all have been evaluated, or time is over."""
        while True:
            found: tuple[Found | None, bool] = (None, False)
            with all_or_none(self.world):
                if self.world.rank == 0:
                    complete = (self.folder / COMPLETE).exists()  # before the folder is looked at: none comes after it
                    found = self._look(), complete or self.clock() >= self.end
            checkpoint, over = self.world.bcast(found)
            if checkpoint is not None or over:
                return checkpoint
            self.sleep(max(0.0, min(self.every, self.end - self.clock())))

    def visit(self, found: Found, work: Callable[[Opened, Progress], None]) -> bool:
        """Work on a checkpoint that `next` has returned; False if it was evaluated already, or is not there any more.

        Raises
        ------
        DataError
            On every rank: the file is damaged, or does not fit.
        """
        self._seen.add(found.state)
        try:
            with opened(found.path, self.world) as file:
                progress = position_of(file)
                if progress.step <= self.done:
                    return False
                work(file, progress)
        except DataError:
            if self.world.bcast(found.path.exists()):
                raise
            if self.world.rank == 0:
                say(f"{found.path.name} was removed before it was evaluated; keep more checkpoints, or look more often")
            return False
        self.done = progress.step
        return True

    def _look(self) -> Found | None:
        """Return the next checkpoint that is there; those under their step, where the job keeps several."""
        path = self.folder / CHECKPOINT
        kept = {step: file for file in kept_files(path) if (step := _step_of(file)) is not None}
        for step in sorted(kept):
            if step > self.done and (found := self._found(kept[step])) is not None:
                return found
        return None if kept else self._found(path)

    def _found(self, path: Path) -> Found | None:
        try:
            facts = path.stat()
        except FileNotFoundError:
            return None
        found = Found(path, (facts.st_ino, facts.st_mtime_ns))
        return None if found.state in self._seen else found


def _step_of(path: Path) -> int | None:
    digits = re.search(r"-([0-9]+)$", path.stem)
    return None if digits is None else int(digits[1])


def position_of(file: Opened) -> Progress:
    """Return how far the run of a checkpoint was; DataError if it does not say."""
    try:
        return Progress.from_json(file.facts.texts["position"])
    except (KeyError, ValueError) as problem:
        raise DataError(f"{file.facts.path}: does not say how far its run was ({problem})") from None


class Evaluation:
    """Results of checkpoints, for hooks as those of epochs are: metrics.jsonl, and loggers by step.

    Parameters
    ----------
    run : TrainState
        Its history becomes one record for each checkpoint.
    folder : path
        For metrics.jsonl, whose records of before stay.
    hooks : sequence of Hook
    """

    def __init__(self, run: TrainState, folder: Path, hooks: Iterable[Hook] = ()) -> None:
        self.run, self.hooks = run, [MetricsLog(folder / METRICS), *hooks]
        for hook in self.hooks:
            if isinstance(hook, Logger):
                hook.within(folder)
                hook.axis = "step"
        world = run.grid.world
        records: list[Record] = []
        with all_or_none(world):
            if world.rank == 0:
                make_folder(folder)
                records = read_records(folder / METRICS, continued=True)
        run.history = world.bcast(records)

    @property
    def done(self) -> int:
        """The last step that has been evaluated; -1 for none."""
        return max((record.get("step", -1) for record in self.run.history), default=-1)

    def begin(self) -> None:
        """Let the hooks begin; collective."""
        for hook in self.hooks:
            hook.before_run(self.run)

    def add(self, progress: Progress, numbers: Mapping[str, Any], seconds: float) -> Record:
        """Give the hooks what was found for a checkpoint; collective."""
        run = self.run
        run.epoch, run.samples_seen = progress.epoch, progress.seen
        run.history.append(Record(epoch=progress.epoch, step=progress.step, **numbers, seconds=seconds))
        for hook in self.hooks:
            hook.after_epoch(run)
        return run.history[-1]

    def end(self, error: BaseException | None = None) -> None:
        """Let the hooks end."""
        for hook in self.hooks:
            if error is None:
                hook.after_run(self.run)
            else:
                with suppress(Exception):  # the first error is the one to read
                    hook.on_error(self.run, error)


def follow_checkpoints(
    experiment: FitExperiment,
    folder: str | Path,
    grid: ProcessGrid | None = None,
    output: str | Path | None = None,
    every: float = 30.0,
    max_time: float | None = None,
) -> list[Record]:
    """Evaluate each checkpoint of a job once, in order, until the job is complete; collective.

    Parameters
    ----------
    experiment : FitExperiment
        Its model, data, metrics and loggers.
    folder : path
        Where a run or a session writes its checkpoints.
    grid : ProcessGrid, optional
        Default `experiment.open_grid()`.
    output : path, optional
        For metrics.jsonl and loggers; default: 'evaluation' in `folder`. Steps that its metrics.jsonl has are not
        evaluated again.
    every : float
        Seconds between two looks at the folder.
    max_time : float, optional
        End after so many seconds, at the latest.

    Returns
    -------
    list of Record
        One for each checkpoint: epoch, step, losses and metrics of the validation and the test split, seconds.

    Raises
    ------
    UserError
        As `evaluate_checkpoint`.
    """
    folder = Path(folder)
    target = folder / FOLDER if output is None else Path(output)
    with opened_for_evaluation(experiment, grid) as (model, dataset):
        world = model.grid.world
        run = TrainState(model, dataset, experiment.epochs, experiment.batch_size)
        evaluation = Evaluation(run, target, experiment.loggers)
        first = len(run.history)
        follower = Follower(folder, world, evaluation.done, every, max_time)

        def work(file: Opened, progress: Progress) -> None:
            begun = time.perf_counter()
            take_weights(file, model)
            record = evaluation.add(progress, judge(run, experiment.metrics), time.perf_counter() - begun)
            if world.rank == 0:
                emit(line(record).rstrip())

        evaluation.begin()
        try:
            while (found := follower.next()) is not None:
                follower.visit(found, work)
        except BaseException as error:
            evaluation.end(error)
            raise
        evaluation.end()
        return run.history[first:]
