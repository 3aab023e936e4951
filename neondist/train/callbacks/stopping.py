"""Ending a run in good order: when the batch system says so, and before its time is over."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from ...parallel import Flag
from ...system.signals import Signals
from ..state import Stop, TrainState
from .hook import Hook

SIGNALS = {"SIGTERM": Flag.SIGTERM, "SIGUSR1": Flag.SIGUSR1}


class StopOnSignal(Hook):
    """SIGTERM or SIGUSR1, on any rank, ends the run on all ranks after the step under way, with a checkpoint.

    The ranks agree inside the sum of the gradients, and before the first step of a run, or of a stage of pretraining,
    on what came in between. What comes while the checkpoint is written changes nothing. Signals can be caught in a
    process's main thread only.

    Parameters
    ----------
    signals : Signals, optional
        Who listens already; default from `open` to `close`.
    remedy : str
        How the run goes on, for the message.
    """

    joins_pretraining = True

    def __init__(self, signals: Signals | None = None, remedy: str = "--resume continues from here") -> None:
        self.signals, self.own, self.remedy = signals or Signals(), signals is None, remedy
        self.run: TrainState | None = None

    def open(self) -> None:
        """Listen."""
        if self.own:
            self.signals.listen()

    def close(self) -> None:
        """Listen no longer."""
        if self.own:
            self.signals.restore()

    def before_run(self, run: TrainState) -> None:
        """Join those who are told; stop before the first step, if a rank has received a signal."""
        self.run, self.signals.cleans_up = run, True
        self.signals.join(self._tell)
        received = [name for names in run.grid.world.allgather(tuple(self.signals.received)) for name in names]
        if received and run.stop is None and run.epoch < run.epochs:
            run.stop = Stop(f"received {received[0]}; {self.remedy}")

    def after_step(self, run: TrainState) -> None:
        """Stop, if a rank has received a signal."""
        for name, flag in SIGNALS.items():
            if run.stop is None and run.model.sync.flags.ranks(flag):
                run.stop = Stop(f"received {name}; {self.remedy}")

    def after_run(self, run: TrainState) -> None:
        """Leave those who are told."""
        if self.run is not None:
            self.run = None
            self.signals.listeners.remove(self._tell)

    def on_stop(self, run: TrainState) -> None:
        """Leave those who are told."""
        self.after_run(run)

    def on_error(self, run: TrainState, error: BaseException) -> None:
        """Leave those who are told."""
        self.after_run(run)

    def _tell(self, name: str) -> None:
        if self.run is not None:
            self.run.model.sync.flags.mine[SIGNALS[name]] = 1


DISK = 100e6
"""Bytes a second that a checkpoint is taken to write, until one has been measured."""


class TimeLimit(Hook):
    """End the run, with a checkpoint, early enough that it is over before its time is.

    Parameters
    ----------
    seconds : float
    started : float, optional
        When they began to count, as `clock` tells; default now.
    clock : callable
        time.time, but for tests.

    Notes
    -----
    Rank 0 decides after step n, and all ranks stop after step n + 1, in whose sum of gradients they hear of it. Time is
    kept for two of the longest steps of late and a checkpoint, and where an epoch may end in between, for its
    evaluation and its checkpoint; for the latter two, what has been measured, or an estimate before that.
    """

    joins_pretraining = True

    def __init__(self, seconds: float, started: float | None = None, clock: Callable[[], float] = time.time) -> None:
        self.seconds, self.clock = seconds, clock
        self.end = (clock() if started is None else started) + seconds
        self.steps: deque[float] = deque(maxlen=100)
        self.last, self.evaluation, self.saving, self.after_pause = 0.0, 0.0, 0.0, False

    def before_run(self, run: TrainState) -> None:
        """Begin to measure."""
        self.last, self.after_pause = self.clock(), False

    def after_step(self, run: TrainState) -> None:
        """Stop, if rank 0 said so in this step; tell the others, if it is time."""
        took = self._took()
        if self.after_pause:
            self.saving, self.after_pause = max(self.saving, took), False
        else:
            self.steps.append(took)
        if run.stop is None and run.model.sync.flags.ranks(Flag.TIME):
            run.stop = Stop(f"the time limit of {self.seconds:g} s is close; --resume continues from here")
        elif run.first_rank and self.last + self.needed(run) > self.end:
            run.model.sync.flags.mine[Flag.TIME] = 1

    def after_epoch(self, run: TrainState) -> None:
        """Learn how long the evaluation took; what comes before the next step is mostly the checkpoint."""
        self.evaluation, self.after_pause = max(self.evaluation, self._took()), True

    def needed(self, run: TrainState) -> float:
        """Return the seconds to keep for what there is to do still if the run is to stop."""
        step = max(self.steps, default=self.saving)
        saving, between = self.saving or _saving(run), 0.0
        if len(run.dataset.train) - run.samples_seen <= run.batch_size:  # the epoch may end before all ranks know
            judged = sum(len(split) for name, split in run.dataset.splits.items() if name != "train")
            between = saving + (self.evaluation or step * -(-judged // run.batch_size))
        return 1.0 + 2 * step + between + saving

    def _took(self) -> float:
        before, self.last = self.last, self.clock()
        return self.last - before


def _saving(run: TrainState) -> float:
    """Return how many seconds a checkpoint may take, before one has been measured."""
    return float(run.model.whole.compiled.parameters.memory(run.grid.rank) / DISK)
