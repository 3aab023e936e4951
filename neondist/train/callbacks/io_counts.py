"""Signs of life: bytes that processes have moved to and from disks, and files that change."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def moved(processes: Iterable[int]) -> int:
    """Return how many bytes processes have read from disks and written to disks; 0 where the system does not tell.

    What goes to a terminal is not counted: a progress bar moves even if nothing else does.
    """
    import psutil  # takes a while

    total = 0
    for process in processes:
        with suppress(psutil.Error, OSError, AttributeError):  # macOS does not count
            counts = psutil.Process(process).io_counters()
            total += counts.read_bytes + counts.write_bytes
    return total


def written(folder: Path | None) -> list[tuple[str, int, int]]:
    """Return names, sizes and times of the files in a folder."""
    found = []
    with suppress(OSError):
        for entry in os.scandir(folder) if folder is not None else ():
            with suppress(OSError):
                stat = entry.stat(follow_symlinks=False)
                found.append((entry.name, stat.st_size, stat.st_mtime_ns))
    return sorted(found)


def is_stopped(pid: int) -> bool:
    """Return whether a process of this machine is stopped."""
    import psutil

    with suppress(psutil.Error, OSError):
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False
