"""`neondist evaluate` and `neondist predict`: a checkpoint at work."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import Any

from ..comm import ProcessGrid, Transport
from ..launcher.ranks import on_ranks
from . import options
from .experiment import loaded, validated


def add(commands: Any) -> None:
    """Say what can be typed."""
    one = commands.add_parser("evaluate", help="measure a checkpoint on the data of a YAML file", allow_abbrev=False)
    options.experiment(one)
    _checkpoint(one)
    one.add_argument(
        "--split", choices=["train", "validation", "test"], default="test", help="which samples (default test)"
    )
    one.set_defaults(command=evaluate, watched=True)

    one = commands.add_parser("predict", help="write a checkpoint's outputs for new images", allow_abbrev=False)
    options.experiment(one)
    _checkpoint(one)
    one.add_argument(
        "--input", metavar="X", required=True,
        help="images: .npy, .h5 (or FILE.h5:NAME of a data set in it), a picture, or a folder of pictures",
    )  # fmt: skip
    one.add_argument("--output", metavar="Y", required=True, help="where to write: .npy, or .h5")
    one.add_argument("--classes", action="store_true", help="write the number of the largest output, not all outputs")
    one.set_defaults(command=predict, watched=True)


def evaluate(arguments: argparse.Namespace) -> int:
    """Print the cost and the metrics of a checkpoint as one line of JSON."""

    def work(experiment: Any, grid: ProcessGrid) -> None:
        from ..train import evaluate_checkpoint

        found = evaluate_checkpoint(experiment, arguments.checkpoint, grid, arguments.split)
        if grid.rank == 0:
            print(json.dumps(found))

    return _on_ranks(arguments, partial(validated, arguments), work)


def predict(arguments: argparse.Namespace) -> int:
    """Write the outputs for new images; the experiment's data need not be there."""

    def work(experiment: Any, grid: ProcessGrid) -> None:
        from ..train import predict

        files = arguments.checkpoint, arguments.input, arguments.output
        shape = predict(experiment, *files, grid, arguments.classes)
        if grid.rank == 0:
            print(f"written: {arguments.output}, {' x '.join(map(str, shape))}")

    return _on_ranks(arguments, lambda world, ranks: loaded(arguments, world), work)


def _checkpoint(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "--checkpoint", metavar="FILE", required=True, help="checkpoint.h5 of a run, on any number of ranks"
    )


def _on_ranks(
    arguments: argparse.Namespace,
    find: Callable[[Transport, int], Any],
    work: Callable[[Any, ProcessGrid], None],
) -> int:
    """Work on the experiment that `find` returns, here or on ranks that mpirun starts."""

    def do(world: Transport, experiment: Any) -> int:
        grid = experiment.open_grid(world)
        if arguments.watchdog is not None:
            arguments.watchdog.observe(grid)
        work(experiment, grid)
        return 0

    return on_ranks(arguments, find, do)
