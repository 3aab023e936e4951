"""Removal of Open MPI's files after a job, even if mpirun or this process is killed.

mpirun removes its session files and the ranks' shared memory on exit, unless it is killed. Both are therefore placed in
dedicated folders, which a detached process removes once this process and mpirun have closed a pipe.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from .mpirun import Mpirun

SHARED_MEMORY_DIR = Path("/dev/shm")
USER_TMPDIR_VARIABLE = "NEONDIST_TMPDIR"
"""Environment variable that passes the user's TMPDIR to the ranks."""
# end of file without a word: a process was killed, and a rank starting MPI may recreate the folders
_REMOVE_SCRIPT = (
    'read word; rm -rf -- "$@"; [ "$word" ] && exit; for i in 1 2 3 4 5 6; do sleep 1; rm -rf -- "$@"; done'
)


@dataclass
class TemporaryJobFolders:
    """Settings for the removal of mpirun's files.

    Attributes
    ----------
    environment : dict of str to str
        Environment variables to add.
    inherited_descriptors : tuple of int
        File descriptors that mpirun must inherit.
    mpirun_exited : bool
        Whether mpirun exited by itself; set it to False if mpirun may have been killed.
    """

    environment: dict[str, str] = field(default_factory=dict)
    inherited_descriptors: tuple[int, ...] = ()
    mpirun_exited: bool = True


@contextmanager
def create_temporary_job_folders(mpirun: Mpirun, env: Mapping[str, str]) -> Iterator[TemporaryJobFolders]:
    """Create folders for an Open MPI job; they are removed on exit, or once this process and mpirun are killed.

    A shared-memory folder set by the user is kept. Other MPI libraries need no folders.
    """
    from ..comm.shared_memory import (  # commands that start no job do not import NumPy
        BACKING_DIR_VARIABLE,
        JOB_FOLDER_PREFIX,
    )

    if not mpirun.is_open_mpi:
        yield TemporaryJobFolders()
        return
    folders = [tempfile.mkdtemp(prefix=JOB_FOLDER_PREFIX)]
    variables = {"TMPDIR": folders[0], USER_TMPDIR_VARIABLE: env.get("TMPDIR", "")}
    if BACKING_DIR_VARIABLE not in env and os.access(SHARED_MEMORY_DIR, os.W_OK):
        folders.append(tempfile.mkdtemp(prefix=JOB_FOLDER_PREFIX, dir=SHARED_MEMORY_DIR))
        variables[BACKING_DIR_VARIABLE] = folders[-1]
    reading_end, writing_end = os.pipe()
    try:
        remover = subprocess.Popen(
            ["/bin/sh", "-c", _REMOVE_SCRIPT, "sh", *folders],
            stdin=reading_end,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # survives a signal to this process's group
        )
    finally:
        os.close(reading_end)
    job_folders = TemporaryJobFolders(variables, (writing_end,))
    try:
        yield job_folders
    finally:
        if job_folders.mpirun_exited:
            with suppress(OSError):
                os.write(writing_end, b"done\n")
        os.close(writing_end)
        if job_folders.mpirun_exited:
            with suppress(subprocess.TimeoutExpired):
                remover.wait(10)


def restore_tmpdir(env: MutableMapping[str, str]) -> None:
    """Restore the user's own TMPDIR in a rank, which inherits the one set for mpirun."""
    tmpdir = env.pop(USER_TMPDIR_VARIABLE, None)
    if tmpdir is None:
        return
    env.pop("TMPDIR", None)
    if tmpdir:
        env["TMPDIR"] = tmpdir
    tempfile.tempdir = None  # the previous folder may be cached
