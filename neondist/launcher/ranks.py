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
from ..errors import LaunchError, RemoteError, UserError
from ..system import threads
from ..system.heartbeat import descriptor
from ..system.job import Job, detect
from ..terminal.console import say
from ..train import Watchdog
from . import members, pinning
from .cleanup import restore_tmpdir
from .generations import run_generations
from .launch import launch, ready, refuse_crowd, show_loss, warn_crowd
from .parent_watch import end_with_parent
from .report import show

Prepared = TypeVar("Prepared")
STALL_TIMEOUT = 600.0
PATIENCE = 24 * 3600.0
"""seconds that a virtual rank waits for a message of another, which may have a core's work before it"""
_LONG = 1.5
"""seconds of preparation from which the start of ranks is announced"""
# it waits outside of this process, in which nothing runs but faulthandler's own thread, for that one to write
_TELL = 'read word && printf "%s\\n" "$0" >&2 && echo failed'


def on_ranks(
    arguments: argparse.Namespace,
    prepare: Callable[[Transport, int], Prepared],
    work: Callable[[Transport, Prepared], int],
    elsewhere: Callable[[Prepared], int | None] = lambda prepared: None,
) -> int:
    """Prepare and work on every rank, and return the exit code.

    The ranks are those of `--virtual`, of the MPI job that this process is in, or of a job that mpirun starts for `-n`.

    Parameters
    ----------
    arguments : the command's; `ranks`, and `virtual` where the command has it
    prepare : function of a transport and of the number of ranks
        Finds the user's mistakes, alike on every rank; called before mpirun is started as well, in one process.
    work : function of the transport and of what `prepare` has returned
    elsewhere : function of what `prepare` has returned, optional
        Called before mpirun would be started; it may start other processes, and returns the exit code then.
    """

    def body(world: Transport) -> int:
        return _reported(world, prepare, work)

    members.settle(arguments, detect(os.environ))
    if getattr(arguments, "virtual", None) is not None:
        return _on_virtual_ranks(arguments, body)
    from ..comm import SingleTransport, mpi

    job = job_of(arguments)
    if must_launch(arguments, job):
        begun = time.monotonic()
        watches = new_watchdog(arguments) if arguments.watched else None
        if watches is not None:
            watches.open()
        try:
            prepared = prepare(SingleTransport(), _least(arguments))
        finally:
            if watches is not None:
                watches.stop()
        if time.monotonic() - begun > _LONG:  # as long will ranks take until they print
            say("starting the ranks", sys.stderr)
        if (code := elsewhere(prepared)) is not None:
            return code
        if arguments.restarts is not None or arguments.source is not None:
            return run_generations(arguments, prepared)
        return show_loss(launch(arguments, arguments.signals.received), arguments)
    if arguments.watched:
        arguments.watchdog = new_watchdog(arguments, job)
        arguments.watchdog.open()
    if job is None:
        return body(SingleTransport())
    code = body(_join(job, arguments.watchdog))
    with _patient(job, arguments.watchdog, "the end of MPI"):
        mpi.finish()
    return code


def start_script(arguments: argparse.Namespace) -> int:
    """Start a script on all ranks under mpirun, and again after losses if it may be; return the job's exit code."""
    if detect(os.environ) is not None:
        raise LaunchError(f"inside an MPI job each rank runs a script itself: python {arguments.file}")
    members.settle(arguments, None)
    arguments.ranks = arguments.ranks or 1
    if not must_launch(arguments, None):
        ready(os.environ)
    if arguments.restarts is not None or arguments.source is not None:
        return run_generations(arguments, None)
    return show_loss(launch(arguments), arguments)


def _reported(
    world: Transport, prepare: Callable[[Transport, int], Prepared], work: Callable[[Transport, Prepared], int]
) -> int:
    """Prepare, whose mistakes all ranks find alike, then work; return its exit code, or that of an error.

    An error of one rank ends all of them, and one tells.
    """
    from ..comm import end_job

    agreed = True
    try:
        prepared = prepare(world, world.size)
        agreed = False
        return work(world, prepared)
    except RemoteError:  # the rank that failed says why
        return 1
    except UserError as error:
        if agreed or error.agreed:
            if world.rank == 0:
                show(error)
            return 2
        if world.rank:
            time.sleep(1)  # if rank 0 has it too, that one tells
        show(error)
        if world.size > 1:
            world.abort(2)
        return 2
    except BaseException as error:
        if agreed or world.size == 1:
            raise
        if isinstance(error, KeyboardInterrupt):
            world.abort(130)
        end_job(world, error)
        return 1


