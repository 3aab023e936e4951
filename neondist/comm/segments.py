"""Open MPI's shared memory between the ranks of a machine, which shall not outlive them.

Its files have names only so that ranks can find them. Once all have, the names can go: then nothing is left behind,
however a rank ends.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

BACKING = "OMPI_MCA_btl_sm_backing_directory"
"""Where Open MPI puts the files."""
PREFIX = "neondist-"
"""Of folders that are made for one job."""
MAPS = Path("/proc/self/maps")
_LAUNCHERS = ("PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMI_FD", "SLURM_PROCID")


@contextmanager
def tidy_start() -> Iterator[None]:
    """Let MPI start in here: in the folder of the job, or, without a launcher, in one that goes at once."""
    folder = Path(os.environ.get(BACKING, ""))
    machines = os.environ.get("OMPI_COMM_WORLD_SIZE") != os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    if folder.name.startswith(PREFIX) and machines:
        folder.mkdir(mode=0o700, exist_ok=True)  # only mpirun's own machine has it already
    if any(name in os.environ for name in _LAUNCHERS):
        yield
        return
    before = os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix=PREFIX) as passing:
        os.environ["TMPDIR"] = passing
        try:
            yield
        finally:
            os.environ.pop("TMPDIR")
            if before is not None:
                os.environ["TMPDIR"] = before


def forget_names(mpi: Any) -> None:
    """Remove the names of the shared memory of all ranks, if each has what it needs; collective over all ranks."""
    if mpi.get_vendor()[0] != "Open MPI":
        return
    machine = mpi.COMM_WORLD.Split_type(mpi.COMM_TYPE_SHARED)
    names = _mapped()
    if machine.allreduce(len(names) == machine.size, op=mpi.LAND) and machine.rank == 0:
        for name in names:
            with suppress(OSError):
                name.unlink()
        folder = next(iter(names)).parent
        if folder.name.startswith(PREFIX):
            with suppress(OSError):
                folder.rmdir()
    machine.Free()


def _mapped() -> set[Path]:
    """Return the files of shared memory, of all ranks of this machine, that this rank has and that have names."""
    try:
        maps = MAPS.read_text()
    except OSError:  # not Linux
        return set()
    return {Path(name) for name in re.findall(r"(?m)(/\S*/(?:sm|vader)_segment\.\S+)$", maps)}
