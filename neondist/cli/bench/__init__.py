"""`neondist bench`: training steps and halo exchanges; suite, torch, scaling and schemes have files of their own."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ...comm import Transport
from ...errors import ConfigError
from ...io.files import write_text
from ...launcher.ranks import on_ranks
from ...system import threads
from ...system.job import detect
from .. import options
from ..experiment import validated
from . import modules, scaling, schemes, suite


def add(commands: Any) -> None:
    """Add the command and everything below it."""
    group = commands.add_parser(
        "bench", help="benchmark steps, halo exchanges, scaling and schemes; predict step times"
    )
    group.set_defaults(of_layers=("bench", "use bench step, scaling or model"))
    benches = group.add_subparsers(required=True, metavar="WHAT")

    one = benches.add_parser("step", help="training steps, layer by layer", allow_abbrev=False)
    options.experiment(one)
    one.add_argument("--against", choices=["torch"], help="also time the same network in this library, alternating")
    one.add_argument("--steps", type=options.positive, default=10, metavar="K", help="steps to time (default 10)")
    one.add_argument(
        "--roofline", action="store_true", help="report the bottleneck of each layer: arithmetic or memory bandwidth"
    )
    one.add_argument("--trace", metavar="FILE", type=options.file, help="write a timeline of all ranks, for Perfetto")
    one.add_argument(
        "--reading", action="store_true", help="also time steps that include reading their batches, as in training"
    )
    one.add_argument("--json", type=options.path, metavar="FILE", help="also write the results to this file")
    one.set_defaults(command=step)

    one = benches.add_parser("halo", help="halo exchanges of several sizes, compared with plain mpi4py and memcpy")
    options.ranks(one)
    one.add_argument("--json", type=options.path, metavar="FILE", help="also write the results to this file")
    one.set_defaults(command=halo)

    suite.add(benches)
    modules.add(benches)
    scaling.add(benches)
    schemes.add(benches)


def step(arguments: argparse.Namespace) -> int:
    """Measure the training steps of an experiment; 1 if PyTorch's gradients are others."""

    def work(world: Transport, experiment: Any) -> int:
        from ...bench.step import bench_step
        from ...bench.tables import step_table

        # PyTorch gets what all ranks of this machine have together, which a launcher may have taken from each of them
        cores = threads.cores(os.getppid()) if detect(os.environ) is not None else threads.cores()
        how = (arguments.steps, arguments.against, cores, arguments.roofline, arguments.trace, arguments.reading)
        made = bench_step(experiment, experiment.open_grid(world), *how)
        _tell(world, made, step_table, arguments.json)
        return int(not made.get("against", {}).get("agree", True))

    return on_ranks(arguments, partial(_prepare, arguments), work)


def _prepare(arguments: argparse.Namespace, world: Transport, ranks: int) -> Any:
    if arguments.against == "torch" and importlib.util.find_spec("torch") is None:
        raise ConfigError("--against torch: PyTorch is not installed; pip install 'neondist[torch]'")
    asked = "--against torch" if arguments.against else "--roofline" if arguments.roofline else ""
    arguments.of_layers = asked, "leave it out"
    return validated(arguments, world, ranks)


def halo(arguments: argparse.Namespace) -> int:
    """Measure halo exchanges."""

    def check(_: Transport, ranks: int) -> None:
        if ranks < 2:
            raise ConfigError("bench halo: a single rank has no neighbours; give -n 2 or more")

    def work(world: Transport, _: None) -> int:
        from ...bench.halo import bench_halo
        from ...bench.tables import halo_table

        _tell(world, bench_halo(world), halo_table, arguments.json)
        return 0

    return on_ranks(arguments, check, work)


def _tell(world: Transport, made: dict[str, Any], table: Callable[[dict[str, Any]], Any], file: str | None) -> None:
    """Print the table on rank 0; write the JSON file if asked."""
    if world.rank:
        return
    from ...terminal.rich_console import Console

    Console(soft_wrap=True).print(table(made))
    if file is not None:
        write_text(Path(file), json.dumps(made, indent=2, default=str) + "\n")
