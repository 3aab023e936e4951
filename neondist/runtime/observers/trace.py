"""Timeline of all ranks, as a file for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ...comm import ProcessGrid
from ...io.files import write_text
from ...observer import Observer

Event = dict[str, Any]
"""As the Trace Event Format has it."""


class Trace(Observer):
    """Writes down what begins and ends.

    Parameters
    ----------
    rank : int

    Attributes
    ----------
    events : list of Event
        Complete ('X') ones, in the order of their ends; 'ts' and 'dur' are nanoseconds of this rank's clock as yet.
    meetings : list of int
        When sums over all ranks ended: on all of them at nearly the same time.
    """

    def __init__(self, rank: int) -> None:
        self.rank, self.events, self.meetings = rank, [], []  # type: int, list[Event], list[int]
        self._open: list[tuple[Any, int]] = []

    def begin(self, what: str, name: str, direction: str, subject: Any) -> None:
        """Take note of the time."""
        self._open.append((subject, time.perf_counter_ns()))

    def end(self, what: str, name: str, direction: str) -> None:
        """Take note of the time, and of what it was."""
        now, (subject, begun) = time.perf_counter_ns(), self._open.pop()
        title = name if what == "layer" else what
        details: dict[str, Any] = {"layer": name, "direction": direction}
        if what == "sync":
            title = "sum of gradients"
        elif isinstance(subject, str):
            title = f"wait: {subject}"
        elif subject is not None:
            title = "wait: messages"
            details |= {"messages": len(subject.sends), "bytes_sent": subject.bytes_sent}
        if subject == "world":
            self.meetings.append(now)
        args = {key: value for key, value in details.items() if value != ""}
        event = {"name": title, "cat": what, "ph": "X", "pid": self.rank, "tid": 0, "args": args}
        self.events.append(event | {"ts": begun, "dur": now - begun})


def on_one_clock(ranks: Sequence[tuple[list[Event], list[int]]]) -> list[Event]:
    """Return the events of all ranks, given those and the `meetings` of each, in microseconds of one clock.

    Clocks of machines differ: rank 0's is the one, and another's is off by the median over all meetings.
    """
    found: list[Event] = []
    for events, meetings in ranks:
        off = int(median(mine - first for mine, first in zip(meetings, ranks[0][1], strict=True))) if meetings else 0
        found += [event | {"ts": event["ts"] - off} for event in events]
    first = min((event["ts"] for event in found), default=0)
    named = [
        {"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
        for rank in range(len(ranks))
    ]
    return named + [event | {"ts": (event["ts"] - first) / 1000, "dur": event["dur"] / 1000} for event in found]


def write_trace(path: Path, grid: ProcessGrid, work: Callable[[], object]) -> None:
    """Write, on rank 0, what all ranks of a grid do during `work`; collective."""
    trace = Trace(grid.rank)
    with grid.observers.watched_by(trace):
        work()
    ranks = grid.world.allgather((trace.events, trace.meetings))
    if grid.rank == 0:
        write_text(path, json.dumps({"traceEvents": on_one_clock(ranks), "displayTimeUnit": "ms"}) + "\n")
