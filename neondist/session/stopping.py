"""Ending a run in good order when the batch system says so."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from ..models.notices import Notice
from .hooks import Hook
from .run import Run, Stop

SIGNALS = {"SIGTERM": Notice.SIGTERM, "SIGUSR1": Notice.SIGUSR1}


class StopOnSignal(Hook):
    """SIGTERM or SIGUSR1, on any rank, ends the run on all ranks after the step under way, with a checkpoint.

    The ranks agree inside the sum of the gradients. Signals can be caught in a process's main thread only.
    """

    joins_pretraining = True

    def __init__(self) -> None:
        self.before: dict[int, Any] = {}

    def before_run(self, run: Run) -> None:
        """Listen."""
        mine = run.model.notices.mine
        if threading.current_thread() is not threading.main_thread():
            return
        for name, notice in SIGNALS.items():
            if number := getattr(signal, name, None):  # not on every system
                self.before[number] = signal.signal(number, _setter(mine, notice))

    def after_step(self, run: Run) -> None:
        """Stop, if a rank has heard a signal."""
        for name, notice in SIGNALS.items():
            if run.stop is None and run.model.notices.ranks(notice):
                run.stop = Stop(f"{name} came; --resume goes on from here")

    def after_run(self, run: Run) -> None:
        """Listen no longer."""
        while self.before:
            signal.signal(*self.before.popitem())

    def on_stop(self, run: Run) -> None:
        """Listen no longer."""
        self.after_run(run)

    def on_error(self, run: Run, error: BaseException) -> None:
        """Listen no longer."""
        self.after_run(run)


def _setter(mine: Any, notice: Notice) -> Any:
    def handler(number: int, frame: FrameType | None) -> None:
        mine[notice] = 1

    return handler
