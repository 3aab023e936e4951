"""Sources of a command's ranks: an MPI job, mpirun, threads of this process, or this process alone."""

from __future__ import annotations

import argparse
import faulthandler
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

from ..comm import Transport
from ..errors import REPORT_DELAY_SECONDS, LaunchError, RemoteError, UserError
from ..io.files import convert_path_errors
from ..system import threads
from ..system.collector import exempt_new_objects_from_gc
from ..system.heartbeat import supervisor_descriptor
from ..system.job import Job, detect_job
from ..terminal.console import say
from ..terminal.progress_line import preparation_progress
from ..train import Watchdog
from . import members, pinning
from .cleanup import restore_tmpdir
from .generations import run_generations
from .launch import launch, reject_too_many_ranks, report_failure, require_mpirun, warn_of_too_many_threads
from .monitor import STALL_TIMEOUT
from .parent_watch import end_with_parent
from .report import print_error

Prepared = TypeVar("Prepared")
VIRTUAL_RANK_TIMEOUT = 24 * 3600.0
"""seconds for which a virtual rank waits for a message from another rank, which may be waiting for a core"""
_ANNOUNCE_AFTER_SECONDS = 1.5
"""seconds of preparation after which the start of ranks is announced"""
# runs in a separate process, since only faulthandler's thread may still run in this one
_STALL_REPORT_SCRIPT = 'read word && printf "%s\\n" "$0" >&2 && echo failed'


def run_on_ranks(
    arguments: argparse.Namespace,
    prepare: Callable[[Transport, int], Prepared],
    work: Callable[[Transport, Prepared], int],
    run_elsewhere: Callable[[Prepared], int | None] = lambda prepared: None,
) -> int:
    """Prepare and work on every rank, and return the exit code.

    The ranks are those of `--virtual`, of the MPI job of this process, or of a job that mpirun starts for `-n`.

    Parameters
    ----------
    arguments : Namespace
        Arguments of the command, with `ranks`; `virtual` only if the command has this option.
    prepare : callable
        Takes a transport and the number of ranks, and raises user errors, identically on every rank. Also called once
        before mpirun is started.
    work : callable
        Takes the transport and the result of `prepare`, and returns the exit code.
    run_elsewhere : callable, optional
        Takes the result of `prepare` before mpirun is started, and returns None or, if it has run the command in other
        processes, the exit code.
    """
    owns_process = arguments.signals.owns_process

    def prepare_with_progress(world: Transport, ranks: int) -> Prepared:
        with preparation_progress(world.rank, owns_process):
            return prepare(world, ranks)

    prepare_rank = exempt_new_objects_from_gc()(prepare_with_progress) if owns_process else prepare_with_progress

    def run_rank(world: Transport) -> int:
        return _run_and_report_errors(world, prepare_rank, work)

    members.resolve_host_options(arguments, detect_job(os.environ))
    if getattr(arguments, "virtual", None) is not None:
        return _run_on_virtual_ranks(arguments, run_rank)
    from ..comm import SingleTransport, mpi

    job = get_mpi_job(arguments)
    if needs_launch(arguments, job):
        start_time = time.monotonic()
        watchdog = create_watchdog(arguments) if arguments.watched else None
        if watchdog is not None:
            watchdog.open()
        try:
            prepared = prepare_rank(SingleTransport(), _rank_count_to_validate(arguments))
        finally:
            if watchdog is not None:
                watchdog.stop_watching()
        # the ranks will take as long before their first output
        if time.monotonic() - start_time > _ANNOUNCE_AFTER_SECONDS:
            say("starting the ranks", sys.stderr)
        if (code := run_elsewhere(prepared)) is not None:
            return code
        if members.needs_generations(arguments):
            return run_generations(arguments, prepared)
        return report_failure(launch(arguments, arguments.signals.received_signals), arguments)
    if arguments.watched:
        arguments.watchdog = create_watchdog(arguments, job)
        arguments.watchdog.open()
    if job is None:
        return run_rank(SingleTransport())
    code = run_rank(_start_mpi(job, arguments.watchdog))
    with _limit_stall(job, arguments.watchdog, "the end of MPI"):
        mpi.finalise_mpi()
    return code


def run_script_on_ranks(arguments: argparse.Namespace) -> int:
    """Run a script on all ranks under mpirun, with restarts after failures if enabled; return the exit code."""
    if detect_job(os.environ) is not None:
        raise LaunchError(f"inside an MPI job, run the script directly: python {arguments.file}")
    members.resolve_host_options(arguments, None)
    arguments.ranks = arguments.ranks or 1
    if not needs_launch(arguments, None):
        require_mpirun(os.environ)
    if members.needs_generations(arguments):
        return run_generations(arguments, None)
    return report_failure(launch(arguments), arguments)


