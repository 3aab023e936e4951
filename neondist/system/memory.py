"""Available memory of this process, and the errors raised when it is not enough.

Requirements are checked before allocation: a system that overcommits memory kills the process that uses it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import ConfigError, DataError, UserError
from .job import detect

_CONTROL = Path("/sys/fs/cgroup")
_FILES = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}
_SURELY_FITS = 1 << 26  # bytes that are not checked


def require_room(needed: int, what: str, remedy: str, free: Callable[[], int | None] | None = None) -> None:
    """Raise DataError if less than `needed` bytes of memory are available.

    Parameters
    ----------
    needed : bytes
    what : object that needs them, for the message
    remedy : for the message
    free : returns the available bytes; default `free_memory`
    """
    room = (free or free_memory)() if needed > _SURELY_FITS else None
    if room is not None and needed > room:
        raise DataError(f"{what} needs {words(needed)} of memory, but only {words(room)} are available; {remedy}")


@contextmanager
def room_for(field: str, remedy: str) -> Iterator[None]:
    """Convert a MemoryError of the block to a ConfigError about `field`."""
    try:
        yield
    except MemoryError as error:
        reason = f" ({error})" if str(error) else ""
        raise ConfigError(f"{field}: not enough memory{reason}; use more ranks, or {remedy}") from error


def free_memory() -> int | None:
    """Return the bytes available to this process, limited by the machine, its control group, and its rlimit.

    None if unknown. The page cache counts as free.
    """
    bounds = [*_machine_memory(), *_control_group_memory(), *_process_memory()]
    return max(0, min(bounds)) if bounds else None


_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{unit}": base ** (power + 1)
    for power, prefix in enumerate("kmgt")
    for unit, base in (("", 1024), ("b", 1000), ("ib", 1024))
}
PROCESS = 600 << 20
"""Bytes of a rank besides its network: Python, libraries, and temporary buffers of kernels."""


def as_bytes(field: str, memory: int | str) -> int:
    """Parse a number of bytes such as 8GiB, '500 MB' or an int; ConfigError names the field."""
    number, unit = re.fullmatch(r"\s*([0-9.]*)\s*(.*?)\s*", str(memory)).groups()  # type: ignore[union-attr]
    try:
        count = int(float(number) * _UNITS[unit.lower()])
    except (ValueError, KeyError, OverflowError):
        count = 0
    if count < 1:
        raise ConfigError(
            f"{field}: {memory!r} is not an amount of memory; expected one such as 8GiB, 500MB or a number of bytes"
        )
    return count


def share_of(memory: int, ranks: int) -> int:
    """Return the bytes per rank for its network, given the limit for all ranks on a machine.

    Raises
    ------
    ConfigError
        Nothing is left after the overhead of the processes.
    """
    local_ranks = ranks_here(ranks)
    share = memory // local_ranks - PROCESS
    if share <= 0:
        raise ConfigError(
            f"memory: {words(memory)} for {local_ranks} ranks on a machine; each needs {words(PROCESS)} before it loads"
            f" any image: give more than {words(PROCESS * local_ranks)}, or start fewer ranks"
        )
    return share


def most_held(share: int) -> int:
    """Return the bytes above which a process should return freed memory, if its network may use `share`."""
    return share + PROCESS * 15 // 16  # the rest is for temporary buffers of kernels


def room_for_each(ranks: int) -> int | None:
    """Return the available bytes per rank for `ranks` ranks on this machine; None if unknown."""
    free = free_memory()
    return None if free is None else free // ranks


def least_room(world: Any, room: Callable[[int], int | None] = room_for_each) -> int | None:
    """Return the minimum of the available bytes per rank over all machines; None if unknown; collective.

    Parameters
    ----------
    room : returns the available bytes per rank, given the number of ranks on this machine
    """
    rooms = world.allgather(room(ranks_here(world.size)))
    return None if None in rooms else min(rooms)


def ranks_here(ranks: int) -> int:
    """Return the number of ranks on this machine; all ranks if unknown."""
    job = detect(os.environ)
    return min(ranks, (job.local_size if job else None) or ranks)


def out_of_memory(
    error: Exception, layer: str, direction: str, planned: int, room: int | None, ranks: int
) -> UserError:
    """Return the error of a step that ran out of memory.

    Parameters
    ----------
    error : error of the array library; its message may contain the requested size
    planned : planned peak bytes of a rank in a step
    room : available bytes of this rank
    ranks : total number of ranks
    """
    amount = re.search(r"([0-9][0-9.,]*) ?([KMGT]?i?B|bytes)", str(error))
    requested = as_bytes("size", "".join(amount.groups()).replace(",", "").replace("bytes", "")) if amount else None
    size = "an array" if requested is None else words(requested)
    left = "" if room is None else f", and {words(room)} are left"
    shortfall = max(0, (requested or planned // 4) - (room or 0))
    share = (planned - shortfall) * 9 // 10  # the shortfall may exceed this array
    fits = f"set memory: {words(ranks_here(ranks) * (share + PROCESS))}, or use" if share > 0 else "use"
    return ConfigError(
        f"memory: layer '{layer}' needs {size} in the {direction} pass{left}; the planned peak of a step is"
        f" {words(planned)} per rank, without temporary buffers of kernels; {fits} more ranks or smaller batches"
    )


def words(count: float) -> str:
    """Format a number of bytes, such as '3.2 GB'."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.4g} TB"


def _machine_memory() -> Iterator[int]:
    import psutil

    with suppress(OSError):
        yield psutil.virtual_memory().available


def _control_group_memory() -> Iterator[int]:
    """Yield the available bytes of this process's control groups and their parents."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            root = _CONTROL / controllers
            place = root / name.strip("/")
            for folder in (place, *place.parents):
                if folder.is_relative_to(root):
                    yield from _group_memory(folder)


def _group_memory(folder: Path) -> Iterator[int]:
    for most, used in _FILES.items():
        with suppress(OSError, ValueError):  # no such file, or no limit: 'max'
            limit = int((folder / most).read_text())
            cache = [line.split()[1] for line in (folder / "memory.stat").read_text().splitlines() if _is_cache(line)]
            yield limit - int((folder / used).read_text()) + sum(map(int, cache))


def _is_cache(line: str) -> bool:
    return line.split()[0] in ("inactive_file", "active_file")


def _process_memory() -> Iterator[int]:
    import psutil

    with suppress(ImportError, OSError):
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            yield limit - psutil.Process().memory_info().vms
