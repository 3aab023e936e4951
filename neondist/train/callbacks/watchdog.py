"""A rank that waits for ever ends the job, and says what it waits for."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ...comm import ProcessGrid, Transport
from ...runtime.observers.whereabouts import Whereabouts, calls
from ..state import TrainState
from .hook import Hook
from .io_counts import is_stopped, moved, written


def end(world: Transport | None, patience: float) -> None:
    """End the job from a thread, after a while in which the other ranks may say where they are."""
    time.sleep(min(30.0, max(2.0, patience)))
    last = threading.Timer(5, os._exit, [1])  # should MPI itself not answer
    last.daemon = True
    last.start()
    if world is not None and world.size > 1:
        world.abort(1)
    os._exit(1)


class Watchdog(Hook):
    """End the job where a rank makes no progress for too long, instead of hanging.

    Progress is a pass that goes on, bytes that a rank of this machine reads or writes, files that grow in the run's
    folder, and outside of runs another place in the code: a slow checkpoint is none that hangs. A thread looks now and
    then. In which layer's exchange or in which sum the rank waits an observer knows; where it waits in none the report
    ends with the last calls. Time in which the process was stopped does not count.

    Parameters
    ----------
    timeout : float
        Seconds.
    end : callable
        What to do after the report, given the ranks (None: MPI has not started) and some seconds for others to report;
        default to end the job with exit code 1.
    report : callable
        Takes the text; default writes to stderr.
    whole_process : bool
        Watch from the first `open` to the end of the process, instead of from the first step to the last file.
    rank, size : int
        Of this process, as long as no run says it.
    folder : path, optional
        Where the run writes.
    """

    joins_pretraining = True

    def __init__(
        self,
        timeout: float = 600.0,
        end: Callable[[Transport | None, float], None] = end,
        report: Callable[[str], None] | None = None,
        whole_process: bool = False,
        rank: int = 0,
        size: int = 1,
        folder: Path | None = None,
    ) -> None:
        self.timeout, self.end = timeout, end
        self.report = report or _to_stderr
        self.whole_process, self.rank, self.size, self.folder = whole_process, rank, size, folder
        self.done: threading.Event | None = None
        self.watched = 0
        self.world: Transport | None = None
        self.peers: dict[int, int] = {}
        self.work: Whereabouts | None = None
        self.run: TrainState | None = None

    def open(self) -> None:
        """Begin to watch the thread that calls, if the whole process is to be watched."""
        if self.whole_process:
            self._begin()

    def _begin(self) -> None:
        if self.done is None:
            self.done, self.watched = threading.Event(), threading.get_ident()
            threading.Thread(target=self._watch, args=(self.done,), name="watchdog", daemon=True).start()

    def close(self) -> None:
        """Watch no longer, unless the whole process is to be watched."""
        if not self.whole_process:
            self.stop()

    def stop(self) -> None:
        """Watch no longer."""
        if self.done is not None:
            self.done.set()
            self.done = None
        self._leave()

    def join(self, world: Transport, peers: Sequence[tuple[str, int]], host: str) -> None:
        """Take note of the ranks: of the machine and process number of each, and of this machine's name."""
        self.world, self.rank, self.size = world, world.rank, world.size
        self.peers = {rank: pid for rank, (name, pid) in enumerate(peers) if name == host and rank != world.rank}

    def observe(self, grid: ProcessGrid) -> None:
        """Take note of what passes on this grid do."""
        self._leave()
        self.world, self.rank, self.size = grid.world, grid.rank, grid.size
        self.work = Whereabouts(grid)
        grid.observers.add(self.work)

    def _leave(self) -> None:
        if self.work is not None:
            self.work.grid.observers.remove(self.work)
            self.work = None

    def before_run(self, run: TrainState) -> None:
        """Take note of the run."""
        self.observe(run.grid)
        self.run = run
        self._begin()

    def after_run(self, run: TrainState) -> None:
        """No step is to come."""
        self.run = None

    def on_stop(self, run: TrainState) -> None:
        """No step is to come."""
        self.run = None

    def _watch(self, done: threading.Event) -> None:
        tick = min(5.0, self.timeout / 10)
        seen: object = None
        idle, last = 0.0, time.monotonic()
        while not done.wait(tick):
            now = time.monotonic()
            idle, last = idle + min(now - last, 2 * tick), now
            bytes_moved = moved([os.getpid(), *self.peers.values()])
            found = (self._progress(), bytes_moved, written(self.folder))
            if found != seen:
                seen, idle = found, 0.0
            elif idle > self.timeout:
                self.report(self._text())
                return self.end(self.world, self.timeout / 4)

    def _progress(self) -> tuple[int, str]:
        """Return how far passes have come, and outside of runs, which have none that are slow, where the code is."""
        work = self.work
        return 0 if work is None else work.begun, calls(self.watched) if self.run is None else ""

    def _text(self) -> str:
        place = "outside of steps" if self.run is None else f"step {self.run.step + 1}"
        head = f"rank {self.rank} of {self.size}: no progress for {self.timeout:g} s (--stall-timeout), {place}"
        doing, waits = ("", False) if (work := self.work) is None else (str(work), work.waits)
        lines = [f"{head}: {doing}" if doing else head]
        if not waits:
            lines = [f"{lines[0]}, most recent call first:", calls(self.watched) or "  none: its thread has ended"]
        lines += [
            f"rank {rank} of {self.size}: is stopped (process {pid}, by SIGSTOP, a debugger or a terminal)"
            for rank, pid in self.peers.items()
            if is_stopped(pid)
        ]
        return "".join(line + "\n" for line in lines)


def _to_stderr(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
