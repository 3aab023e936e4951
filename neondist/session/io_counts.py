"""Signs of life: bytes that processes have moved to and from disks, and files that change."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

COUNTED = ("read_bytes", "write_bytes")


def moved(processes: Iterable[int]) -> int:
    """Return how many bytes processes have read from disks and written to disks; 0 where the system does not tell.

    What goes to a terminal is not counted: a progress bar moves even if nothing else does.
    """
    total = 0
    for process in processes:
        with suppress(OSError, ValueError):
            lines = Path(f"/proc/{process}/io").read_text().splitlines()
            total += sum(int(number) for name, number in (line.split(": ") for line in lines) if name in COUNTED)
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
    """Tell whether a process of this machine is stopped."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False