def job_of(arguments: argparse.Namespace) -> Job | None:
    """Return the MPI job that this process is in; LaunchError if -n says another number of ranks."""
    job = detect(os.environ)
    if job is not None and arguments.ranks not in (None, job.size or arguments.ranks):
        raise LaunchError(f"-n {arguments.ranks} inside an MPI job of {job.size} ranks; leave out -n, the job decides")
    return job


def new_watchdog(arguments: argparse.Namespace, job: Job | None = None, whole_process: bool = True) -> Watchdog:
    """Return who watches over this process, or over a virtual rank."""
    from ..train import Watchdog

    rank, size = (job.rank or 0, job.size or 1) if job is not None else (0, 1)
    timeout = getattr(arguments, "stall_timeout", None) or STALL_TIMEOUT
    return Watchdog(timeout, whole_process=whole_process, rank=rank, size=size, folder=arguments.folder)


def _on_virtual_ranks(arguments: argparse.Namespace, body: Callable[[Transport], int]) -> int:
    """Call body(transport) on every virtual rank, a thread each, and return the highest exit code."""
    if arguments.ranks is not None:
        raise LaunchError("--virtual runs all ranks in this process, and -n starts processes; give one of them")
    if detect(os.environ) is not None:
        raise LaunchError("--virtual inside an MPI job: leave it out, or run the command without mpirun")
    from ..comm import loopback

    threads.limit(arguments.virtual)
    return max(loopback.run(arguments.virtual, body, timeout=PATIENCE, at_once=threads.cores()))


def must_launch(arguments: argparse.Namespace, job: Job | None) -> bool:
    """Return whether ranks have to be started; LaunchError if they could not run."""
    placed = arguments.resources is not None or arguments.source is not None
    if job is not None or ((arguments.ranks or 1) == 1 and arguments.restarts is None and not placed):
        return False
    ready(os.environ)
    if not arguments.force and not placed:
        refuse_crowd(arguments.ranks, os.environ)
        warn_crowd(arguments.ranks, os.environ)
    return True


def _least(arguments: argparse.Namespace) -> int:
    """Return the number of ranks that the input is checked for: the least, where hosts decide how many there are."""
    if arguments.elastic is not None and arguments.source is not None:
        return int(arguments.elastic[0])
    return int(arguments.ranks)


def _join(job: Job, watchdog: Watchdog | None) -> Transport:
    """Return the ranks of the job, once MPI has started; the watchdog learns who they are."""
    from ..comm import mpi

    restore_tmpdir(os.environ)
    end_with_parent()
    pinning.pin(job, os.environ)
    if job.local_size:
        threads.limit(job.local_size)
    with _patient(job, watchdog, "the start of MPI"):
        world = mpi.world()
    if (job.size or 1) > 1 and world.size == 1:
        raise LaunchError(
            f"mpirun has started {job.size} ranks, but mpi4py sees one: they belong to different MPI libraries;"
            " use the mpirun of the library that `neondist doctor` shows, or install mpi4py again for yours"
        )
    if watchdog is not None:
        host = platform.node()
        watchdog.join(world, world.allgather((host, os.getpid())), host)
    return world


def _patient(job: Job, watchdog: Watchdog | None, place: str) -> AbstractContextManager[None]:
    """Limit a block in which MPI waits for all ranks and lets no other thread run."""
    if watchdog is None or os.name != "posix":
        return nullcontext()
    return _limited(
        watchdog.timeout,
        f"rank {job.rank} of {job.size}: no progress for {watchdog.timeout:g} s (--stall-timeout): waits in {place} for"
        " a rank that has not reached it",
    )


@contextmanager
def _limited(seconds: float, text: str) -> Iterator[None]:
    """End this process with exit code 1, and say `text`, if the block takes longer than so many seconds."""
    supervisor, silent = descriptor(os.environ), subprocess.DEVNULL
    teller = subprocess.Popen(
        ["/bin/sh", "-c", _TELL, text],
        stdin=subprocess.PIPE,
        stdout=silent if supervisor is None else supervisor,
        start_new_session=True,
    )
    assert teller.stdin is not None
    faulthandler.dump_traceback_later(seconds, exit=True, file=teller.stdin.fileno())
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        teller.stdin.close()
        teller.wait()
