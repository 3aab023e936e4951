"""How many threads each rank's libraries may use."""

from __future__ import annotations

import os
import sys
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")
VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def cores(process: int = 0) -> int:
    """Return the CPU cores that a process (default: this one) may use, after affinity and container limits."""
    bound = hasattr(os, "sched_getaffinity")  # Linux
    allowed = len(os.sched_getaffinity(process)) if bound else os.cpu_count() or 1
    return max(1, min(allowed, _quota() or allowed))


def share(ranks: int) -> int:
    """Return the threads for each of `ranks` ranks on this machine."""
    return max(1, cores() // ranks)


def limit(ranks: int) -> int | None:
    """Give this process its share of the machine's cores among `ranks` ranks; what the user has set stays.

    Returns the number of threads, None where the user has set it.
    """
    if any(name in os.environ for name in VARIABLES):
        return None
    # a launcher may have bound this rank to its part already; the parent still has the whole
    threads = max(1, min(cores(), cores(os.getppid()) // ranks))
    os.environ.update(dict.fromkeys(VARIABLES, str(threads)))  # for libraries that are loaded later
    if "numpy" in sys.modules:
        from threadpoolctl import threadpool_limits

        threadpool_limits(threads)
    return threads


def _quota() -> int | None:
    """Return the cores of a container's CPU quota, None without one."""
    try:
        quota, period = QUOTA.read_text().split()
        return max(1, round(int(quota) / int(period)))
    except (OSError, ValueError):
        return None