def _run_and_report_errors(
    world: Transport, prepare: Callable[[Transport, int], Prepared], work: Callable[[Transport, Prepared], int]
) -> int:
    """Prepare and work; return the exit code of the work, or of an error.

    User errors in `prepare` occur on all ranks, except those of files, which nodes may lack. An error on one rank ends
    all ranks, and one of them reports it.
    """
    from ..comm import abort_with_error

    is_agreed = True
    try:
        with convert_path_errors():
            prepared = prepare(world, world.size)
        is_agreed = False
        return work(world, prepared)
    except RemoteError:  # reported by the rank that failed
        return 1
    except UserError as error:
        if error.raised_on_all_ranks or (is_agreed and not isinstance(error.__cause__, OSError)):
            if world.rank == 0:
                print_error(error)
            return 2
        if world.rank:
            time.sleep(REPORT_DELAY_SECONDS)
        print_error(error)
        if world.size > 1:
            world.abort(2)
        return 2
    except BaseException as error:
        if world.size == 1:
            raise
        if isinstance(error, KeyboardInterrupt):
            world.abort(130)
        abort_with_error(world, error)
        return 1


def get_mpi_job(arguments: argparse.Namespace) -> Job | None:
    """Return the MPI job of this process; LaunchError if -n differs from its number of ranks."""
    job = detect_job(os.environ)
    if job is not None and arguments.ranks not in (None, job.size or arguments.ranks):
        raise LaunchError(f"-n {arguments.ranks} inside an MPI job of {job.size} ranks; leave out -n")
    return job


def create_watchdog(arguments: argparse.Namespace, job: Job | None = None, owns_process: bool = True) -> Watchdog:
    """Return the watchdog of this process, or of a virtual rank."""
    from ..train import Watchdog

    rank, size = (job.rank or 0, job.size or 1) if job is not None else (0, 1)
    timeout = getattr(arguments, "stall_timeout", None) or STALL_TIMEOUT
    return Watchdog(timeout, owns_process=owns_process, rank=rank, size=size, folder=arguments.folder)


def _run_on_virtual_ranks(arguments: argparse.Namespace, run_rank: Callable[[Transport], int]) -> int:
    """Call run_rank(transport) on every virtual rank, a thread each, and return the highest exit code."""
    if arguments.ranks is not None:
        raise LaunchError("--virtual runs all ranks in this process, and -n starts processes; give only one of the two")
    if detect_job(os.environ) is not None:
        raise LaunchError("--virtual cannot be used inside an MPI job; leave it out, or run the command without mpirun")
    from ..comm import loopback

    threads.limit_threads(arguments.virtual)
    return max(loopback.run(arguments.virtual, run_rank, timeout=VIRTUAL_RANK_TIMEOUT, at_once=threads.count_cores()))


def needs_launch(arguments: argparse.Namespace, job: Job | None) -> bool:
    """Return whether ranks have to be started; LaunchError if they cannot run."""
    has_hosts = arguments.resources is not None or arguments.source is not None
    is_single = arguments.ranks is None or (arguments.ranks == 1 and arguments.sync_policy is None)
    if job is not None or (is_single and arguments.restarts is None and not has_hosts):
        return False
    require_mpirun(os.environ)
    if not arguments.force and not has_hosts:
        reject_too_many_ranks(arguments.ranks, os.environ)
        warn_of_too_many_threads(arguments.ranks, os.environ)
    return True


def _rank_count_to_validate(arguments: argparse.Namespace) -> int:
    """Return the number of ranks for which to validate the input: the minimum if the hosts determine it."""
    if arguments.elastic is not None and arguments.source is not None:
        return int(arguments.elastic[0])
    return int(arguments.ranks)


def _start_mpi(job: Job, watchdog: Watchdog | None) -> Transport:
    """Start MPI, pass the hosts and pids of its ranks to the watchdog, and return their transport."""
    from ..comm import mpi

    restore_tmpdir(os.environ)
    end_with_parent()
    pinning.pin_rank(job, os.environ)
    if job.local_size:
        threads.limit_threads(job.local_size)
    with _limit_stall(job, watchdog, "the start of MPI"):
        world = mpi.world_transport()
    if (job.size or 1) > 1 and world.size == 1:
        raise LaunchError(
            f"mpirun has started {job.size} ranks, but mpi4py sees one: they belong to different MPI libraries;"
            " use the mpirun of the library that `neondist doctor` shows, or reinstall mpi4py for your own"
        )
    if watchdog is not None:
        host = platform.node()
        watchdog.set_ranks(world, world.allgather((host, os.getpid())), host)
    return world


def _limit_stall(job: Job, watchdog: Watchdog | None, place: str) -> AbstractContextManager[None]:
    """Limit the time of a block in which MPI waits for all ranks without releasing the GIL."""
    if watchdog is None or os.name != "posix":
        return nullcontext()
    return _exit_if_longer_than(
        watchdog.timeout,
        f"rank {job.rank} of {job.size}: no progress for {watchdog.timeout:g} s (--stall-timeout): waiting in {place}"
        " for a rank that has not reached it",
    )


@contextmanager
def _exit_if_longer_than(seconds: float, text: str) -> Iterator[None]:
    """End this process with exit code 1 and print `text` if the block takes longer than `seconds`."""
    supervisor, null = supervisor_descriptor(os.environ), subprocess.DEVNULL
    reporter = subprocess.Popen(
        ["/bin/sh", "-c", _STALL_REPORT_SCRIPT, text],
        stdin=subprocess.PIPE,
        stdout=null if supervisor is None else supervisor,
        start_new_session=True,
    )
    assert reporter.stdin is not None
    faulthandler.dump_traceback_later(seconds, exit=True, file=reporter.stdin.fileno())
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        reporter.stdin.close()
        reporter.wait()
