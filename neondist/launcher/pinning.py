"""Cores of each rank of `neondist run -n N`: neighbours in the numbering of its machine's cores.

By affinity alone, and not by mpirun's options, so that it works with every MPI, as root, and in containers.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from ..geometry import split
from ..system import threads
from ..system.job import Job

SWITCH = "NEONDIST_PIN"
CPUS = "NEONDIST_CPUS"
"""Set for the ranks: all CPUs that they share, in the order in which they are handed out."""
TOPOLOGY = Path("/sys/devices/system/cpu")


def environment(ranks: int, env: Mapping[str, str]) -> dict[str, str]:
    """Return what to tell so many ranks on this machine, whose threads `env` has: nothing, if they stay unbound."""
    told = next((env[name] for name in threads.VARIABLES if name in env), "")
    each = int(told) if told.isdecimal() else threads.share(ranks)
    if why_not(env) or ranks * each > threads.cores():
        return {}
    return {CPUS: ",".join(map(str, in_order(os.sched_getaffinity(0))))}


def why_not(env: Mapping[str, str]) -> str:
    """Return why ranks stay unbound, however few they are; '' if they do not."""
    if env.get(SWITCH, "").lower() in ("no", "0", "off", "false"):
        return f"{SWITCH}={env[SWITCH]}"
    if not hasattr(os, "sched_setaffinity"):
        return "this system does not support CPU affinity"
    if threads.cores() < len(os.sched_getaffinity(0)):
        return "a container's CPU quota applies to time on all cores, not to a set of cores"
    return ""


def in_order(cpus: set[int]) -> list[int]:
    """Return CPUs so that those of one core come together, and then those of one socket."""

    def place(cpu: int) -> tuple[int, ...]:
        folder = TOPOLOGY / f"cpu{cpu}" / "topology"
        try:
            return *(int((folder / name).read_text()) for name in ("physical_package_id", "core_id")), cpu
        except (OSError, ValueError):
            return 0, cpu, cpu

    return sorted(cpus, key=place)


def pin(job: Job, env: Mapping[str, str]) -> None:
    """Bind this rank, with all threads that it has, to its part of the cores, if the launcher has said so."""
    cpus = shared(env)
    if not cpus or job.rank is None or not job.size:
        return
    lo, hi = split(len(cpus), job.size, job.rank)
    for task in Path("/proc/self/task").iterdir():  # libraries may have threads already
        with contextlib.suppress(OSError):  # it has ended, or cores have been taken away
            os.sched_setaffinity(int(task.name), cpus[lo:hi])


def shared(env: Mapping[str, str]) -> list[int]:
    """Return the CPUs that all ranks share, in order; none where they are unbound."""
    return [int(cpu) for cpu in env.get(CPUS, "").split(",") if cpu.isdecimal()]
