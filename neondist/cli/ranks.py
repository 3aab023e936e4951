"""What commands that run on ranks share: joining or starting them, and how an error on one of them ends."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ..config import place
from ..errors import LaunchError, RemoteError, UserError
from . import leftovers, threads
from .experiment import load
from .job import Job, detect
from .launch import ready
from .orphan import end_with_parent
from .report import show

if TYPE_CHECKING:
    from ..comm import Transport

Prepared = TypeVar("Prepared")


def job_of(arguments: argparse.Namespace) -> Job | None:
    """Return the MPI job that this process is in; LaunchError if -n says another number of ranks."""
    job = detect(os.environ)
    if job is not None and arguments.ranks not in (None, job.size or arguments.ranks):
        raise LaunchError(f"-n {arguments.ranks} inside an MPI job of {job.size} ranks; leave out -n, the job decides")
    return job


def must_launch(arguments: argparse.Namespace, job: Job | None) -> bool:
    """Tell whether ranks have to be started; LaunchError if they could not run."""
    if job is not None or (arguments.ranks or 1) == 1:
        return False
    ready(os.environ)
    return True


def join(job: Job | None) -> Transport:
    """Return the ranks of the job; outside of one, this process alone and no MPI."""
    from ..comm import SingleTransport, mpi

    if job is None:
        return SingleTransport()
    leftovers.restore(os.environ)
    end_with_parent()
    if job.local_size:
        threads.limit(job.local_size)
    world = mpi.world()
    if (job.size or 1) > 1 and world.size == 1:
        raise LaunchError(
            f"mpirun has started {job.size} ranks, but mpi4py sees one: they belong to different MPI libraries;"
            " use the mpirun of the library that `neondist doctor` shows, or install mpi4py again for yours"
        )
    return world


def validated(arguments: argparse.Namespace, ranks: int, world: Transport) -> Any:
    """Return the experiment once it is right on every rank: file, data and grid; collective."""
    return loaded(arguments, world, lambda experiment: experiment.validate(ranks))


def loaded(arguments: argparse.Namespace, world: Transport, check: Callable[[Any], None] | None = None) -> Any:
    """Return the experiment of the file, once it passes `check` on every rank; collective."""
    from ..comm import agree

    experiment: Any = None
    error: Exception | None = None
    try:
        experiment = load(arguments)
        if check is not None:
            check(experiment)
    except UserError as problem:
        error = place(problem)  # now, because the message travels to the other ranks and its subject does not
    except Exception as problem:
        error = problem
    agree(world, error)
    return experiment


def attend(world: Transport, prepare: Callable[[], Prepared], work: Callable[[Prepared], int]) -> int:
    """Prepare, whose mistakes all ranks find alike, then work; return its exit code, or that of an error.

    An error of one rank ends all of them, and one tells.
    """
    from ..comm import end_job

    try:
        prepared = prepare()
    except RemoteError:  # the rank that failed says why
        return 1
    except UserError as error:
        return _all_know(error, world)
    try:
        return work(prepared)
    except RemoteError:
        return 1
    except UserError as error:
        if getattr(error, "agreed", False):
            return _all_know(error, world)
        return _alone(error, world)
    except BaseException as error:
        if world.size == 1:
            raise
        if isinstance(error, KeyboardInterrupt):
            world.abort(130)
        end_job(world, error)
        return 1


def _all_know(error: UserError, world: Transport) -> int:
    """End a rank of a job whose ranks all have this error: the first one tells."""
    if world.rank == 0:
        show(error)
    return 2


def _alone(error: UserError, world: Transport) -> int:
    """End the job for an error that other ranks may not have; if rank 0 has it too, it is the one that tells."""
    if world.rank:
        time.sleep(1)
    show(error)
    if world.size > 1:
        world.abort(2)
    return 2
