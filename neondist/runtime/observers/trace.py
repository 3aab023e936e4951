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
"""An event of the Trace Event Format."""


class Trace(Observer):
    """Recorder of the start and end of events.

    Attributes
    ----------
    events : list of Event
        Complete ('X') events, in the order of their ends; 'ts' and 'dur' are nanoseconds of this rank's clock.
    clock_alignment_times : list of int
        Times at which sums over all ranks ended: nearly simultaneous on all ranks.
    """

    def __init__(self, rank: int) -> None:
        self.rank, self.events, self.clock_alignment_times = rank, [], []  # type: int, list[Event], list[int]
        self._open_events: list[tuple[Any, int]] = []

    def on_begin(self, what: str, name: str, direction: str, subject: Any) -> None:
        """Record the start time."""
        self._open_events.append((subject, time.perf_counter_ns()))

    def on_end(self, what: str, name: str, direction: str) -> None:
        """Append the event."""
        now, (subject, start) = time.perf_counter_ns(), self._open_events.pop()
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
            self.clock_alignment_times.append(now)
        args = {key: value for key, value in details.items() if value != ""}
        event = {"name": title, "cat": what, "ph": "X", "pid": self.rank, "tid": 0, "args": args}
        self.events.append(event | {"ts": start, "dur": now - start})


def align_clocks(ranks: Sequence[tuple[list[Event], list[int]]]) -> list[Event]:
    """Return the events of all ranks, given (events, clock_alignment_times) of each, in microseconds of one clock.

    Clocks are aligned to rank 0's by the median offset of these times.
    """
    shifted: list[Event] = []
    for events, clock_alignment_times in ranks:
        off = (
            int(median(own - first for own, first in zip(clock_alignment_times, ranks[0][1], strict=True)))
            if clock_alignment_times
            else 0
        )
        shifted += [event | {"ts": event["ts"] - off} for event in events]
    first = min((event["ts"] for event in shifted), default=0)
    named = [
        {"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
        for rank in range(len(ranks))
    ]
    return named + [event | {"ts": (event["ts"] - first) / 1000, "dur": event["dur"] / 1000} for event in shifted]


def write_trace(path: Path, grid: ProcessGrid, work: Callable[[], object]) -> None:
    """Run `work`, and write a trace of all ranks of a grid into one file, from rank 0. Collective."""
    trace = Trace(grid.rank)
    with grid.observers.add_temporarily(trace):
        work()
    ranks = grid.world.allgather((trace.events, trace.clock_alignment_times))
    if grid.rank == 0:
        write_text(path, json.dumps({"traceEvents": align_clocks(ranks), "displayTimeUnit": "ms"}) + "\n")
