"""Graceful stop of a run, on signals of the batch system or before a time limit."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from ...parallel import ControlFlag
from ...system.signals import SignalRecorder
from ..state import Stop, TrainState
from .hook import Hook

CONTROL_FLAG_BY_SIGNAL = {"SIGTERM": ControlFlag.SIGTERM, "SIGUSR1": ControlFlag.SIGUSR1}


class StopOnSignal(Hook):
    """Stop the run on all ranks after the current step, with a checkpoint, on SIGTERM or SIGUSR1 on any rank.

    The ranks agree on a stop in the gradient reduction of each step, and, for signals received earlier, before the
    first step of a run or of a pretraining stage. Signals received while the checkpoint is written are ignored. Signals
    can be caught only in the main thread of a process.

    Parameters
    ----------
    signals : SignalRecorder, optional
        Installed signal handlers; default: installed from `open` to `close`.
    remedy : str
        End of the message, with instructions to continue the run.
    """

    runs_during_pretraining = True

    def __init__(self, signals: SignalRecorder | None = None, remedy: str = "--resume continues from here") -> None:
        self.signals, self.owns_handlers, self.remedy = signals or SignalRecorder(), signals is None, remedy
        self.run: TrainState | None = None

    def open(self) -> None:
        """Install the handlers."""
        if self.owns_handlers:
            self.signals.install_signal_handlers()

    def close(self) -> None:
        """Restore the previous handlers."""
        if self.owns_handlers:
            self.signals.restore_signal_handlers()

    def before_run(self, run: TrainState) -> None:
        """Subscribe to signals; stop before the first step if a rank has received one."""
        self.run, self.signals.needs_cleanup = run, True
        self.signals.add_listener(self._set_stop_flag)
        received = [name for names in run.grid.world.allgather(tuple(self.signals.received_signals)) for name in names]
        if received and run.stop is None and run.epoch < run.epochs:
            run.stop = Stop(f"received {received[0]}; {self.remedy}")

    def after_step(self, run: TrainState) -> None:
        """Stop if a rank has received a signal."""
        for name, flag in CONTROL_FLAG_BY_SIGNAL.items():
            if run.stop is None and run.model.sync.flags.count_ranks(flag):
                run.stop = Stop(f"received {name}; {self.remedy}")

    def after_run(self, run: TrainState) -> None:
        """Unsubscribe from signals."""
        if self.run is not None:
            self.run = None
            self.signals.listeners.remove(self._set_stop_flag)

    on_stop = after_run

    def on_error(self, run: TrainState, error: BaseException) -> None:
        """Unsubscribe from signals."""
        self.after_run(run)

    def _set_stop_flag(self, signal_name: str) -> None:
        if self.run is not None:
            self.run.model.sync.flags.own_flags[CONTROL_FLAG_BY_SIGNAL[signal_name]] = 1


ASSUMED_DISK_BYTES_PER_SECOND = 100e6
"""Initial estimate of bytes per second when writing a checkpoint."""


class TimeLimit(Hook):
    """Stop the run with a checkpoint before a time limit.

    Parameters
    ----------
    seconds : float
    start_time : float, optional
        Start time by `clock`. Default: now.
    clock : callable
        Clock in seconds; replaced in tests.

    Notes
    -----
    Rank 0 decides after step n, and all ranks stop after step n + 1, whose gradient reduction carries the flag. Time is
    reserved for two steps (each as long as the longest recent one), a checkpoint and one second, and also for an
    evaluation and a checkpoint if an epoch may end in between. Times not yet measured are estimated.
    """

    runs_during_pretraining = True

    def __init__(self, seconds: float, start_time: float | None = None, clock: Callable[[], float] = time.time) -> None:
        self.seconds, self.clock = seconds, clock
        self.deadline = (clock() if start_time is None else start_time) + seconds
        self.recent_step_seconds: deque[float] = deque(maxlen=100)
        self.last_call_time, self.epoch_just_ended = 0.0, False
        self.max_evaluation_seconds, self.max_checkpoint_seconds = 0.0, 0.0

    def before_run(self, run: TrainState) -> None:
        """Start the clock."""
        self.last_call_time, self.epoch_just_ended = self.clock(), False

    def after_step(self, run: TrainState) -> None:
        """Stop if rank 0 announced a stop in this step; on rank 0, announce a stop if the limit is close."""
        elapsed = self._seconds_since_last_call()
        if self.epoch_just_ended:
            self.max_checkpoint_seconds, self.epoch_just_ended = (max(self.max_checkpoint_seconds, elapsed), False)
        else:
            self.recent_step_seconds.append(elapsed)
        if run.stop is None and run.model.sync.flags.count_ranks(ControlFlag.TIME_LIMIT):
            run.stop = Stop(f"the time limit of {self.seconds:g} s is close; --resume continues from here")
        elif run.is_first_rank and self.last_call_time + self.seconds_needed_to_stop(run) > self.deadline:
            run.model.sync.flags.own_flags[ControlFlag.TIME_LIMIT] = 1

    def after_epoch(self, run: TrainState) -> None:
        """Record the time of the evaluation; the time until the next step ends counts as that of the checkpoint."""
        self.max_evaluation_seconds = max(self.max_evaluation_seconds, self._seconds_since_last_call())
        self.epoch_just_ended = True

    def seconds_needed_to_stop(self, run: TrainState) -> float:
        """Return the seconds to reserve for stopping the run."""
        step_seconds = max(self.recent_step_seconds, default=self.max_checkpoint_seconds)
        checkpoint_seconds = self.max_checkpoint_seconds or _estimate_checkpoint_seconds(run)
        epoch_end_seconds = 0.0
        if len(run.dataset.train) - run.samples_seen <= run.batch_size:  # the epoch may end before the ranks stop
            num_samples = sum(len(split) for name, split in run.dataset.splits.items() if name != "train")
            evaluation_seconds = self.max_evaluation_seconds or step_seconds * -(-num_samples // run.batch_size)
            epoch_end_seconds = checkpoint_seconds + evaluation_seconds
        return 1.0 + 2 * step_seconds + epoch_end_seconds + checkpoint_seconds

    def _seconds_since_last_call(self) -> float:
        previous_time, self.last_call_time = self.last_call_time, self.clock()
        return self.last_call_time - previous_time


def _estimate_checkpoint_seconds(run: TrainState) -> float:
    return float(run.model.whole_model.compiled.parameters.memory(run.grid.rank) / ASSUMED_DISK_BYTES_PER_SECOND)
