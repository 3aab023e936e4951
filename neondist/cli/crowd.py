"""How many ranks a machine carries: more are not started but by --force."""

from __future__ import annotations

from collections.abc import Mapping

from .. import memory, threads
from ..errors import LaunchError

PER_CORE = 16
"""Ranks that may share a core: more than anybody tries a cut with, and fewer than make a machine stand still."""
EACH = 64 << 20
"""Bytes of a rank that has loaded its libraries and nothing else."""
_ALLOCATIONS = ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE", "COBALT_NODEFILE")
FORCE = "--force starts them all the same"


def refuse_crowd(ranks: int, env: Mapping[str, str]) -> None:
    """Raise LaunchError if so many ranks are too many for this machine's cores or memory.

    In the allocation of a batch system mpirun spreads them over machines that are not known here.
    """
    if env.get("SLURM_JOB_NUM_NODES", "1") != "1" or any(name in env for name in _ALLOCATIONS):
        return
    cores, free = threads.cores(), memory.free_memory()
    if ranks > PER_CORE * cores:
        most = f"at most {PER_CORE * cores} on {cores} {'core' if cores == 1 else 'cores'}"
        raise LaunchError(f"-n {ranks}: this machine has too few cores for so many ranks; give {most}; {FORCE}")
    if free is not None and ranks * EACH > free:
        raise LaunchError(
            f"-n {ranks}: so many ranks need {memory.words(ranks * EACH)} before they have read anything, and"
            f" {memory.words(free)} are free; give at most {max(1, free // EACH)}; {FORCE}"
        )


def refuse_idle(ranks: int, replicas: int, cells: int) -> None:
    """Raise LaunchError if a replica has more ranks than an image has cells, so that some would hold nothing."""
    if ranks > replicas * cells:
        raise LaunchError(
            f"{ranks} ranks for images of {cells} cells: some would hold no cell; give at most {replicas * cells}"
            f" ranks, or more replicas; {FORCE}"
        )
