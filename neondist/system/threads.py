"""Number of threads of each rank's libraries."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from ..terminal.console import counted

CPU_QUOTA_FILE = Path("/sys/fs/cgroup/cpu.max")
MAX_EFFICIENT_RANKS_PER_CORE = 2
"""Maximum number of single-threaded ranks per core without much slowdown; threads that busy-wait need a core each."""
THREAD_COUNT_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def count_cores(pid: int = 0) -> int:
    """Return the CPU cores that a process (default: this one) may use, within its affinity and container limits."""
    has_affinity = hasattr(os, "sched_getaffinity")  # Linux
    allowed_cores = len(os.sched_getaffinity(pid)) if has_affinity else os.cpu_count() or 1
    return max(1, min(allowed_cores, _read_cpu_quota() or allowed_cores))


def default_thread_count() -> int:
    """Return OMP_NUM_THREADS if set, else the number of usable physical cores: hyper-threading does not help."""
    import psutil

    setting = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return (
        max(1, int(setting))
        if setting.isdecimal()
        else min(count_cores(), psutil.cpu_count(logical=False) or count_cores())
    )


def threads_per_rank(ranks: int) -> int:
    """Return the threads for each of `ranks` ranks on this machine."""
    return max(1, count_cores() // ranks)


def limit_threads(ranks: int) -> int | None:
    """Limit the threads of this process to its share of the machine's cores, unless the user has set a number.

    `ranks`: ranks on this machine. Returns the number of threads, or None if the user has set it.
    """
    if is_thread_count_set(os.environ):
        return None
    # a launcher may have bound this rank to some cores; the parent process can still use all of them
    thread_count = max(1, min(count_cores(), count_cores(os.getppid()) // ranks))
    os.environ.update(dict.fromkeys(THREAD_COUNT_VARIABLES, str(thread_count)))  # for libraries loaded later
    if "numpy" in sys.modules:
        from threadpoolctl import threadpool_limits

        threadpool_limits(thread_count)
    return thread_count


def limit_threads_and_log(ranks: int, is_first_rank: bool) -> Callable[[], None]:
    """Limit the threads as `limit_threads` does, for a script under mpirun; the first rank logs a change.

    Oversubscription makes a job 15 to 30 times slower, since threads busy-wait. Returns a function to remove the limit.
    """
    if is_thread_count_set(os.environ):
        return lambda: None
    from threadpoolctl import threadpool_info, threadpool_limits

    pool_limits = threadpool_limits(None)  # records the limits
    previous_count = max((pool["num_threads"] for pool in threadpool_info()), default=1)
    thread_count = limit_threads(ranks)
    if is_first_rank and thread_count is not None and thread_count < previous_count:
        logging.getLogger("neondist").warning(
            "neondist: %d ranks share the cores of this machine, with %s each; set OMP_NUM_THREADS to use"
            " another number of threads",
            ranks, "1 thread" if thread_count == 1 else f"{thread_count} threads",
        )  # fmt: skip

    def remove_limit() -> None:
        pool_limits.restore_original_limits()
        for name in THREAD_COUNT_VARIABLES:
            os.environ.pop(name, None)

    return remove_limit


def describe_oversubscription(ranks: int, thread_count: int, cores: int) -> str:
    """Return a warning with its remedies if the ranks of a machine lose time waiting for cores, otherwise ''."""
    if ranks * thread_count <= cores * (MAX_EFFICIENT_RANKS_PER_CORE if thread_count == 1 else 1):
        return ""
    fewer_ranks = max(1, cores // thread_count)
    remedies = [
        *([f"use -n {fewer_ranks}"] if fewer_ranks < ranks else []),
        *([f"set OMP_NUM_THREADS={max(1, cores // ranks)}"] if thread_count > 1 else []),
        "use more machines",
    ]
    return (
        f"warning: {counted(ranks, 'rank')} x {counted(thread_count, 'thread')} on {counted(cores, 'core')} mostly wait"
        f" for each other; {', or '.join(remedies)}"
    )


def log_oversubscription(ranks: int) -> None:
    """Log a warning if the ranks on this machine, including this one, lose time waiting for cores."""
    warning = describe_oversubscription(ranks, default_thread_count(), count_cores(os.getppid()))
    if warning:
        logging.getLogger("neondist").warning("%s", warning)


def is_thread_count_set(env: Mapping[str, str]) -> bool:
    """Return whether the user has set the number of threads."""
    return any(name in env for name in THREAD_COUNT_VARIABLES)


def _read_cpu_quota() -> int | None:
    """Return the number of cores of a container's CPU quota; None without a quota."""
    try:
        quota, period = CPU_QUOTA_FILE.read_text().split()
        return max(1, round(int(quota) / int(period)))
    except (OSError, ValueError):
        return None
