"""Where a command's ranks come from: an MPI job, mpirun, threads of this process, or this process alone."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from .. import threads
from ..errors import LaunchError
from . import guards, leftovers, pinning, restarts
from .attend import Prepared, attend
from .crowd import refuse_crowd
from .job import Job, detect
from .launch import launch, ready
from .limited import limited
from .orphan import end_with_parent
from .virtual import on_virtual_ranks

if TYPE_CHECKING:
    from ..comm import Transport
    from ..session import Watchdog


def on_ranks(
    arguments: argparse.Namespace,
    prepare: Callable[[Transport, int], Prepared],
    work: Callable[[Transport, Prepared], int],
) -> int:
    """Prepare and work on every rank, and return the exit code.

    The ranks are those of `--virtual`, of the MPI job that this process is in, or of a job that mpirun starts for `-n`.

    Parameters
    ----------
    arguments : the command's; `ranks`, and `virtual` where the command has it
    prepare : function of a transport and of the number of ranks
        Finds the user's mistakes, alike on every rank; called before mpirun is started as well, in one process.
    work : function of the transport and of what `prepare` has returned
    """

    def body(world: Transport) -> int:
        return attend(world, lambda: prepare(world, world.size), lambda prepared: work(world, prepared))

    restarts.settle(arguments, detect(os.environ))
    if getattr(arguments, "virtual", None) is not None:
        return on_virtual_ranks(arguments, body)
    from ..comm import SingleTransport, mpi

    job = job_of(arguments)
    if _must_launch(arguments, job):
        with guards.watched(arguments):
            prepared = prepare(SingleTransport(), arguments.ranks)
        if arguments.restarts is not None:
            return restarts.with_restarts(arguments, launch, prepared)
        return launch(arguments, arguments.signals.heard)
    if arguments.watched:
        arguments.watchdog = guards.watchdog(arguments, job, whole_process=True)
        arguments.watchdog.open()
    if job is None:
        return body(SingleTransport())
    code = body(_join(job, arguments.watchdog))
    with _patient(job, arguments.watchdog, "the end of MPI"):
        mpi.finish()
    return code


def job_of(arguments: argparse.Namespace) -> Job | None:
    """Return the MPI job that this process is in; LaunchError if -n says another number of ranks."""
    job = detect(os.environ)
    if job is not None and arguments.ranks not in (None, job.size or arguments.ranks):
        raise LaunchError(f"-n {arguments.ranks} inside an MPI job of {job.size} ranks; leave out -n, the job decides")
    return job


def _must_launch(arguments: argparse.Namespace, job: Job | None) -> bool:
    """Tell whether ranks have to be started; LaunchError if they could not run."""
    if job is not None or ((arguments.ranks or 1) == 1 and arguments.restarts is None):
        return False
    ready(os.environ)
    if not arguments.force:
        refuse_crowd(arguments.ranks, os.environ)
    return True


def _join(job: Job, watchdog: Watchdog | None) -> Transport:
    """Return the ranks of the job, once MPI has started; the watchdog learns who they are."""
    from ..comm import mpi

    leftovers.restore(os.environ)
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
    if watchdog is None:
        return nullcontext()
    return limited(
        watchdog.timeout,
        f"rank {job.rank} of {job.size}: no progress for {watchdog.timeout:g} s (--stall-timeout): waits in {place} for"
        " a rank that does not come to it",
    )
