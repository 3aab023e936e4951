"""A job's files go with it, even if mpirun or this process is killed: Open MPI's.

mpirun removes its session files and the ranks' shared memory in the end, unless it is killed. So both get folders of
their own, and an unrelated process waits at a pipe until this process and mpirun are gone, and removes them.
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

SHARED_MEMORY = Path("/dev/shm")
USERS = "NEONDIST_TMPDIR"
"""What the user has for TMPDIR, for the ranks."""
# without a word, something was killed: a rank that starts MPI may recreate the folders before it ends, too
_REMOVE = 'read word; rm -rf -- "$@"; [ "$word" ] && exit; for i in 1 2 3 4 5 6; do sleep 1; rm -rf -- "$@"; done'


@dataclass
class JobFolders:
    """Folders and arguments for mpirun, so that its files are removed.

    Attributes
    ----------
    environment : variables to add
    held : file descriptors that mpirun must inherit
    orderly : whether mpirun, as far as is known, has ended by itself
    """

    environment: dict[str, str] = field(default_factory=dict)
    held: tuple[int, ...] = ()
    orderly: bool = True


@contextmanager
def job_folders(mpirun: Mpirun, env: Mapping[str, str]) -> Iterator[JobFolders]:
    """Give a job of Open MPI folders that are removed when this block is left, or this process and mpirun are killed.

    Where the user has chosen the folder of the shared memory, that stays. Other MPIs get nothing.
    """
    from ..comm.segments import BACKING, PREFIX  # the commands that start no job do without NumPy

    if not mpirun.is_open_mpi:
        yield JobFolders()
        return
    folders = [tempfile.mkdtemp(prefix=PREFIX)]
    new = {"TMPDIR": folders[0], USERS: env.get("TMPDIR", "")}
    if BACKING not in env and os.access(SHARED_MEMORY, os.W_OK):
        folders.append(tempfile.mkdtemp(prefix=PREFIX, dir=SHARED_MEMORY))
        new[BACKING] = folders[-1]
    end, held = os.pipe()
    try:
        remover = subprocess.Popen(
            ["/bin/sh", "-c", _REMOVE, "sh", *folders],
            stdin=end,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # whoever ends this process's group leaves it alone
        )
    finally:
        os.close(end)
    job = JobFolders(new, (held,))
    try:
        yield job
    finally:
        if job.orderly:
            with suppress(OSError):
                os.write(held, b"done\n")
        os.close(held)
        if job.orderly:
            with suppress(subprocess.TimeoutExpired):
                remover.wait(10)


def restore_tmpdir(env: MutableMapping[str, str]) -> None:
    """Let a rank have the user's own TMPDIR again, now that MPI's is known to mpirun."""
    users = env.pop(USERS, None)
    if users is None:
        return
    env.pop("TMPDIR", None)
    if users:
        env["TMPDIR"] = users
    tempfile.tempdir = None  # it was looked up, perhaps
