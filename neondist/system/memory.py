"""Available memory of this process, and the errors raised when it is not enough.

What cannot be held is told before anything of that size is asked for: where a system promises more memory than it has,
it kills whoever uses it.
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
_SURELY_FITS = 1 << 26  # bytes that fit without asking the machine


def require_room(needed: int, what: str, remedy: str, free: Callable[[], int | None] | None = None) -> None:
    """Raise DataError if this machine has not so many bytes of memory left.

    Parameters
    ----------
    needed : bytes
    what : whose they are, for the message
    remedy : what to do about it
    free : what returns the bytes that are left; default `free_memory`
    """
    room = (free or free_memory)() if needed > _SURELY_FITS else None
    if room is not None and needed > room:
        raise DataError(f"{what} needs {words(needed)} of memory, but only {words(room)} are available; {remedy}")


@contextmanager
def room_for(field: str, remedy: str) -> Iterator[None]:
    """Raise ConfigError about `field`, instead of MemoryError, where memory is not enough for the block."""
    try:
        yield
    except MemoryError as error:
        reason = f" ({error})" if str(error) else ""
        raise ConfigError(f"{field}: not enough memory{reason}; use more ranks, or {remedy}") from error


def free_memory() -> int | None:
    """Return the bytes that this process may still take: of the machine, its control group, and its own limit.

    None where the system does not tell. Memory that files are cached in counts as free.
    """
    found = [*_of_machine(), *_of_control_groups(), *_of_process()]
    return max(0, min(found)) if found else None


_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{unit}": base ** (power + 1)
    for power, prefix in enumerate("kmgt")
    for unit, base in (("", 1024), ("b", 1000), ("ib", 1024))
}
PROCESS = 600 << 20
"""bytes of a rank before its first step, and of what kernels take for a moment: Python, its libraries, their buffers"""


def as_bytes(field: str, memory: int | str) -> int:
    """Return a number of bytes as people write it: 8GiB, '500 MB' or the number; ConfigError names the field."""
    number, unit = re.fullmatch(r"\s*([0-9.]*)\s*(.*?)\s*", str(memory)).groups()  # type: ignore[union-attr]
    try:
        found = int(float(number) * _UNITS[unit.lower()])
    except (ValueError, KeyError, OverflowError):
        found = 0
    if found < 1:
        raise ConfigError(
            f"{field}: {memory!r} is not an amount of memory; expected one such as 8GiB, 500MB or a number of bytes"
        )
    return found


def share_of(memory: int, ranks: int) -> int:
    """Return the bytes that each of so many ranks may use for a network, of those that all on a machine have.

    Raises
    ------
    ConfigError
        Nothing is left beside what every process takes.
    """
    here = ranks_here(ranks)
    found = memory // here - PROCESS
    if found <= 0:
        raise ConfigError(
            f"memory: {words(memory)} for {here} ranks on a machine; each needs {words(PROCESS)} before it loads"
            f" any image: give more than {words(PROCESS * here)}, or start fewer ranks"
        )
    return found


def most_held(share: int) -> int:
    """Return the bytes beyond which a process should not keep what it has freed, whose network may use `share`."""
    return share + PROCESS * 15 // 16  # the rest is what kernels take for a moment


def room_for_each(ranks: int) -> int | None:
    """Return the bytes that each of so many ranks on this machine may still take; None: the system does not tell."""
    free = free_memory()
    return None if free is None else free // ranks


def least_room(world: Any, room: Callable[[int], int | None] = room_for_each) -> int | None:
    """Return the bytes that each rank may still take where least is left; None: a system does not tell; collective.

    Parameters
    ----------
    room : what returns that for so many ranks on this machine
    """
    found = world.allgather(room(ranks_here(world.size)))
    return None if None in found else min(found)


def ranks_here(ranks: int) -> int:
    """Return how many of all ranks are on this machine; all of them where the environment does not tell."""
    job = detect(os.environ)
    return min(ranks, (job.local_size if job else None) or ranks)


def out_of_memory(
    error: Exception, layer: str, direction: str, planned: int, room: int | None, ranks: int
) -> UserError:
    """Return the error of a step for which there is no memory.

    Parameters
    ----------
    error : of the library of arrays; its message has the size that was asked for
    planned : bytes of a rank at the peak of a step
    room : bytes that this rank might still take
    ranks : in all
    """
    amount = re.search(r"([0-9][0-9.,]*) ?([KMGT]?i?B|bytes)", str(error))
    asked = as_bytes("size", "".join(amount.groups()).replace(",", "").replace("bytes", "")) if amount else None
    what = "an array" if asked is None else words(asked)
    left = "" if room is None else f", and {words(room)} are left"
    lacking = max(0, (asked or planned // 4) - (room or 0))
    share = (planned - lacking) * 9 // 10  # what is lacking may be more than this one array
    fits = f"set memory: {words(ranks_here(ranks) * (share + PROCESS))}, or use" if share > 0 else "use"
    return ConfigError(
        f"memory: layer '{layer}' needs {what} in the {direction} pass{left}; the planned peak of a step is"
        f" {words(planned)} per rank, without temporary buffers of kernels; {fits} more ranks or smaller batches"
    )


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
