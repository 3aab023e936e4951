"""Progress line of a long job with an estimate of the time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from threading import Event, Lock, Thread
from types import TracebackType
from typing import IO

from ...io.regular_file import read_bytes
from ...terminal.console import format_duration, say
from ..callbacks.progress import FIRST_DELAY, LINE_INTERVAL, terminal_console

_TERMINAL_INTERVAL, _CHECK_INTERVAL = 0.2, 1.0
"""seconds between updates of a terminal's line after parts, and between checks during a part whether a line is due"""


class ProgressLine:
    """Progress line: first after 3 seconds, then every 30 if there is no terminal.

    As a context manager it prints lines on time even during a long part. The estimate of the time left is that of the
    current part, if it is known, and for the other parts the mean of previous ones, weighted by their planned times.

    Parameters
    ----------
    parts : int, optional
        Total number of parts; if it is not known yet, call `expect` later.
    file : text file, optional
        Output stream; default stdout.
    unit : str
        Name of a part.
    first : float, optional
        Seconds until the first line; 0 prints it when the first part begins.
    """

    def __init__(
        self, parts: int | None = None, file: IO[str] | None = None, unit: str = "part", first: float | None = None
    ) -> None:
        self.first_delay = FIRST_DELAY if first is None else first
        self.parts, self.done, self.resumed, self.cells = parts, 0, 0, 0
        self.file, self.unit, self.activity = file, unit, ""
        self.start = time.monotonic()
        self.last_printed: float | None = None
        self.terminal = terminal_console(file) is not None
        self._planned_seconds: Sequence[float] = ()
        self._part_start, self._part_seconds_left = self.start, _unknown_seconds
        self._estimated, self._end, self._lock = False, Event(), Lock()
        self._thread: Thread | None = None

    def __enter__(self) -> ProgressLine:
        self._thread = Thread(target=self._print_during_parts, name="progress", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def expect(self, parts: int, resumed: int = 0, planned_seconds: Sequence[float] = ()) -> None:
        """Set the total number of parts and those done by an earlier process; restart the clock.

        `planned_seconds` of each part, if known, are the least that it can take.
        """
        with self._lock:
            self.parts, self.done, self.resumed, self.start = parts, resumed, resumed, time.monotonic()
            self._planned_seconds, self._part_start = planned_seconds, self.start
            if self.first_delay <= 0:
                self.last_printed = None  # print again for the first part
            if resumed:
                say(f"resuming: {resumed} of {parts} {self.unit}s were already done", self.file)

    def begin(self, activity: str, seconds_left: Callable[[], float | None] | None = None) -> None:
        """Set the current activity, and a function that returns the seconds left of this part, or None if unknown."""
        self.activity, self._part_start = activity, time.monotonic()
        self._part_seconds_left = seconds_left or _unknown_seconds
        if self.last_printed is None and self.first_delay <= 0:
            with self._lock:
                self._print_if_due(time.monotonic())

    def set_part_fraction(self, fraction: float) -> None:
        """Set the completed fraction of the current part; print the line if it is due."""
        end = time.monotonic() + (time.monotonic() - self._part_start) * (1 / max(fraction, 1e-3) - 1)
        with self._lock:
            self._part_seconds_left = lambda: max(0.0, end - time.monotonic())
            self._print_if_due(time.monotonic())

    def add(self, parts: int, cells: int = 0) -> None:
        """Count completed parts and their output cells; print the line if it is due."""
        with self._lock:
            self.done, self.cells, self.activity = self.done + parts, self.cells + cells, ""
            self._part_start, self._part_seconds_left = time.monotonic(), _unknown_seconds
            if self.parts is not None:
                self.done = min(self.parts, self.done)
            self._print_if_due(time.monotonic())

    def format_line(self, now: float) -> str:
        """Return the progress line."""
        seconds = max(now - self.start, 1e-9)
        if self.parts is None:
            return f"{self.activity or 'preparing'}, {format_duration(seconds)} so far  "
        phrases = [f"{self.unit} {self.done} of {self.parts}"]
        if self.cells:
            phrases.append(f"{self.cells / 1e6 / seconds:.3g} Mpixel/s")
        if self.activity and self.done < self.parts:
            phrases.append(f"now {self.activity}")
        phrases.append(self._describe_seconds_left(now))
        return f"{', '.join(phrases)}  "

    def _describe_seconds_left(self, now: float) -> str:
        left = self._estimate_seconds_left(now)
        if left is not None:
            return "about " * (self.done == self.resumed) + f"{format_duration(left)} left"
        so_far = f"{format_duration(now - self.start)} so far"
        if self._planned_seconds and (least := round(self._seconds_left_at_pace(1.0, now))):
            return f"{so_far}, at least {format_duration(least)} left"
        return f"{so_far}; an estimate follows the first {self.unit}"

    def _estimate_seconds_left(self, now: float) -> float | None:
        """Return the estimated seconds left, or None if neither a part has ended nor the rest of the first is known."""
        done_work, part_left = sum(self._work[self.resumed : self.done]), self._part_seconds_left()
        if part_left is not None and self.parts is not None and self.done < self.parts:
            pace = (now - self.start + part_left) / (done_work + self._work[self.done])
            return part_left + pace * sum(self._work[self.done + 1 :])
        return self._seconds_left_at_pace((self._part_start - self.start) / done_work, now) if done_work > 0 else None

    def _seconds_left_at_pace(self, pace: float, now: float) -> float:
        """Return the seconds left if parts take `pace` times their planned time; the current one may take longer."""
        current, *later = self._work[self.done :] or [0.0]
        return max(0.0, pace * current - (now - self._part_start)) + pace * sum(later)

    @property
    def _work(self) -> Sequence[float]:
        """The work of each part: its planned seconds, or 1."""
        return self._planned_seconds or [1.0] * (self.parts or 0)

    def close(self) -> None:
        """Stop and end the terminal's line."""
        self._end.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self.terminal and self.last_printed is not None:
            say("", self.file)
            self.last_printed = None

    def _print_during_parts(self) -> None:
        """Print the lines that are due while a part takes long."""
        wait = self.first_delay or _CHECK_INTERVAL
        while not self._end.wait(wait):
            with self._lock:
                now, wait = time.monotonic(), min(_CHECK_INTERVAL, LINE_INTERVAL)
                if self.last_printed is None or self.parts is None or self.done < self.parts:
                    self._print_if_due(now)
                if self.last_printed is None:  # `expect` has restarted the clock
                    wait = max(0.01, self.start + self.first_delay - now)

    def _print_if_due(self, now: float) -> None:
        """Print the line if it is due: once early, with the first estimate, and then periodically."""
        has_estimate = self.done > self.resumed or self._part_seconds_left() is not None
        every = _TERMINAL_INTERVAL if self.terminal else LINE_INTERVAL
        due = now - self.start >= self.first_delay if self.last_printed is None else now - self.last_printed >= every
        if not due and not (self.last_printed is not None and has_estimate and not self._estimated):
            return
        self.last_printed, self._estimated = now, has_estimate
        # erase the rest of a longer line
        end, start = ("\x1b[K", "\r") if self.terminal else ("\n", "")
        say(self.format_line(now), self.file, end, start)


class ProgressFile(ProgressLine):
    """Progress of a process that another one shows: the estimated time of its end, in a file.

    Parameters
    ----------
    path : path
        Read by `read_seconds_left`.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = Path(path)

    def _print_if_due(self, now: float) -> None:
        left = self._estimate_seconds_left(now)
        if left is not None:
            self.path.write_text(f"{time.time() + left}\n", encoding="utf-8")


def read_seconds_left(path: Path) -> float | None:
    """Return the seconds left by the file of a `ProgressFile`; None if there is no estimate yet."""
    try:
        return max(0.0, float(read_bytes(path)) - time.time())
    except (OSError, ValueError):  # not there, or being written
        return None


def first_rank_progress(
    rank: int, file: IO[str] | None = None, parts: int | None = None, unit: str = "part", first: float | None = None
) -> AbstractContextManager[ProgressLine | None]:
    """Return a ProgressLine on rank 0, None on other ranks; `parts` may not be known yet."""
    return ProgressLine(parts, file, unit, first) if rank == 0 else nullcontext()


def preparation_progress(rank: int = 0, whole_process: bool = True) -> AbstractContextManager[object]:
    """Return a progress line, on rank 0 and stderr, of a command that is preparing, such as importing PyTorch.

    `whole_process`: the process is the command, and its start counts for the delay of the line.
    """
    import psutil  # slow import

    age = time.time() - psutil.Process().create_time() if whole_process else 0.0
    return first_rank_progress(rank, sys.stderr, first=max(0.01, FIRST_DELAY - age))


def _unknown_seconds() -> float | None:
    return None
