"""Available memory of this process, and the errors raised when it is not enough.

Requirements are checked before allocation, since a system that overcommits memory kills processes when none is left.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import ConfigError, DataError, UserError
from ..terminal.console import counted
from .job import detect_job

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_USAGE_FILE_BY_LIMIT_FILE = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}
_MIN_CHECKED_BYTES = 1 << 26  # requests up to this size are not checked


def require_memory(
    needed_bytes: int, subject: str, remedy: str, get_free_bytes: Callable[[], int | None] | None = None
) -> None:
    """Raise DataError if less than `needed_bytes` of memory are available.

    Parameters
    ----------
    subject, remedy : str
        The object that needs the memory, and the remedy: the beginning and the end of the message.
    get_free_bytes : callable, optional
        Returns the available bytes. Default: `free_bytes`.
    """
    available_bytes = (get_free_bytes or free_bytes)() if needed_bytes > _MIN_CHECKED_BYTES else None
    if available_bytes is not None and needed_bytes > available_bytes:
        raise DataError(
            f"{subject} needs {format_bytes(needed_bytes)} of memory, but only {format_bytes(available_bytes)} are"
            f" available; {remedy}"
        )


@contextmanager
def convert_memory_error(field: str, remedy: str) -> Iterator[None]:
    """Convert a MemoryError raised in the block to a ConfigError about `field`."""
    try:
        yield
    except MemoryError as error:
        reason = f" ({error})" if str(error) else ""
        raise ConfigError(f"{field}: not enough memory{reason}; use more ranks, or {remedy}") from error


def free_bytes() -> int | None:
    """Return the bytes available to this process within the limits of machine, control groups and rlimit.

    Returns None if unknown. The page cache counts as free.
    """
    candidates = [*_machine_free_bytes(), *_cgroup_free_bytes(), *_process_free_bytes()]
    return max(0, min(candidates)) if candidates else None


_BYTES_BY_UNIT = {"": 1, "b": 1} | {
    f"{prefix}{unit}": base ** (power + 1)
    for power, prefix in enumerate("kmgt")
    for unit, base in (("", 1024), ("b", 1000), ("ib", 1024))
}
_PROCESS_OVERHEAD_BYTES_BY_BACKEND = {"numpy": 300 << 20, "torch": 450 << 20}


def parse_bytes(field: str, memory: int | str, minimum: int = 1) -> int:
    """Parse an amount of memory such as 8GiB, '500 MB' or a number of bytes; a ConfigError names `field`."""
    amount, unit = re.fullmatch(r"\s*([0-9.]*)\s*(.*?)\s*", str(memory)).groups()  # type: ignore[union-attr]
    try:
        count = int(float(amount) * _BYTES_BY_UNIT[unit.lower()])
    except (ValueError, KeyError, OverflowError):
        count = -1
    if count < minimum:
        raise ConfigError(
            f"{field}: {memory!r} is not an amount of memory; expected one such as 8GiB, 500MB or a number of bytes"
        )
    return count


def process_overhead_bytes(backend: str | None) -> int:
    """Return the bytes of a rank besides its network: Python, libraries, and temporary buffers of kernels.

    Parameters
    ----------
    backend : str or None
        Name of the backend of a model's layers. None: a PyTorch module.
    """
    return _PROCESS_OVERHEAD_BYTES_BY_BACKEND.get(backend or "", 600 << 20)


def model_bytes_per_rank(memory: int, local_ranks: int, backend: str | None = None) -> int:
    """Return the bytes per rank for its network, given the limit for all `local_ranks` on a machine.

    Raises
    ------
    ConfigError
        Nothing is left after the overhead of the processes.
    """
    model_bytes = memory // local_ranks - process_overhead_bytes(backend)
    if model_bytes <= 0:
        raise ConfigError(
            f"memory: {format_bytes(memory)} is too little for {counted(local_ranks, 'rank')} on a machine; of the"
            f" limit, {format_bytes(process_overhead_bytes(backend))} per rank are reserved for Python, libraries and"
            f" temporary buffers; set memory to {format_limit_for(0, local_ranks, backend)} plus what the network"
            " needs, or start fewer ranks"
        )
    return model_bytes


def format_limit_for(model_bytes: int, ranks: int, backend: str | None = None) -> str:
    """Return the smallest `memory`, in MiB, that leaves `model_bytes` for the network of each of `ranks` ranks."""
    return f"{-(-count_local_ranks(ranks) * (model_bytes + process_overhead_bytes(backend)) >> 20)}MiB"


def memory_trim_threshold(model_bytes: int, backend: str) -> int:
    """Return the number of bytes above which a process whose network may use `model_bytes` returns freed memory."""
    return model_bytes + process_overhead_bytes(backend) * 15 // 16  # the rest is for temporary buffers of kernels


def free_bytes_per_rank(ranks: int) -> int | None:
    """Return the available bytes per rank for `ranks` ranks on this machine; None if unknown."""
    available_bytes = free_bytes()
    return None if available_bytes is None else available_bytes // ranks


def min_free_bytes_per_rank(
    world: Any, get_free_bytes_per_rank: Callable[[int], int | None] = free_bytes_per_rank
) -> int | None:
    """Return the minimum of the available bytes per rank over all machines; None if unknown. Collective.

    Parameters
    ----------
    get_free_bytes_per_rank : callable
        Returns the available bytes per rank, given the number of ranks on this machine.
    """
    free_by_rank = world.allgather(get_free_bytes_per_rank(count_local_ranks(world.size)))
    return None if None in free_by_rank else min(free_by_rank)


def count_local_ranks(ranks: int) -> int:
    """Return the number of ranks on this machine; all ranks if unknown."""
    job = detect_job(os.environ)
    return min(ranks, (job.local_size if job else None) or ranks)


def out_of_memory_error(
    error: Exception, layer: str, direction: str, planned_bytes: int, free: int | None, ranks: int, backend: str
) -> UserError:
    """Return the error of a step that ran out of memory.

    Parameters
    ----------
    error : Exception
        Error of the array library, whose message may contain the requested size.
    planned_bytes, ranks : int
        Planned peak bytes of a rank in a step, and total number of ranks.
    free : int or None
        Available bytes of this rank.
    backend : str
        Name of the backend of the layers.
    """
    match = re.search(r"([0-9][0-9.,]*) ?([KMGT]?i?B|bytes)", str(error))
    requested = parse_bytes("size", "".join(match.groups()).replace(",", "").replace("bytes", "")) if match else None
    size = "an array" if requested is None else format_bytes(requested)
    left = "" if free is None else f", with {format_bytes(free)} left"
    shortfall = max(0, (requested or planned_bytes // 4) - (free or 0))
    model_bytes = (planned_bytes - shortfall) * 9 // 10  # leave a margin: more may be missing than this array needs
    advice = "use"
    if model_bytes > 0:
        memory = count_local_ranks(ranks) * (model_bytes + process_overhead_bytes(backend))
        advice = f"set memory: {format_bytes(memory)}, or use"
    return ConfigError(
        f"memory: layer '{layer}' could not allocate {size} in the {direction} pass{left}; the planned peak of a step"
        f" is {format_bytes(planned_bytes)} per rank, excluding temporary buffers of kernels;"
        f" {advice} more ranks or smaller batches"
    )


def format_bytes(count: float) -> str:
    """Format a number of bytes, such as '3.2 GB'."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.4g} TB"


