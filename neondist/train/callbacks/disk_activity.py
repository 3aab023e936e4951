"""Activity of processes: bytes read from and written to disks, changes to files, and stopped processes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def count_disk_bytes(process_ids: Iterable[int]) -> int:
    """Return the bytes that processes have read from and written to disks; 0 if the system does not report them.

    Terminal output is not counted: a progress bar moves even without progress.
    """
    import psutil  # slow import

    total = 0
    for process in process_ids:
        with suppress(psutil.Error, OSError, AttributeError):  # macOS has no such counters
            io_counters = psutil.Process(process).io_counters()
            total += io_counters.read_bytes + io_counters.write_bytes
    return total


def list_file_states(folder: Path | None) -> list[tuple[str, int, int]]:
    """Return names, sizes and modification times of the files in a folder."""
    file_states = []
    with suppress(OSError):
        for entry in os.scandir(folder) if folder is not None else ():
            with suppress(OSError):
                stat = entry.stat(follow_symlinks=False)
                file_states.append((entry.name, stat.st_size, stat.st_mtime_ns))
    return sorted(file_states)


def is_process_stopped(pid: int) -> bool:
    """Return whether a process of this machine is stopped."""
    import psutil

    with suppress(psutil.Error, OSError):
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False
