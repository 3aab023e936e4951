"""What the environment says about the MPI job that this process is a rank of; no MPI is started to find out."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..threads import number

LAUNCHED = "NEONDIST_LAUNCHED"
"""Set by `neondist run -n N` for the ranks that it starts."""

MARKS = "NEONDIST_MARKS"
"""A folder of the job, in which its ranks leave marks for `neondist run -n N`."""

# size, rank, ranks on this node: Open MPI; MPICH and Intel MPI; srun
_FAMILIES = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_TASKS_PER_NODE"),
)


@dataclass(frozen=True)
class Job:
    """A running MPI job, as seen by one of its ranks.

    Attributes
    ----------
    size : ranks in all, None where the environment does not tell
    rank : this one, None where the environment does not tell
    local_size : ranks on this machine
    """

    size: int | None
    rank: int | None
    local_size: int | None

    @property
    def first(self) -> bool:
        """Whether this rank is the one that prints."""
        return not self.rank


def detect(env: Mapping[str, str]) -> Job | None:
    """Return the job that this process belongs to, or None outside of one."""
    launched = number(env, LAUNCHED)
    for names in _FAMILIES:
        size, rank, local = (number(env, name) for name in names)
        # a shell in a Slurm step of one task is no job of ours: -n shall start one there
        alone = size == 1 and "SLURM_STEP_ID" in env and not launched
        if size is not None and not alone and ("SLURM" not in names[0] or "SLURM_STEP_ID" in env):
            return Job(max(size, launched or 1), rank, local)
    if launched or ("PMIX_RANK" in env and "SLURM_STEP_ID" not in env):
        return Job(launched, number(env, "PMIX_RANK"), launched)
    return None


def mark(env: Mapping[str, str], what: str) -> None:
    """Let a rank tell `neondist run -n N`, if that has started it, what it has come to."""
    job = detect(env) if MARKS in env else None
    if job is not None:
        with suppress(OSError):
            Path(env[MARKS], f"{what}-{job.rank}").touch()


def marks(folder: Path, what: str) -> set[int]:
    """Return the ranks that have told so."""
    return {int(path.name.rpartition("-")[2]) for path in folder.glob(f"{what}-[0-9]*")}
