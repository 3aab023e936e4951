"""Starting an MPI job of the same command."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence

from .. import safe_path
from ..errors import LaunchError
from ..threads import VARIABLES, share
from . import guards, pinning
from .job import LAUNCHED, marks
from .leftovers import swept
from .mpirun import REMEDY, Mpirun, find_mpirun
from .supervise import supervise


def launch(arguments: argparse.Namespace, heard: Sequence[str] = ()) -> int:
    """Start `arguments.ranks` ranks of the same command under mpirun; return the job's exit code.

    `heard` are the names of signals that came before.
    """
    mpirun = ready(os.environ)
    command = [*mpirun.command(arguments.ranks), *safe_path.command("neondist", *words(arguments))]
    env = environment(mpirun, arguments.ranks, os.environ)
    if arguments.begun is not None:
        env[guards.STARTED] = str(arguments.begun)
    ranks = arguments.ranks
    with swept(mpirun, env) as job:

        def listen() -> bool:
            return job.marks is None or len(marks(job.marks, "listens")) == ranks

        if arguments.stops and heard:
            print(f"stopped before the ranks were started: {heard[0]} came; start the same command again")
        code = supervise(command, {**env, **job.environment}, job.held, arguments.stops, listen, heard)
        job.orderly = code < 128
        done = None if job.marks is None else marks(job.marks, "done")
    if code == 0 and done is not None and len(done) < ranks:
        gone = ", ".join(str(rank) for rank in range(ranks) if rank not in done)
        print(
            f"error: rank {gone} ended before the command did, without a word: os._exit in code of your own?",
            file=sys.stderr,
        )
        return 1
    return code


def ready(env: Mapping[str, str]) -> Mpirun:
    """Return the mpirun to use, or raise LaunchError where ranks could not run."""
    if importlib.util.find_spec("mpi4py") is None:
        raise LaunchError(f"more than one rank needs mpi4py, which {sys.executable} cannot import; {REMEDY}")
    return find_mpirun(env)


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
    new = {**mpirun.environment(), **env, LAUNCHED: str(ranks), guards.STARTED: str(time.time())}
    if not any(name in env for name in VARIABLES):
        new.update(dict.fromkeys(VARIABLES, str(share(ranks))))
    new |= pinning.environment(ranks, new)
    if sys.stdout.isatty():
        size = shutil.get_terminal_size()
        new.update(COLUMNS=str(size.columns), LINES=str(size.lines))
    else:
        # mpirun gives the ranks a terminal even if there is none at its other end: no progress bars into files
        new.update(TTY_COMPATIBLE="0", TERM="dumb")
    return new
