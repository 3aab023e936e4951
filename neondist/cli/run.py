"""`neondist run`: train what a file describes, here or on ranks that mpirun starts."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import dump
from ..console import say
from . import guards, options
from .experiment import validated
from .ranks import on_ranks

if TYPE_CHECKING:
    from ..comm import Transport


def run(arguments: argparse.Namespace) -> int:
    """Train in this process, on virtual ranks, in the MPI job that this process is in, or under mpirun."""

    def work(world: Transport, experiment: Any) -> int:
        start = {"resume": arguments.resume, "init_from": arguments.init_from, "overwrite": arguments.overwrite}
        places = {"output": output(arguments), "resolved": dump(experiment)}
        result = experiment.run(experiment.open_grid(world), **places, hooks=guards.hooks(arguments), **start)
        if world.rank == 0:
            say("\n  ".join(["written:", *map(str, result.files)]))
        return result.stop.code if result.stop else 0

    return on_ranks(arguments, partial(prepare, arguments), work)


def prepare(arguments: argparse.Namespace, world: Transport, ranks: int) -> Any:
    """Return the experiment once nothing stands in its way: file, data, grid and output directory; collective."""
    from ..session.output import prepare as prepare_output

    experiment = validated(arguments, world, ranks)
    prepare_output(world, output(arguments), arguments.resume, arguments.overwrite)
    return experiment


def output(arguments: argparse.Namespace) -> Path:
    """Return the directory that the run writes to."""
    return options.folder(arguments)
