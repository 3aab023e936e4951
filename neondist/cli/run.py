"""`neondist run`: train what a file describes, here or on ranks that mpirun starts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import dump
from . import guards
from .launch import launch
from .ranks import attend, job_of, join, must_launch, validated
from .virtual import on_virtual_ranks

if TYPE_CHECKING:
    from ..comm import ProcessGrid, Transport


def run(arguments: argparse.Namespace) -> int:
    """Join the MPI job that this process is in, else run in this process, or start mpirun where -n asks for ranks."""
    if arguments.virtual is not None:
        return on_virtual_ranks(arguments, lambda world: _train(arguments, world))
    job = job_of(arguments)
    if must_launch(arguments, job):
        from ..comm import SingleTransport

        prepare(arguments, arguments.ranks, SingleTransport())
        return launch(arguments)
    return _train(arguments, join(job))


def prepare(arguments: argparse.Namespace, ranks: int, world: Transport) -> Any:
    """Return the experiment once nothing stands in its way: file, data, grid and output directory; collective."""
    from ..session.output import prepare as prepare_output

    experiment = validated(arguments, ranks, world)
    prepare_output(world, output(arguments))
    return experiment


def output(arguments: argparse.Namespace) -> Path:
    """Return the directory that the run writes to."""
    return Path(arguments.output) if arguments.output else Path("runs") / Path(arguments.file).stem


def _train(arguments: argparse.Namespace, world: Transport) -> int:
    from ..comm import ProcessGrid

    def ready_to_run() -> tuple[Any, str, ProcessGrid]:
        experiment = prepare(arguments, world.size, world)
        resolved = dump(experiment)
        return experiment, resolved, ProcessGrid(world, **(experiment.grid if experiment.dist_flag else {}))

    def work(prepared: tuple[Any, str, ProcessGrid]) -> int:
        experiment, resolved, grid = prepared
        start = {"resume": arguments.resume, "init_from": arguments.init_from}
        # signals and hung processes are no matter of threads
        hooks = guards.hooks(arguments) if arguments.virtual is None else None
        result = experiment.run(grid, output=output(arguments), resolved=resolved, hooks=hooks, **start)
        if world.rank == 0:
            print("written:")
            for file in result.files:
                print(f"  {file}")
        return result.stop.code if result.stop else 0

    return attend(world, ready_to_run, work)
