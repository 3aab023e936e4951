"""MPI job of this process, as described by its environment variables, without starting MPI."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LAUNCHED_RANKS_VARIABLE = "NEONDIST_LAUNCHED"
"""Number of ranks; set by `neondist run -n N` for the ranks that it starts."""
JOB_START_TIME_VARIABLE = "NEONDIST_STARTED"
"""Start time of the job, as returned by time.time(); set for the same ranks."""
GENERATION_VARIABLE = "NEONDIST_GENERATION"
"""Number of the generation, from 1; set for the ranks of a supervised job."""

# size, rank, and ranks on this node, as set by Open MPI; MPICH and Intel MPI; srun
_JOB_VARIABLES = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_TASKS_PER_NODE"),
)
_LOCAL_RANK_VARIABLES = "LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"
"""Variables set by torchrun, Open MPI, MPICH and Intel MPI, and srun."""


@dataclass(frozen=True)
class Job:
    """A running MPI job, as seen by one of its ranks.

    Attributes
    ----------
    size, rank, local_size : int or None
        Number of ranks, this rank, and number of ranks on this machine; None if unknown.
    """

    size: int | None
    rank: int | None
    local_size: int | None

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank is the one that prints."""
        return not self.rank


def detect_job(env: Mapping[str, str]) -> Job | None:
    """Return the job that this process belongs to, or None outside one."""
    launched_ranks = _read_number(env, LAUNCHED_RANKS_VARIABLE)
    for names in _JOB_VARIABLES:
        size, rank, local_size = (_read_number(env, name) for name in names)
        # a shell in a single-task Slurm step is not a job: `neondist run -n` can start one there
        is_single_task = size == 1 and "SLURM_STEP_ID" in env and not launched_ranks
        if size is not None and not is_single_task and ("SLURM" not in names[0] or "SLURM_STEP_ID" in env):
            return Job(max(size, launched_ranks or 1), rank, local_size)
    if launched_ranks or ("PMIX_RANK" in env and "SLURM_STEP_ID" not in env):
        return Job(launched_ranks, _read_number(env, "PMIX_RANK"), launched_ranks)
    return None


def count_torchrun_ranks(env: Mapping[str, str]) -> int:
    """Return the number of ranks started by torchrun, which is not an MPI job; 0 outside torchrun."""
    return (_read_number(env, "WORLD_SIZE") or 0) if "TORCHELASTIC_RUN_ID" in env else 0


def local_rank(env: Mapping[str, str]) -> int:
    """Return this process's rank on this machine, 0 if unknown."""
    return next((rank for name in _LOCAL_RANK_VARIABLES if (rank := _read_number(env, name)) is not None), 0)


def _read_number(env: Mapping[str, str], name: str) -> int | None:
    """Return the number in a variable set by a launcher, None if it has none."""
    digits = env.get(name, "").split("(")[0].split(",")[0]  # Slurm: '4(x2),3' are two nodes with 4 ranks, one with 3
    return int(digits) if digits.isdecimal() else None
