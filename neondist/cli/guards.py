"""What watches over a run: its options on the command line, and the hooks that they become."""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from . import options
from .job import Job

if TYPE_CHECKING:
    from ..session import Hook, Watchdog

STARTED = "NEONDIST_STARTED"
"""When the job was started, as time.time() tells; set by `neondist run -n N` for its ranks."""

_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def add(one: argparse.ArgumentParser) -> None:
    """Add the options."""
    one.add_argument(
        "--time-limit", type=duration, metavar="TIME",
        help="stop with a checkpoint, exit code 75, before so much time has gone by: 3h30m, 03:30:00 or seconds",
    )  # fmt: skip
    one.add_argument(
        "--stall-timeout", type=duration, metavar="TIME",
        help="end the job, and say which rank waits for what, if no batch has passed for so long (default 10m)",
    )  # fmt: skip
    one.add_argument(
        "--debug-halo", action="store_true",
        help="look for mistakes of layers and schemes of your own: slow; views begin as NaN, messages come late",
    )  # fmt: skip


def watchdog(arguments: argparse.Namespace, job: Job | None = None, whole_process: bool = False) -> Watchdog:
    """Return who watches over this process, or over a virtual rank."""
    from ..session import Watchdog

    rank, size = (job.rank or 0, job.size or 1) if job is not None else (0, 1)
    folder = options.folder(arguments) if arguments.stops else None
    timeout = getattr(arguments, "stall_timeout", None) or 600.0
    return Watchdog(timeout, whole_process=whole_process, rank=rank, size=size, folder=folder)


@contextmanager
def watched(arguments: argparse.Namespace) -> Iterator[None]:
    """Watch over this process as long as the block lasts, if the command must not hang."""
    if not arguments.watched:
        yield
        return
    watches = watchdog(arguments, whole_process=True)
    watches.open()
    try:
        yield
    finally:
        watches.stop()


def hooks(arguments: argparse.Namespace) -> list[Hook]:
    """Return the hooks of a run."""
    from ..session import DebugHalo, ProgressBar, StopOnSignal, TimeLimit

    watches = arguments.watchdog or watchdog(arguments)
    found: list[Hook] = [ProgressBar(), StopOnSignal(arguments.signals), watches]
    if arguments.time_limit is not None:
        found.append(TimeLimit(arguments.time_limit, float(os.environ.get(STARTED, time.time()))))
    if arguments.debug_halo:
        found.append(DebugHalo())
    return found


def duration(text: str) -> float:
    """Return the seconds of '3h30m', '90', '2.5h', '01:30:00' (hours first) or Slurm's '1-12:00:00' (days)."""
    seconds = _in_units(text) if ":" not in text else _clock(text)
    if not seconds:
        raise argparse.ArgumentTypeError(f"'{text}' is no time that can be used; give 3h30m, 03:30:00 or seconds")
    return seconds


def _in_units(text: str) -> float:
    if re.fullmatch(r"[0-9]+(\.[0-9]*)?", text):
        return float(text)
    number = r"[0-9]+(?:\.[0-9]+)?"
    if not re.fullmatch("".join(f"(?:{number}{unit})?" for unit in _UNITS), text):
        return 0.0
    return sum(float(n) * _UNITS[unit] for n, unit in re.findall(f"({number})([dhms])", text))


def _clock(text: str) -> float:
    found = re.fullmatch(r"(?:([0-9]+)-)?([0-9]+):([0-5][0-9])(?::([0-5][0-9]))?", text)
    if not found:
        return 0.0
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
