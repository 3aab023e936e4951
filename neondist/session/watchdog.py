"""A rank that waits for ever ends the job, and says what it waits for."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from .hooks import Hook
from .run import Run

if TYPE_CHECKING:
    from ..comm import ProcessGrid, Transport

COMM = str(Path(__file__).parents[1] / "comm")
PACKAGE = str(Path(__file__).parents[1])


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


def whereabouts(frame: FrameType | None, grid: ProcessGrid) -> str:
    """Return in words what the thread of a stack is doing: what it waits for, or which code it is in, and the layer."""
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    doing = _doing(frames, grid)
    for each in frames:
        passing = {"fprop": "forward", "bprop": "backward"}.get(each.f_code.co_name)
        layer = getattr(each.f_locals.get("self"), "name", None)
        if passing and layer:
            return f"{passing} pass of layer '{layer}': {doing}"
    return doing


def _doing(frames: list[FrameType], grid: ProcessGrid) -> str:
    """Return what the innermost frame of neondist's communication waits for, else where the code is."""
    waiting, inside = "", 0
    while inside < len(frames) and frames[inside].f_code.co_filename.startswith(COMM):
        frame, inside = frames[inside], inside + 1
        owner: Any = frame.f_locals.get("self")
        if hasattr(owner, "receives"):
            first = grid.rank - grid.tile  # of this replica
            peers = sorted({first + message.peer for message in (*owner.receives, *owner.sends)})
            waiting = f"waits in its halo exchange for rank{'s'[: len(peers) > 1]} {', '.join(map(str, peers))}"
        elif hasattr(owner, "allreduce"):
            waiting = f"waits in {frame.f_code.co_name} over {owner.size} ranks, {_place(frames[inside])}"
    if waiting:
        return waiting
    own = next((f for f in frames if not _is_library(f.f_code.co_filename)), frames[0] if frames else None)
    return "is gone" if own is None else f"waits for nobody, {_place(own)}"


def _place(frame: FrameType) -> str:
    return f"in {frame.f_code.co_name} ({frame.f_code.co_filename}, line {frame.f_lineno})"


def _is_library(path: str) -> bool:
    return not path.startswith(PACKAGE) and (
        "site-packages" in path or path.startswith(sys.base_prefix + os.sep + "lib")
    )


def _to_stderr(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
