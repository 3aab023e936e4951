"""Start of a command on all ranks under mpirun: resource checks, command line and environment."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from .. import safe_path
from ..cluster.preflight import MAX_RANKS_PER_CORE, MIN_BYTES_PER_RANK
from ..errors import LaunchError
from ..io.checkpoint.snapshots import SUPERVISOR_ENV
from ..system import memory, threads
from ..system.heartbeat import SUPERVISOR_VARIABLE
from ..system.job import GENERATION_VARIABLE, JOB_START_TIME_VARIABLE, LAUNCHED_RANKS_VARIABLE
from ..terminal.console import say
from ..version import find_module_spec
from . import pinning
from .cleanup import create_temporary_job_folders
from .members import report_early_stop
from .monitor import LEASE_SECONDS, LOOPBACK_ADDRESS, STALL_TIMEOUT, Monitor
from .mpirun import INSTALL_REMEDY, Mpirun, find_mpirun
from .placement import list_own_addresses, open_job_placement
from .supervision import JobEnding, supervise_command

FORCE_HINT = "--force starts them anyway"
_FORWARDED_VARIABLES = (
    SUPERVISOR_VARIABLE, LAUNCHED_RANKS_VARIABLE, JOB_START_TIME_VARIABLE, GENERATION_VARIABLE, SUPERVISOR_ENV,
    *threads.THREAD_COUNT_VARIABLES,
    "TTY_COMPATIBLE", "TERM", "COLUMNS", "LINES",
)  # fmt: skip
_SUPERVISOR_OPTIONS = ("--restarts", "--elastic", "--lease", "--hosts-from", "--cooldown", "--wait", "--spares")
"""options of the supervisor, not passed on to ranks"""
_HOST_LIST_VARIABLES = ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE", "COBALT_NODEFILE")
_HOST_FILE_VARIABLES = ("PRTE_MCA_prte_default_hostfile", "OMPI_MCA_orte_default_hostfile")


def launch(
    arguments: argparse.Namespace,
    received_signals: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    hosts_changed: Callable[[], bool] | None = None,
) -> JobEnding:
    """Start `arguments.ranks` ranks of the same command under mpirun; return how the job ended.

    Parameters
    ----------
    received_signals : sequence of str
        Names of the signals received before the start.
    variables : mapping, optional
        Additional environment variables of the ranks.
    hosts_changed : callable, optional
        As for `supervise_command`.
    """
    mpirun, ranks = require_mpirun(os.environ), arguments.ranks
    if arguments.stops and received_signals:
        report_early_stop(received_signals)
    with open_job_placement(arguments, mpirun, ranks) as placement:
        env = rank_environment(mpirun, ranks, os.environ, pin_ranks=placement is None) | {**(variables or {})}
        if arguments.begun is not None:
            env[JOB_START_TIME_VARIABLE] = str(arguments.begun)
        addresses = supervisor_addresses(os.environ) if placement is None else placement.supervisor_addresses()
        timeouts = arguments.lease or LEASE_SECONDS, getattr(arguments, "stall_timeout", None) or STALL_TIMEOUT
        with create_temporary_job_folders(mpirun, env) as job, Monitor(ranks, addresses, *timeouts) as monitor:
            env |= {**job.environment, **monitor.environment}
            names = [name for name in _FORWARDED_VARIABLES if name in env]
            if placement is None:
                command = [*mpirun.command(ranks, names), *safe_path.python_command(*rank_module_and_args(arguments))]
            else:
                command = placement.command(mpirun, rank_module_and_args(arguments), names, os.environ)
                env = placement.mpirun_environment(env)
            ending = supervise_command(
                command, env, job.inherited_descriptors, arguments.stops, monitor, received_signals, hosts_changed
            )
            job.mpirun_exited = ending.exit_code < 128
    return ending


def report_failure(ending: JobEnding, arguments: argparse.Namespace) -> int:
    """Report the failure that ended the job, if any; return the exit code of the job."""
    if ending.failure_message:
        remedy = (
            "continue with --resume, or set --restarts K to restart automatically"
            if arguments.stops
            else "start the command again"
        )
        say(f"error: {ending.failure_message}; {remedy}", sys.stderr)
    elif arguments.stops and ending.stop_requested and ending.exit_code == 128 + signal.SIGTERM:
        say("error: SIGTERM ended the ranks before they had written a checkpoint; continue with --resume", sys.stderr)
    return ending.exit_code


def may_span_machines(env: Mapping[str, str]) -> bool:
    """Whether mpirun may start ranks on other machines, according to the environment."""
    spans_nodes = env.get("SLURM_JOB_NUM_NODES", "1") != "1"
    return spans_nodes or any(name in env for name in (*_HOST_LIST_VARIABLES, *_HOST_FILE_VARIABLES))


def supervisor_addresses(env: Mapping[str, str]) -> list[str]:
    """Return the addresses of this machine at which ranks reach their supervisor."""
    return list_own_addresses() if may_span_machines(env) else [LOOPBACK_ADDRESS]


def require_mpirun(env: Mapping[str, str]) -> Mpirun:
    """Return the mpirun to use; raise LaunchError if ranks cannot run."""
    if find_module_spec("mpi4py") is None:
        raise LaunchError(f"more than one rank needs mpi4py, which {sys.executable} cannot import; {INSTALL_REMEDY}")
    return find_mpirun(env)


def reject_too_many_ranks(ranks: int, env: Mapping[str, str]) -> None:
    """Raise LaunchError if this machine has too few cores or too little memory for the ranks.

    In the allocation of a batch system, do nothing, since mpirun may use machines unknown to this process.
    """
    if may_span_machines(env):
        return
    cores, free = threads.count_cores(), memory.free_bytes()
    if ranks > MAX_RANKS_PER_CORE * cores:
        limit_text = f"at most {MAX_RANKS_PER_CORE * cores} on {cores} {'core' if cores == 1 else 'cores'}"
        raise LaunchError(f"-n {ranks}: too few cores for that many ranks; give {limit_text}; {FORCE_HINT}")
    if free is not None and ranks * MIN_BYTES_PER_RANK > free:
        raise LaunchError(
            f"-n {ranks}: that many ranks need {memory.format_bytes(ranks * MIN_BYTES_PER_RANK)} before they read any"
            f" data, but only {memory.format_bytes(free)} are free; give at most {max(1, free // MIN_BYTES_PER_RANK)};"
            f" {FORCE_HINT}"
        )


def warn_of_too_many_threads(ranks: int, env: Mapping[str, str]) -> None:
    """Print a warning if the ranks have more threads than this machine can run without slowing down."""
    thread_count = threads.default_thread_count() if threads.is_thread_count_set(env) else 1
    warning = threads.describe_oversubscription(ranks, thread_count, threads.count_cores())
    if warning and not may_span_machines(env):
        say(warning, sys.stderr)


def rank_module_and_args(arguments: argparse.Namespace) -> list[str]:
    """Return the module that every rank runs, followed by its arguments."""
    if arguments.script:
        return ["neondist.launcher.script", os.path.abspath(arguments.file), *arguments.script[1:]]
    return ["neondist", *rank_args(arguments)]


def rank_args(arguments: argparse.Namespace) -> list[str]:
    """Return the arguments of every rank: those of the command, without -n and the options for starting ranks."""
    is_launch = arguments.words[:1] == ["launch"]
    kept_words, words = ["run"] if is_launch else [], iter(arguments.words[2:] if is_launch else arguments.words)
    for word in words:
        if word == "-n" or word in _SUPERVISOR_OPTIONS:
            next(words)
        elif not re.fullmatch(rf"-n\d+|({'|'.join(_SUPERVISOR_OPTIONS)})=.*", word):
            kept_words.append(word)
    return kept_words


def rank_environment(mpirun: Mpirun, ranks: int, env: Mapping[str, str], pin_ranks: bool = True) -> dict[str, str]:
    """Return the environment of the ranks; a number of threads set by the user is kept and determines pinning."""
    variables = {
        **mpirun.environment(),
        **env,
        LAUNCHED_RANKS_VARIABLE: str(ranks),
        JOB_START_TIME_VARIABLE: str(time.time()),
    }
    if not threads.is_thread_count_set(env):
        variables.update(dict.fromkeys(threads.THREAD_COUNT_VARIABLES, str(threads.threads_per_rank(ranks))))
    variables |= pinning.pinning_environment(ranks, variables) if pin_ranks else {}
    if sys.stdout.isatty():
        terminal_size = shutil.get_terminal_size()
        variables.update(COLUMNS=str(terminal_size.columns), LINES=str(terminal_size.lines))
    else:
        # mpirun gives the ranks a terminal even if its output is redirected: no progress bars in files
        variables.update(TTY_COMPATIBLE="0", TERM="dumb")
    return variables
