"""Hooks that stop a session or an experiment, or initialise its weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ..io.checkpoint import load_weights, open_checkpoint
from ..registry.arguments import type_checked
from ..registry.ranges import Count, NotNegative
from ..train import Hook, Stop, TrainState


class StopAtStepHook(Hook):
    """Stop training after a number of steps, including those before a restart; the run is then complete.

    Parameters
    ----------
    last_step : int
        Number of the last step, counted from 1.
    """

    @type_checked
    def __init__(self, last_step: Count) -> None:
        self.last_step = last_step

    def before_run(self, run: TrainState) -> None:
        """Stop before the first step, if all steps are done."""
        self.after_step(run)

    def after_step(self, run: TrainState) -> None:
        """Stop, if this was the last step."""
        if run.stop is None and run.step >= self.last_step:
            run.stop = Stop(f"step {self.last_step} was the last", exit_code=0)


class StopAtTimeHook(Hook):
    """Stop training after the first step that ends after a time limit; the run is then complete.

    Each rank has its own clock, but all ranks stop after the same step. In a session, this is the step in which the
    first rank exceeds the limit; in an experiment, it is the next one, whose gradient reduction carries the request.

    Parameters
    ----------
    seconds : float
    clock : callable, optional
        Returns seconds; default time.monotonic.
    """

    @type_checked
    def __init__(self, seconds: NotNegative, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self.clock = seconds, clock
        self.start_time = clock()

    def before_run(self, run: TrainState) -> None:
        """Start the clock."""
        self.start_time = self.clock()

    def after_step(self, run: TrainState) -> None:
        """Stop if a rank has requested a stop; request one if the time limit is exceeded."""
        run.receive_stop_requests()
        if run.stop is None and self.clock() - self.start_time >= self.seconds:
            run.request_stop(f"the time limit of {self.seconds:g} s was reached")


class LoadCheckpoint(Hook):
    """Initialise the weights from a checkpoint, unless the run resumes from its own checkpoint.

    Arrays are matched by name and shape; the optimiser is not restored.

    Parameters
    ----------
    path : path
        A checkpoint of an experiment or session, written on any number of ranks.

    Raises
    ------
    DataError
        On every rank, in `before_run`: if the file is missing or damaged, or has none of the model's arrays.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def before_run(self, run: TrainState) -> None:
        """Load the weights, unless the run is resumed. Collective."""
        if run.step == 0 and run.epoch == 0:
            with open_checkpoint(self.path, run.grid.world) as file:
                load_summary = load_weights(file, run.model.checkpoint_arrays()["model"])
            run.start_messages.append(f"weights from {self.path}: {load_summary}")
