"""One line that says how far a long job is, and when it will end."""

from __future__ import annotations

import time
from typing import IO

from ...console import say
from ..callbacks.progress import terminal


class Progress:
    """Told of each part that is done; where there is no terminal, it speaks every half minute.

    Parameters
    ----------
    parts, cells : int
        All that there are to do.
    before : int
        Parts that an earlier process has done.
    """

    def __init__(self, parts: int, before: int = 0, file: IO[str] | None = None) -> None:
        self.parts, self.done, self.before, self.cells, self.file = parts, before, before, 0, file
        self.start = self.told = time.monotonic()
        self.terminal = terminal(file) is not None
        if before:
            say(f"goes on: {before} of {parts} parts were done before", file)

    def add(self, parts: int, cells: int) -> None:
        """Count parts, and say so if it is time."""
        self.done, self.cells, now = min(self.parts, self.done + parts), self.cells + cells, time.monotonic()
        if now - self.told >= (0.2 if self.terminal else 30):
            self.told = now
            end, start = ("", "\r") if self.terminal else ("\n", "")
            say(self.line(now), self.file, end, start)

    def line(self, now: float) -> str:
        """Return what is said."""
        seconds = max(now - self.start, 1e-9)
        left = (self.parts - self.done) * seconds / max(1, self.done - self.before)
        return f"part {self.done} of {self.parts}, {self.cells / 1e6 / seconds:.3g} Mpixel/s, {duration(left)} left  "

    def close(self) -> None:
        """Leave the line."""
        if self.terminal and self.told > self.start:
            say("", self.file)


def duration(seconds: float) -> str:
    """Return a time as people read it: '2 h 5 min'."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
