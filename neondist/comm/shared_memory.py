"""Cleanup of Open MPI's shared-memory files, which must not outlive their ranks.

Ranks open the files by name. Once all ranks have opened them, the names are removed, so no files are left behind,
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

BACKING_DIR_VARIABLE = "OMPI_MCA_btl_sm_backing_directory"
"""Open MPI's variable for the folder of the files."""
JOB_FOLDER_PREFIX = "neondist-"
MEMORY_MAPS_FILE = Path("/proc/self/maps")
_LAUNCHER_VARIABLES = ("PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMI_FD", "SLURM_PROCID")


@contextmanager
def mpi_start_folder() -> Iterator[None]:
    """Set the folder for files of MPI started in the block: the job's or, without a launcher, a temporary folder."""
    folder = Path(os.environ.get(BACKING_DIR_VARIABLE, ""))
    spans_machines = os.environ.get("OMPI_COMM_WORLD_SIZE") != os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    if folder.name.startswith(JOB_FOLDER_PREFIX) and spans_machines:
        folder.mkdir(mode=0o700, exist_ok=True)  # the launcher has created it only on mpirun's machine
    if any(name in os.environ for name in _LAUNCHER_VARIABLES):
        yield
        return
    previous_tmpdir = os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix=JOB_FOLDER_PREFIX) as temporary:
        os.environ["TMPDIR"] = temporary
        try:
            yield
        finally:
            os.environ.pop("TMPDIR")
            if previous_tmpdir is not None:
                os.environ["TMPDIR"] = previous_tmpdir


def unlink_segments(mpi: Any) -> None:
    """Remove the names of the shared-memory files once all ranks have opened them. Collective over all ranks."""
    if mpi.get_vendor()[0] != "Open MPI":
        return
    machine_comm = mpi.COMM_WORLD.Split_type(mpi.COMM_TYPE_SHARED)
    segment_files = _mapped_segment_files()
    if machine_comm.allreduce(len(segment_files) == machine_comm.size, op=mpi.LAND) and machine_comm.rank == 0:
        for name in segment_files:
            with suppress(OSError):
                name.unlink()
        folder = next(iter(segment_files)).parent
        if folder.name.startswith(JOB_FOLDER_PREFIX):
            with suppress(OSError):
                folder.rmdir()
    machine_comm.Free()


def _mapped_segment_files() -> set[Path]:
    """Return the shared-memory files that this rank has mapped: those of all ranks on this machine."""
    try:
        maps_text = MEMORY_MAPS_FILE.read_text()
    except OSError:  # not Linux
        return set()
    return {Path(name) for name in re.findall(r"(?m)(/\S*/(?:sm|vader)_segment\.\S+)$", maps_text)}
