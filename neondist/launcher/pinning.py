"""CPU affinity of the ranks of `neondist run -n N`: consecutive cores of the machine.

Ranks set their affinity without mpirun's options, so pinning works with every MPI library, as root, and in containers.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from ..geometry import part_range
from ..system import threads
from ..system.job import Job

PIN_VARIABLE = "NEONDIST_PIN"
CPUS_VARIABLE = "NEONDIST_CPUS"
"""Environment variable with all CPUs that the ranks share, in order of assignment."""
CPU_TOPOLOGY_DIR = Path("/sys/devices/system/cpu")


def pinning_environment(ranks: int, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that bind `ranks` ranks, with the threads set in `env`, to cores; empty if unbound."""
    thread_setting = next((env[name] for name in threads.THREAD_COUNT_VARIABLES if name in env), "")
    thread_count = int(thread_setting) if thread_setting.isdecimal() else threads.threads_per_rank(ranks)
    if unpinned_reason(env) or ranks * thread_count > threads.count_cores():
        return {}
    return {CPUS_VARIABLE: ",".join(map(str, sort_cpus(os.sched_getaffinity(0))))}


def unpinned_reason(env: Mapping[str, str]) -> str:
    """Return the reason why ranks stay unbound regardless of their number; '' if there is none."""
    if env.get(PIN_VARIABLE, "").lower() in ("no", "0", "off", "false"):
        return f"{PIN_VARIABLE}={env[PIN_VARIABLE]}"
    if not hasattr(os, "sched_setaffinity"):
        return "this system does not support CPU affinity"
    if threads.count_cores() < len(os.sched_getaffinity(0)):
        return "a container's CPU quota applies to time on all cores, not to a set of cores"
    return ""


def sort_cpus(cpus: set[int]) -> list[int]:
    """Return CPUs sorted by socket and core."""

    def sort_key(cpu: int) -> tuple[int, ...]:
        directory = CPU_TOPOLOGY_DIR / f"cpu{cpu}" / "topology"
        try:
            return *(int((directory / name).read_text()) for name in ("physical_package_id", "core_id")), cpu
        except (OSError, ValueError):
            return 0, cpu, cpu

    return sorted(cpus, key=sort_key)


def pin_rank(job: Job, env: Mapping[str, str]) -> None:
    """Bind this rank and all of its threads to its share of the cores, if requested by the launcher."""
    cpus = shared_cpus(env)
    if not cpus or job.rank is None or not job.size:
        return
    lo, hi = part_range(len(cpus), job.size, job.rank)
    for task in Path("/proc/self/task").iterdir():  # libraries may have started threads already
        with contextlib.suppress(OSError):  # the thread has ended, or cores were removed
            os.sched_setaffinity(int(task.name), cpus[lo:hi])


def shared_cpus(env: Mapping[str, str]) -> list[int]:
    """Return the CPUs shared by all ranks, in order; empty if unbound."""
    return [int(cpu) for cpu in env.get(CPUS_VARIABLE, "").split(",") if cpu.isdecimal()]
