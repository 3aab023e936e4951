"""How much memory this process may still take."""

from __future__ import annotations

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
    import psutil

    with suppress(OSError):
        yield psutil.virtual_memory().available


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
    import psutil

    with suppress(ImportError, OSError):
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            yield limit - psutil.Process().memory_info().vms
