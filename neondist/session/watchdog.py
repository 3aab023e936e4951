"""A rank that waits for ever ends the job, and says what it waits for."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from .hooks import Hook
from .run import Run
from .whereabouts import whereabouts

if TYPE_CHECKING:
    from ..comm import Transport


def end(world: Transport, patience: float) -> None:
    """End the job from a thread, after a while in which the other ranks may say where they are."""
    time.sleep(min(30.0, max(2.0, patience)))
    last = threading.Timer(5, os._exit, [1])  # should MPI itself not answer
    last.daemon = True
    last.start()
    if world.size > 1:
        world.abort(1)
    os._exit(1)


class Watchdog(Hook):
    """End the job where no batch has passed this rank for too long, instead of hanging.

    A thread looks now and then at how many batches have passed; a step pays nothing for it. Where the rank is - in
    which layer's exchange, in which sum, or in whose code - it reads from the stack of the thread that trains.

    Parameters
    ----------
    timeout : float
        Seconds.
    end : callable
        What to do after the report, given the ranks and some seconds for others to report; default to end the job with
        exit code 1.
    report : callable
        Takes the text; default writes to stderr.
    """

    joins_pretraining = True

    def __init__(
        self,
        timeout: float = 600.0,
        end: Callable[[Transport, float], None] = end,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self.timeout, self.end = timeout, end
        self.report = report or _to_stderr
        self.done = threading.Event()
        self.watched = 0

    def before_run(self, run: Run) -> None:
        """Begin to watch the thread that calls."""
        self.done, self.watched = threading.Event(), threading.get_ident()
        threading.Thread(target=self._watch, args=(run, self.done), name="watchdog", daemon=True).start()

    def after_run(self, run: Run) -> None:
        """Watch no longer."""
        self.done.set()

    def on_stop(self, run: Run) -> None:
        """Watch no longer."""
        self.done.set()

    def on_error(self, run: Run, error: BaseException) -> None:
        """Watch no longer."""
        self.done.set()

    def _watch(self, run: Run, done: threading.Event) -> None:
        passed, since = -1, time.monotonic()
        while not done.wait(min(5.0, self.timeout / 10)):
            now = time.monotonic()
            if passed != run.model.passes:
                passed, since = run.model.passes, now
            elif now - since > self.timeout:
                frame = sys._current_frames().get(self.watched)
                grid = run.grid
                self.report(
                    f"rank {grid.rank} of {grid.size}: no progress for {self.timeout:g} s (--stall-timeout),"
                    f" step {run.step + 1}: {whereabouts(frame, grid)}\n"
                )
                return self.end(grid.world, self.timeout / 4)


def _to_stderr(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
