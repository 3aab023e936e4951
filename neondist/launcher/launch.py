"""mpirun with the same command on every rank: whether the machine carries them, what they are told."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from .. import safe_path
from ..errors import LaunchError
from ..io.checkpoint.snapshots import KEEPERS
from ..system import memory, threads
from ..system.heartbeat import SUPERVISOR
from ..system.job import GENERATION, LAUNCHED, STARTED
from ..terminal.console import say
from . import pinning
from .cleanup import job_folders
from .monitor import LEASE, LOOPBACK, Monitor
from .mpirun import REMEDY, Mpirun, find_mpirun
from .placement import list_addresses, placed
from .supervise import Ending, supervise

CROWD = 4
"""Threads per core above which a warning says that time is lost."""
PER_CORE = 16
"""Ranks that may share a core: more than anybody tries a cut with, and fewer than make a machine stand still."""
EACH = 64 << 20
"""Bytes of a rank that has loaded its libraries and nothing else."""
FORCE = "--force starts them anyway"
_HANDED_ON = (
    SUPERVISOR, LAUNCHED, STARTED, GENERATION, KEEPERS, *threads.VARIABLES, "TTY_COMPATIBLE", "TERM", "COLUMNS", "LINES"
)  # fmt: skip
_SUPERVISORS = ("--restarts", "--elastic", "--lease", "--hosts-from", "--cool-down", "--wait", "--spares")
"""options that ranks are not given"""
_ALLOCATIONS = ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE", "COBALT_NODEFILE")
_HOST_FILES = ("PRTE_MCA_prte_default_hostfile", "OMPI_MCA_orte_default_hostfile")


def launch(
    arguments: argparse.Namespace,
    received: Sequence[str] = (),
    more: Mapping[str, str] | None = None,
    change: Callable[[], bool] | None = None,
) -> Ending:
    """Start `arguments.ranks` ranks of the same command under mpirun; return how the job ended.

    Parameters
    ----------
    received : sequence of str
        Names of signals that came before.
    more : mapping, optional
        Further variables for the ranks.
    change : callable, optional
        As of `supervise`.
    """
    mpirun, ranks = ready(os.environ), arguments.ranks
    if arguments.stops and received:
        say(f"stopped before the ranks were started: received {received[0]}; start the same command again")
    with placed(arguments, mpirun, ranks) as placement:
        env = environment(mpirun, ranks, os.environ, pins=placement is None) | {**(more or {})}
        if arguments.begun is not None:
            env[STARTED] = str(arguments.begun)
        addresses = monitor_addresses(os.environ) if placement is None else placement.addresses()
        with job_folders(mpirun, env) as job, Monitor(ranks, addresses, arguments.lease or LEASE) as monitor:
            env |= {**job.environment, **monitor.environment}
            names = [name for name in _HANDED_ON if name in env]
            if placement is None:
                command = [*mpirun.command(ranks, names), *safe_path.command(*rank_words(arguments))]
            else:
                command = placement.command(mpirun, rank_words(arguments), names, os.environ)
                env = placement.environment(env)
            ending = supervise(command, env, job.held, arguments.stops, monitor, received, change)
            job.orderly = ending.code < 128
    return ending


def show_loss(ending: Ending, arguments: argparse.Namespace) -> int:
    """Say what the job has lost, if it has lost anything; return its exit code."""
    if ending.loss:
        goes_on = (
            "continue with --resume, or set --restarts K to restart automatically"
            if arguments.stops
            else "start the command again"
        )
        say(f"error: {ending.loss}; {goes_on}", sys.stderr)
    return ending.code


def several_machines(env: Mapping[str, str]) -> bool:
    """Whether mpirun may start ranks on other machines than this one, as far as the environment tells."""
    slurm = env.get("SLURM_JOB_NUM_NODES", "1") != "1"
    return slurm or any(name in env for name in (*_ALLOCATIONS, *_HOST_FILES))


def monitor_addresses(env: Mapping[str, str]) -> list[str]:
    """Return the addresses of this machine at which ranks reach their supervisor."""
    return list_addresses() if several_machines(env) else [LOOPBACK]


def ready(env: Mapping[str, str]) -> Mpirun:
    """Return the mpirun to use, or raise LaunchError where ranks could not run."""
    if importlib.util.find_spec("mpi4py") is None:
        raise LaunchError(f"more than one rank needs mpi4py, which {sys.executable} cannot import; {REMEDY}")
    return find_mpirun(env)


def refuse_crowd(ranks: int, env: Mapping[str, str]) -> None:
    """Raise LaunchError if so many ranks are too many for this machine's cores or memory.

    In the allocation of a batch system mpirun spreads them over machines that are not known here.
    """
    if several_machines(env):
        return
    cores, free = threads.cores(), memory.free_memory()
    if ranks > PER_CORE * cores:
        most = f"at most {PER_CORE * cores} on {cores} {'core' if cores == 1 else 'cores'}"
        raise LaunchError(f"-n {ranks}: too few cores for that many ranks; give {most}; {FORCE}")
    if free is not None and ranks * EACH > free:
        raise LaunchError(
            f"-n {ranks}: that many ranks need {memory.words(ranks * EACH)} before they read any data, but only"
            f" {memory.words(free)} are free; give at most {max(1, free // EACH)}; {FORCE}"
        )


def warn_crowd(ranks: int, env: Mapping[str, str]) -> None:
    """Say so where ranks compute with several times as many threads as this machine has cores."""
    cores, each = threads.cores(), threads.count_threads() if threads.chosen(env) else 1
    if several_machines(env) or ranks * each <= CROWD * cores:
        return
    remedies = [
        f"use -n {max(1, cores // each)}",
        *(["set OMP_NUM_THREADS=1"] if each > 1 else []),
        "use more machines",
    ]
    say(
        f"warning: {ranks} ranks x {each} {'thread' if each == 1 else 'threads'} on {cores}"
        f" {'core' if cores == 1 else 'cores'} mostly wait for each other; {', or '.join(remedies)}",
        sys.stderr,
    )


def rank_words(arguments: argparse.Namespace) -> list[str]:
    """Return the module that every rank runs, and its words."""
    if arguments.script:
        return ["neondist.launcher.script", os.path.abspath(arguments.file), *arguments.script[1:]]
    return ["neondist", *words(arguments)]


def words(arguments: argparse.Namespace) -> list[str]:
    """Return the words of every rank: the same command without -n, and without what tells how ranks are started."""
    launched = arguments.words[:1] == ["launch"]
    told, given = ["run"] if launched else [], iter(arguments.words[2:] if launched else arguments.words)
    for word in given:
        if word == "-n" or word in _SUPERVISORS:
            next(given)
        elif not re.fullmatch(rf"-n\d+|({'|'.join(_SUPERVISORS)})=.*", word):
            told.append(word)
    return told


def environment(mpirun: Mpirun, ranks: int, env: Mapping[str, str], pins: bool = True) -> dict[str, str]:
    """Return the environment of the ranks; a number of threads that the user has set stays, and rules pinning."""
    new = {**mpirun.environment(), **env, LAUNCHED: str(ranks), STARTED: str(time.time())}
    if not threads.chosen(env):
        new.update(dict.fromkeys(threads.VARIABLES, str(threads.share(ranks))))
    new |= pinning.environment(ranks, new) if pins else {}
    if sys.stdout.isatty():
        size = shutil.get_terminal_size()
        new.update(COLUMNS=str(size.columns), LINES=str(size.lines))
    else:
        # mpirun gives the ranks a terminal even if there is none at its other end: no progress bars into files
        new.update(TTY_COMPATIBLE="0", TERM="dumb")
    return new
