"""Progress line of a long job with an estimate of the time left."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from threading import Event, Lock, Thread
from typing import IO, Any

from ..io.regular_file import read_bytes
from .console import format_duration, say

FIRST_LINE_SECONDS, LINE_INTERVAL_SECONDS = 3.0, 30.0
"""Seconds until the first progress line, and, without a terminal, between lines."""
_TERMINAL_INTERVAL_SECONDS, _CHECK_INTERVAL_SECONDS = 0.2, 1.0
"""Seconds between updates of a terminal's line; and, during a part, between checks of whether a line is due."""


class ProgressLine:
    """Progress line, printed after 3 seconds and then, without a terminal, every 30 seconds.

    As a context manager it prints lines on time even during a long part. The estimated time left is the remaining time
    of the current part, if known, plus that of later parts, extrapolated from the elapsed time in proportion to their
    planned times or sizes.

    Parameters
    ----------
    parts : int, optional
        Total number of parts; if it is not known yet, call `set_total_parts` later.
    file : text file, optional
        Output stream; default stdout.
    unit : str
        Name of a part.
    delay : float, optional
        Seconds until the first line; 0 prints it when the first part begins.
    """

    def __init__(
        self, parts: int | None = None, file: IO[str] | None = None, unit: str = "part", delay: float | None = None
    ) -> None:
        self.first_line_delay = FIRST_LINE_SECONDS if delay is None else delay
        self.total_parts, self.done_parts, self.resumed_parts, self.done_cells = parts, 0, 0, 0
        self.file, self.unit, self.current_activity = file, unit, ""
        self.start_time = time.monotonic()
        self.last_print_time: float | None = None
        self.is_terminal = terminal_console(file) is not None
        self._planned_part_seconds: Sequence[float] = ()
        self._part_sizes: Sequence[int] = ()
        self._concurrent_parts = 1
        self._part_start, self._part_seconds_left = self.start_time, _no_estimate
        self._estimate_printed, self._end_event, self._lock = False, Event(), Lock()
        self._thread: Thread | None = None

    def __enter__(self) -> ProgressLine:
        self._thread = Thread(target=self._print_during_parts, name="progress", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def set_total_parts(
        self,
        total: int,
        resumed_parts: int = 0,
        planned_seconds: Sequence[float] = (),
        part_sizes: Sequence[int] = (),
        concurrent_parts: int = 1,
    ) -> None:
        """Set the number of parts, in total and completed by an earlier process; restart the clock.

        Parameters
        ----------
        planned_seconds : sequence of float
            Minimum seconds of each part, if known; ignored if any is 0.
        part_sizes : sequence of int
            Sizes of the parts; the duration of a part is assumed to be proportional to its size.
        concurrent_parts : int
            Number of parts that run at the same time.
        """
        with self._lock:
            self.done_parts, self.resumed_parts = resumed_parts, resumed_parts
            self._part_sizes, self._concurrent_parts = part_sizes, concurrent_parts
            self.start_time = self._part_start = time.monotonic()
            self._plan_parts(total, planned_seconds)
            if resumed_parts:
                say(f"resuming: {resumed_parts} of {total} {self.unit}s were already done", self.file)

    def change_parts(self, total: int, planned_seconds: Sequence[float] = ()) -> None:
        """Change the total number of parts and their planned seconds, without restarting the clock."""
        with self._lock:
            self._plan_parts(total, planned_seconds, reprint=not self._estimate_printed)

    def _plan_parts(self, total: int, planned_seconds: Sequence[float], reprint: bool = True) -> None:
        self.total_parts = total
        self._planned_part_seconds = planned_seconds if min(planned_seconds, default=0) > 0 else ()
        if reprint and self.first_line_delay <= 0:
            self.last_print_time = None  # print a line with the new plan

    def begin_part(self, activity: str, seconds_left: Callable[[], float | None] | None = None) -> None:
        """Set the current activity, and a function that returns the seconds left of this part, or None if unknown."""
        self.current_activity, self._part_start = activity, time.monotonic()
        self._part_seconds_left = seconds_left or _no_estimate
        if self.last_print_time is None and self.first_line_delay <= 0:
            with self._lock:
                self._print_if_due(time.monotonic())

    def begin_process(self, activity: str, file: Path) -> None:
        """Begin a part that is a process with a `ProgressFile`."""
        file.unlink(missing_ok=True)  # written by the previous process
        self.begin_part(activity, partial(read_seconds_left, file))

    def set_part_fraction(self, fraction: float) -> None:
        """Set the completed fraction of the current part; print the line if it is due."""
        end_time = time.monotonic() + (time.monotonic() - self._part_start) * (1 / max(fraction, 1e-3) - 1)
        with self._lock:
            self._part_seconds_left = lambda: max(0.0, end_time - time.monotonic())
            self._print_if_due(time.monotonic())

    def add_done_parts(self, completed_parts: int, output_cells: int = 0) -> None:
        """Count completed parts and their output cells; print the line if it is due."""
        with self._lock:
            self.done_parts, self.current_activity = self.done_parts + completed_parts, ""
            self.done_cells += output_cells
            self._part_start, self._part_seconds_left = time.monotonic(), _no_estimate
            if self.total_parts is not None:
                self.done_parts = min(self.total_parts, self.done_parts)
            self._print_if_due(time.monotonic())

    def format_line(self, now: float) -> str:
        """Return the progress line."""
        seconds = max(now - self.start_time, 1e-9)
        if self.total_parts is None:
            return f"{self.current_activity or 'preparing'}, {format_duration(seconds)} so far  "
        phrases = [f"{self.unit} {self.done_parts} of {self.total_parts}"]
        if self.done_cells:
            phrases.append(f"{self.done_cells / 1e6 / seconds:.3g} Mpixel/s")
        if self.current_activity and self.done_parts < self.total_parts:
            phrases.append(f"now {self.current_activity}")
        phrases.append(self._describe_seconds_left(now))
        return f"{', '.join(phrases)}  "

    def _describe_seconds_left(self, now: float) -> str:
        seconds_left = self._estimate_seconds_left(now)
        if seconds_left is not None:
            return "about " * (self.done_parts == self.resumed_parts) + f"{format_duration(seconds_left)} left"
        elapsed_text = f"{format_duration(now - self.start_time)} so far"
        if least := round(self._estimate_least_seconds_left(now)):
            return f"{elapsed_text}, at least {format_duration(least)} left"
        return f"{elapsed_text}; an estimate will be shown after the first {self.unit}"

    def _estimate_seconds_left(self, now: float) -> float | None:
        """Return the estimated seconds left, or None if no part has ended and the rest of the first is unknown."""
        durations, part_left = self._relative_part_durations, self._part_seconds_left()
        done_work = sum(durations[self.resumed_parts : self.done_parts])
        if part_left is not None and self.total_parts is not None and self.done_parts < self.total_parts:
            seconds_per_unit = (now - self.start_time + part_left) / (done_work + durations[self.done_parts])
            return part_left + seconds_per_unit * sum(durations[self.done_parts + 1 :])
        elapsed = self._part_start - self.start_time
        return self._seconds_left_at_pace(elapsed / done_work, now) if done_work > 0 else None

    def _estimate_least_seconds_left(self, now: float) -> float:
        """Return the minimum seconds left of the job, for use while no part has ended; 0 if unknown."""
        if self._planned_part_seconds:
            return self._seconds_left_at_pace(1.0, now)
        current, later = self._current_and_later_durations()
        return (now - self._part_start) * later / current if self._part_sizes and current else 0.0

    def _seconds_left_at_pace(self, seconds_per_unit: float, now: float) -> float:
        """Return the seconds left at `seconds_per_unit`; the current part may exceed its planned time."""
        current, later = self._current_and_later_durations()
        return max(0.0, seconds_per_unit * current - (now - self._part_start)) + seconds_per_unit * later

    def _current_and_later_durations(self) -> tuple[float, float]:
        """Return the relative durations of the current parts and of later ones."""
        durations, end_index = self._relative_part_durations, self.done_parts + self._concurrent_parts
        return sum(durations[self.done_parts : end_index]), sum(durations[end_index:])

    @property
    def _relative_part_durations(self) -> Sequence[float]:
        """Planned seconds of the parts; if unknown, their sizes; otherwise 1 for each part."""
        return self._planned_part_seconds or self._part_sizes or [1.0] * (self.total_parts or 0)

    def close(self) -> None:
        """Stop printing, and end the line on a terminal."""
        self._end_event.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self.is_terminal and self.last_print_time is not None:
            say("", self.file)
            self.last_print_time = None

    def _print_during_parts(self) -> None:
        """Print lines that are due, even while a long part runs."""
        wait_seconds = _CHECK_INTERVAL_SECONDS
        if self.first_line_delay:
            wait_seconds = max(0.01, self.start_time + self.first_line_delay - time.monotonic())
        while not self._end_event.wait(wait_seconds):
            with self._lock:
                now, wait_seconds = time.monotonic(), min(_CHECK_INTERVAL_SECONDS, LINE_INTERVAL_SECONDS)
                if self.last_print_time is None or self.total_parts is None or self.done_parts < self.total_parts:
                    self._print_if_due(now)
                if self.last_print_time is None:  # `set_total_parts` has restarted the clock
                    wait_seconds = max(0.01, self.start_time + self.first_line_delay - now)

    def _print_if_due(self, now: float) -> None:
        """Print the line if it is due: after the first delay, once there is an estimate, and then periodically."""
        has_estimate = self.done_parts > self.resumed_parts or self._part_seconds_left() is not None
        interval = _TERMINAL_INTERVAL_SECONDS if self.is_terminal else LINE_INTERVAL_SECONDS
        last_time = self.last_print_time
        is_due = now - self.start_time >= self.first_line_delay if last_time is None else now - last_time >= interval
        if not is_due and not (last_time is not None and has_estimate and not self._estimate_printed):
            return
        self.last_print_time, self._estimate_printed = now, has_estimate
        # erase the rest of a longer line
        end, start = ("\x1b[K", "\r") if self.is_terminal else ("\n", "")
        say(self.format_line(now), self.file, end, start)


class SilentProgress(ProgressLine):
    """Progress that is not shown, as on ranks other than the first."""

    def __init__(self) -> None:
        super().__init__(file=io.StringIO())

    def __enter__(self) -> SilentProgress:
        return self


class ProgressFile(SilentProgress):
    """Estimated end time of this process, written to a file for a process that displays it.

    Parameters
    ----------
    path : path
        Output file, read by `read_seconds_left`.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = Path(path)

    def _print_if_due(self, now: float) -> None:
        seconds_left = self._estimate_seconds_left(now)
        if seconds_left is not None:
            self.path.write_text(f"{time.time() + seconds_left}\n", encoding="utf-8")


def read_seconds_left(path: Path) -> float | None:
    """Return the seconds left according to the file of a `ProgressFile`; None if there is no estimate yet."""
    try:
        return max(0.0, float(read_bytes(path)) - time.time())
    except (OSError, ValueError):  # missing, or being written
        return None


def terminal_console(file: IO[str] | None = None) -> Any:
    """Return a console if `file` (default stdout) is a terminal that can show a bar, else None."""
    if not (sys.stdout if file is None else file).isatty():
        return None
    if "OMPI_COMM_WORLD_SIZE" in os.environ and "NEONDIST_LAUNCHED" not in os.environ:
        return None  # Open MPI gives every rank a terminal, even if mpirun's output is redirected
    from .rich_console import Console

    console = Console(file=file)
    return console if console.is_terminal and not console.is_dumb_terminal else None


def first_rank_progress(
    rank: int, file: IO[str] | None = None, parts: int | None = None, unit: str = "part", delay: float | None = None
) -> ProgressLine:
    """Return a ProgressLine, which is silent on all ranks but the first; `parts`: None if not known yet."""
    return ProgressLine(parts, file, unit, delay) if rank == 0 else SilentProgress()


def preparation_progress(rank: int = 0, owns_process: bool = True) -> AbstractContextManager[object]:
    """Return a progress line for the preparation of a command, such as importing PyTorch; shown by rank 0 on stderr.

    `owns_process`: measure the time from the start of the process.
    """
    import psutil  # slow import

    line = first_rank_progress(rank, sys.stderr)
    line.start_time -= time.time() - psutil.Process().create_time() if owns_process else 0.0
    return line


def _no_estimate() -> float | None:
    return None
