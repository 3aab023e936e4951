"""Description of a rank's current activity."""

from __future__ import annotations

import faulthandler
import os
from typing import Any

from ...comm import Exchange, ProcessGrid
from ...observer import Observer

_WORK_PREFIXES = {"cost": "cost: ", "sync": "sum of gradients: ", "update": "update: "}
_MAX_LISTED_CALLS = 12


class CurrentActivity(Observer):
    """Current activity in the passes of a grid's models, readable from another thread.

    Attributes
    ----------
    event_count : int
        Number of events so far, which grows as long as passes progress.
    """

    def __init__(self, grid: ProcessGrid) -> None:
        self.grid, self.event_count = grid, 0
        self._stack: list[tuple[str, str, str, Any]] = []

    def on_begin(self, event: str, name: str, direction: str, subject: Any) -> None:
        """Push an event."""
        self.event_count += 1
        self._stack.append((event, name, direction, subject))

    def on_end(self, event: str, name: str, direction: str) -> None:
        """Pop an event."""
        self._stack.pop()

    @property
    def is_waiting(self) -> bool:
        """Whether a pass is waiting for other ranks."""
        return any(event == "wait" for event, *_ in [*self._stack])

    def __str__(self) -> str:
        """Return the current layer, or other part of a step, and event this rank is waiting for; '' outside passes."""
        position, activity, outer_event = "", "", ""
        for event, name, direction, subject in [*self._stack]:
            if event == "layer":
                position, activity = f"{direction} pass of layer '{name}': ", "not waiting for another rank"
            elif event == "wait":
                activity = self._describe_wait(subject, outer_event)
            else:
                position, activity = _WORK_PREFIXES.get(event, position), activity or "not waiting for another rank"
            outer_event = event
        return position + activity

    def _describe_wait(self, subject: Exchange | str, enclosing_event: str) -> str:
        if isinstance(subject, str):
            operation = "redistribution" if enclosing_event == "redistribute" else "sum"
            return f"waiting in a {operation} over {self._describe_group(subject)}"
        first_rank = self.grid.rank - self.grid.tile  # first rank of this replica
        peers = sorted({first_rank + message.peer for message in (*subject.receives, *subject.sends)})
        return f"waiting for rank{'s'[: len(peers) > 1]} {', '.join(map(str, peers))} in the halo exchange"

    def _describe_group(self, name: str) -> str:
        grid = self.grid
        if name == "world":
            return f"all {grid.size} ranks"
        return f"the tiles of replica {grid.replica}" if name == "tiles" else f"the replicas of tile {grid.tile}"


def innermost_calls(thread_id: int) -> str:
    """Return the innermost calls of a thread, one per line, as faulthandler writes them; '' if it has ended."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)  # text beyond the pipe's capacity is dropped instead of blocking
    try:
        faulthandler.dump_traceback(write_fd)
        traceback_text = os.read(read_fd, 1 << 20).decode(errors="replace")
    finally:
        os.close(read_fd)
        os.close(write_fd)
    for section in traceback_text.split("\n\n"):
        thread_header, *lines = section.strip().splitlines()
        if f"0x{thread_id:016x}" in thread_header:
            return "\n".join(lines[:_MAX_LISTED_CALLS])
    return ""
