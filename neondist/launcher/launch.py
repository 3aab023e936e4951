"""mpirun with the same command on every rank: whether the machine carries them, what they are told, how they ended."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence

from .. import memory, safe_path, threads
from ..console import say
from ..errors import LaunchError
from ..job import LAUNCHED
from . import pinning
from .cleanup import job_folders
from .mpirun import REMEDY, Mpirun, find_mpirun
from .supervise import supervise

STARTED = "NEONDIST_STARTED"
"""When the job was started, as time.time() tells; set by `neondist run -n N` for its ranks."""
PER_CORE = 16
"""Ranks that may share a core: more than anybody tries a cut with, and fewer than make a machine stand still."""
EACH = 64 << 20
"""Bytes of a rank that has loaded its libraries and nothing else."""
FORCE = "--force starts them all the same"
_ALLOCATIONS = ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE", "COBALT_NODEFILE")


def launch(arguments: argparse.Namespace, heard: Sequence[str] = ()) -> int:
    """Start `arguments.ranks` ranks of the same command under mpirun; return the job's exit code.

    `heard` are the names of signals that came before.
    """
    mpirun, ranks = ready(os.environ), arguments.ranks
    command = [*mpirun.command(ranks), *safe_path.command("neondist", *words(arguments))]
    env = environment(mpirun, ranks, os.environ)
    if arguments.begun is not None:
        env[STARTED] = str(arguments.begun)
    with job_folders(mpirun, env) as job:

        def listen() -> bool:
            marked = job.marked("listens")
            return marked is None or len(marked) == ranks

        if arguments.stops and heard:
            say(f"stopped before the ranks were started: {heard[0]} came; start the same command again")
        code = supervise(command, {**env, **job.environment}, job.held, arguments.stops, listen, heard)
        job.orderly = code < 128
        done = job.marked("done")
    if code == 0 and done is not None and len(done) < ranks:
        gone = ", ".join(str(rank) for rank in range(ranks) if rank not in done)
        say(
            f"error: rank {gone} ended before the command did, without a word: os._exit in code of your own?",
            sys.stderr,
        )
        return 1
    return code


def ready(env: Mapping[str, str]) -> Mpirun:
    """Return the mpirun to use, or raise LaunchError where ranks could not run."""
    if importlib.util.find_spec("mpi4py") is None:
        raise LaunchError(f"more than one rank needs mpi4py, which {sys.executable} cannot import; {REMEDY}")
    return find_mpirun(env)


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


def words(arguments: argparse.Namespace) -> list[str]:
    """Return what every rank is told: the same command without -n, and without what tells how ranks are started."""
    told, given = [], iter(arguments.words)
    for word in given:
        if word in ("-n", "--restarts", "--elastic"):
            next(given)
        elif not re.fullmatch(r"-n\d+|--(restarts|elastic)=.*", word):
            told.append(word)
    return told


def environment(mpirun: Mpirun, ranks: int, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the ranks; a number of threads that the user has set stays, and rules pinning."""
    new = {**mpirun.environment(), **env, LAUNCHED: str(ranks), STARTED: str(time.time())}
    if not threads.chosen(env):
        new.update(dict.fromkeys(threads.VARIABLES, str(threads.share(ranks))))
    new |= pinning.environment(ranks, new)
    if sys.stdout.isatty():
        size = shutil.get_terminal_size()
        new.update(COLUMNS=str(size.columns), LINES=str(size.lines))
    else:
        # mpirun gives the ranks a terminal even if there is none at its other end: no progress bars into files
        new.update(TTY_COMPATIBLE="0", TERM="dumb")
    return new
