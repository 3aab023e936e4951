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
        Times at which sums over all ranks ended, which are nearly simultaneous on all ranks.
    """

    def __init__(self, rank: int) -> None:
        self.rank, self.events, self.clock_alignment_times = rank, [], []  # type: int, list[Event], list[int]
        self._open_events: list[tuple[Any, int]] = []

    def on_begin(self, event: str, name: str, direction: str, subject: Any) -> None:
        """Record the start time."""
        self._open_events.append((subject, time.perf_counter_ns()))

    def on_end(self, event: str, name: str, direction: str) -> None:
        """Append the event."""
        now, (subject, start_ns) = time.perf_counter_ns(), self._open_events.pop()
        event_name = name if event == "layer" else event
        details: dict[str, Any] = {"layer": name, "direction": direction}
        if event == "sync":
            event_name = "sum of gradients"
        elif isinstance(subject, str):
            event_name = f"wait: {subject}"
        elif subject is not None:
            event_name = "wait: messages"
            details |= {"messages": len(subject.sends), "bytes_sent": subject.bytes_sent}
        if subject == "world":
            self.clock_alignment_times.append(now)
        args = {key: value for key, value in details.items() if value != ""}
        record = {"name": event_name, "cat": event, "ph": "X", "pid": self.rank, "tid": 0, "args": args}
        self.events.append(record | {"ts": start_ns, "dur": now - start_ns})


def align_clocks(events_and_times: Sequence[tuple[list[Event], list[int]]]) -> list[Event]:
    """Return the events of all ranks in microseconds of rank 0's clock, given (events, clock_alignment_times) of each.

    Clocks are aligned by the median offset of these times.
    """
    aligned: list[Event] = []
    for events, clock_alignment_times in events_and_times:
        clock_offset = (
            int(median(own - start for own, start in zip(clock_alignment_times, events_and_times[0][1], strict=True)))
            if clock_alignment_times
            else 0
        )
        aligned += [event | {"ts": event["ts"] - clock_offset} for event in events]
    start = min((event["ts"] for event in aligned), default=0)
    name_events = [
        {"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
        for rank in range(len(events_and_times))
    ]
    return name_events + [event | {"ts": (event["ts"] - start) / 1000, "dur": event["dur"] / 1000} for event in aligned]


def write_trace(path: Path, grid: ProcessGrid, work: Callable[[], object]) -> None:
    """Run `work`, and write a trace of all ranks of a grid into one file, from rank 0. Collective."""
    trace = Trace(grid.rank)
    with grid.observers.add_temporarily(trace):
        work()
    events_by_rank = grid.world.allgather((trace.events, trace.clock_alignment_times))
    if grid.rank == 0:
        write_text(path, json.dumps({"traceEvents": align_clocks(events_by_rank), "displayTimeUnit": "ms"}) + "\n")
