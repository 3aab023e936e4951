"""How much memory this process may still take."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_CONTROL = Path("/sys/fs/cgroup")
_FILES = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}


def free_memory() -> int | None:
    """Return the bytes that this process may still take: of the machine, its control group, and its own limit.

    None where the system does not tell. Memory that files are cached in counts as free.
    """
    found = [*_of_machine(), *_of_control_groups(), *_of_process()]
    return max(0, min(found)) if found else None


def words(count: float) -> str:
    """Return a number of bytes as people read it: '3.2 GB'."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.4g} TB"


def _of_machine() -> Iterator[int]:
    with suppress(OSError, ValueError, StopIteration, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        yield int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024
        return
    with suppress(OSError, ValueError, AttributeError):
        yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_control_groups() -> Iterator[int]:
    """Yield what the groups of this process, and those above them, have left."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            root = _CONTROL / controllers
            place = root / name.strip("/")
            for folder in (place, *place.parents):
                if folder.is_relative_to(root):
                    yield from _left_in(folder)


def _left_in(folder: Path) -> Iterator[int]:
    for most, used in _FILES.items():
        with suppress(OSError, ValueError):  # no such file, or no limit: 'max'
            limit = int((folder / most).read_text())
            cache = [line.split()[1] for line in (folder / "memory.stat").read_text().splitlines() if _cached(line)]
            yield limit - int((folder / used).read_text()) + sum(map(int, cache))


def _cached(line: str) -> bool:
    return line.split()[0] in ("inactive_file", "active_file")


def _of_process() -> Iterator[int]:
    with suppress(ImportError, OSError, ValueError):
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            yield limit - int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
