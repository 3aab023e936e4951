"""`neondist run`: train what a file describes, here or on ranks that mpirun starts."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import dump, place
from ..errors import LaunchError, RemoteError, UserError
from . import threads
from .experiment import load
from .job import Job, detect
from .launch import launch, ready
from .report import show

if TYPE_CHECKING:
    from ..comm import Transport


def run(arguments: argparse.Namespace) -> int:
    """Join the MPI job that this process is in, else run in this process, or start mpirun where -n asks for ranks."""
    job = detect(os.environ)
    if job is None and (arguments.ranks or 1) > 1:
        from ..comm import SingleTransport

        ready(os.environ)
        prepare(arguments, arguments.ranks, SingleTransport())
        return launch(arguments)
    if job is not None and arguments.ranks not in (None, job.size or arguments.ranks):
        raise LaunchError(f"-n {arguments.ranks} inside an MPI job of {job.size} ranks; leave out -n, the job decides")
    return _train(arguments, _world(job))


def prepare(arguments: argparse.Namespace, ranks: int, world: Transport) -> Any:
    """Return the experiment once nothing stands in its way: file, data, grid and output directory; collective."""
    from ..comm import agree
    from ..session.output import prepare as prepare_output

    experiment: Any = None
    error: Exception | None = None
    try:
        experiment = load(arguments)
        experiment.validate(ranks)
    except UserError as problem:
        error = place(problem)  # now, because the message travels to the other ranks and its subject does not
    except Exception as problem:
        error = problem
    agree(world, error)
    prepare_output(world, output(arguments))
    return experiment


def output(arguments: argparse.Namespace) -> Path:
    """Return the directory that the run writes to."""
    return Path(arguments.output) if arguments.output else Path("runs") / Path(arguments.file).stem


def _world(job: Job | None) -> Transport:
    """Return the ranks of the job; outside of one, this process alone and no MPI."""
    from ..comm import SingleTransport, mpi

    if job is None:
        return SingleTransport()
    if job.local_size:
        threads.limit(job.local_size)
    world = mpi.world()
    if (job.size or 1) > 1 and world.size == 1:
        raise LaunchError(
            f"mpirun has started {job.size} ranks, but mpi4py sees one: they belong to different MPI libraries;"
            " use the mpirun of the library that `neondist doctor` shows, or install mpi4py again for yours"
        )
    return world


def _train(arguments: argparse.Namespace, world: Transport) -> int:
    from ..comm import ProcessGrid, end_job

    try:
        experiment = prepare(arguments, world.size, world)
        resolved = dump(experiment)
        grid = ProcessGrid(world, **(experiment.grid if experiment.dist_flag else {}))
    except RemoteError:  # the rank that failed says why
        return 1
    except UserError as error:
        return _all_know(error, world)
    try:
        result = experiment.run(grid, output=output(arguments), resume=arguments.resume, resolved=resolved)
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
    if world.rank == 0:
        print("written:")
        for file in result.files:
            print(f"  {file}")
    return result.stop.code if result.stop else 0


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