def _machine_free_bytes() -> Iterator[int]:
    import psutil

    with suppress(OSError):
        yield psutil.virtual_memory().available


def _cgroup_free_bytes() -> Iterator[int]:
    """Yield the available bytes of this process's control groups and their parents."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            root = _CGROUP_ROOT / controllers
            cgroup_folder = root / name.strip("/")
            for folder in (cgroup_folder, *cgroup_folder.parents):
                if folder.is_relative_to(root):
                    yield from _free_bytes_of_cgroup(folder)


def _free_bytes_of_cgroup(folder: Path) -> Iterator[int]:
    for limit_file, usage_file in _USAGE_FILE_BY_LIMIT_FILE.items():
        with suppress(OSError, ValueError):  # no such file, or no limit: 'max'
            limit_bytes = int((folder / limit_file).read_text())
            lines = (folder / "memory.stat").read_text().splitlines()
            cache_bytes = sum(int(line.split()[1]) for line in lines if _is_page_cache_line(line))
            yield limit_bytes - int((folder / usage_file).read_text()) + cache_bytes


def _is_page_cache_line(line: str) -> bool:
    return line.split()[0] in ("inactive_file", "active_file")


def _process_free_bytes() -> Iterator[int]:
    import psutil

    with suppress(ImportError, OSError):
        import resource

        limit_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit_bytes != resource.RLIM_INFINITY:
            yield limit_bytes - psutil.Process().memory_info().vms
