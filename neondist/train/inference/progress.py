"""Progress line of a long job with an estimate of the time left."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from threading import Event, Lock, Thread
from types import TracebackType
from typing import IO

from ...terminal.console import format_duration, say
from ..callbacks.progress import FIRST_DELAY, LINE_INTERVAL, terminal_console

_TERMINAL_INTERVAL, _IDLE_TERMINAL_INTERVAL = 0.2, 1.0
"""seconds between updates of a terminal's line after parts, and during a part"""


class ProgressLine:
    """Progress line: first after 3 seconds, then every 30 if there is no terminal.

    As a context manager it prints lines on time even during a long part.

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

    def expect(self, parts: int, resumed: int = 0) -> None:
        """Set the total number of parts and those done by an earlier process; restart the clock."""
        with self._lock:
            self.parts, self.done, self.resumed, self.start = parts, resumed, resumed, time.monotonic()
            if self.first_delay <= 0:
                self.last_printed = None  # print again for the first part
            if resumed:
                say(f"resuming: {resumed} of {parts} {self.unit}s were already done", self.file)

    def begin(self, activity: str) -> None:
        """Set the current activity."""
        self.activity = activity
        if self.last_printed is None and self.first_delay <= 0:
            with self._lock:
                self._print_if_due(time.monotonic())

    def add(self, parts: int, cells: int = 0) -> None:
        """Count completed parts and their output cells; print the line if it is due."""
        with self._lock:
            self.done, self.cells, self.activity = self.done + parts, self.cells + cells, ""
            if self.parts is not None:
                self.done = min(self.parts, self.done)
            self._print_if_due(time.monotonic())

    def format_line(self, now: float) -> str:
        """Return the progress line."""
        seconds, done = max(now - self.start, 1e-9), self.done - self.resumed
        if self.parts is None:
            return f"preparing, {format_duration(seconds)} so far  "
        phrases = [f"{self.unit} {self.done} of {self.parts}"]
        if self.cells:
            phrases.append(f"{self.cells / 1e6 / seconds:.3g} Mpixel/s")
        if self.activity and self.done < self.parts:
            phrases.append(f"now {self.activity}")
        if done > 0:
            phrases.append(f"{format_duration((self.parts - self.done) * seconds / done)} left")
        else:
            phrases.append(f"{format_duration(seconds)} so far; an estimate follows the first {self.unit}")
        return f"{', '.join(phrases)}  "

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
        wait = self.first_delay or self._idle_interval
        while not self._end.wait(wait):
            with self._lock:
                now, wait = time.monotonic(), self._idle_interval
                if self.last_printed is None or self.parts is None or self.done < self.parts:
                    self._print_if_due(now)
                if self.last_printed is None:  # `expect` has restarted the clock
                    wait = max(0.01, self.start + self.first_delay - now)

    @property
    def _idle_interval(self) -> float:
        return _IDLE_TERMINAL_INTERVAL if self.terminal else LINE_INTERVAL

    def _print_if_due(self, now: float) -> None:
        """Print the line if it is due: once early, with the first estimate, and then periodically."""
        has_estimate = self.done > self.resumed
        every = _TERMINAL_INTERVAL if self.terminal else LINE_INTERVAL
        due = now - self.start >= self.first_delay if self.last_printed is None else now - self.last_printed >= every
        if not due and not (self.last_printed is not None and has_estimate and not self._estimated):
            return
        self.last_printed, self._estimated = now, has_estimate
        # erase the rest of a longer line
        end, start = ("\x1b[K", "\r") if self.terminal else ("\n", "")
        say(self.format_line(now), self.file, end, start)


def first_rank_progress(
    rank: int, file: IO[str] | None = None, parts: int | None = None, unit: str = "part", first: float | None = None
) -> AbstractContextManager[ProgressLine | None]:
    """Return a ProgressLine on rank 0, None on other ranks; `parts` may not be known yet."""
    return ProgressLine(parts, file, unit, first) if rank == 0 else nullcontext()
