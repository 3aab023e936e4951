"""`neondist bench`: training steps and halo exchanges; other benchmarks have their own modules."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ...comm import Transport
from ...errors import ConfigError
from ...io.files import write_text
from ...launcher.ranks import run_on_ranks
from ...system import threads
from ...system.job import detect_job
from ...terminal.progress_line import ProgressFile, first_rank_progress
from ...version import find_module_spec
from .. import options
from ..experiment import load_and_validate
from . import modules, scaling, schemes, suite


def add_parser(commands: Any) -> None:
    """Add the command and its subcommands."""
    bench_parser = commands.add_parser(
        "bench", help="benchmark training steps, halo exchanges, scaling and border schemes; predict step times"
    )
    bench_parser.set_defaults(layers_only_feature=("bench", "use bench step, scaling or model"))
    benches = bench_parser.add_subparsers(required=True, metavar="WHAT")

    cmd = benches.add_parser("step", help="training steps, layer by layer", allow_abbrev=False)
    options.add_experiment_options(cmd)
    cmd.add_argument(
        "--against",
        choices=["torch"],
        help="compare losses and gradients with PyTorch, then time the network in neondist and PyTorch, alternately",
    )
    options.add_count_option(cmd, "--steps", "K", "number of steps to time", 10)
    cmd.add_argument(
        "--roofline", action="store_true", help="report the bottleneck of each layer: arithmetic or memory bandwidth"
    )
    cmd.add_argument(
        "--trace", metavar="FILE", type=options.parse_as_path, help="write a timeline of all ranks, for Perfetto"
    )
    cmd.add_argument(
        "--reading", action="store_true", help="also time steps that include reading their batches, as in training"
    )
    cmd.add_argument("--json", type=options.parse_path, metavar="FILE", help="also write the results to this file")
    cmd.add_argument(
        "--progress", metavar="FILE", type=options.parse_path,
        help="write the estimated end time to this file, in seconds since 1970, instead of printing progress",
    )  # fmt: skip
    cmd.set_defaults(command=measure_steps)

    cmd = benches.add_parser("halo", help="halo exchanges of several sizes, compared with plain mpi4py and memcpy")
    options.add_rank_options(cmd)
    cmd.add_argument("--json", type=options.parse_path, metavar="FILE", help="also write the results to this file")
    cmd.set_defaults(command=measure_halo_exchanges)

    suite.add_parser(benches)
    modules.add_parser(benches)
    scaling.add_parser(benches)
    schemes.add_parser(benches)


def measure_steps(arguments: argparse.Namespace) -> int:
    """Measure the training steps of an experiment; return 1 if its loss or gradients differ from PyTorch's."""

    def work(world: Transport, experiment: Any) -> int:
        from ...bench.least_time import CoreSpeed
        from ...bench.step import bench_step
        from ...bench.tables import step_table

        # PyTorch uses the cores of all ranks on this machine; a launcher may have bound each rank to a subset
        cores = threads.count_cores(os.getppid()) if detect_job(os.environ) is not None else threads.count_cores()
        settings = (arguments.steps, arguments.against, cores, arguments.roofline, arguments.trace, arguments.reading)
        progress, least_seconds = first_rank_progress(world.rank, sys.stderr, unit="step", delay=1), 0.0
        if world.rank == 0 and arguments.progress is not None:
            progress = ProgressFile(arguments.progress)
        elif world.rank == 0:
            speed = CoreSpeed.measure()
            least_seconds = speed.step_seconds_lower_bound(experiment, world.size, max(world.size, cores))
        with progress:
            results = bench_step(experiment, experiment.open_grid(world), *settings, progress, least_seconds)
        _print_table_and_write_json(world, results, step_table, arguments.json, [arguments.trace])
        return int(not results.get("against", {}).get("agree", True))

    return run_on_ranks(arguments, partial(_load_and_validate, arguments), work)


def _load_and_validate(arguments: argparse.Namespace, world: Transport, ranks: int) -> Any:
    if arguments.against == "torch" and find_module_spec("torch") is None:
        raise ConfigError("--against torch: PyTorch is not installed; install it with pip install 'neondist[torch]'")
    option = "--against torch" if arguments.against else "--roofline" if arguments.roofline else ""
    arguments.layers_only_feature = option, "leave it out"
    return load_and_validate(arguments, world, ranks)


def measure_halo_exchanges(arguments: argparse.Namespace) -> int:
    """Measure halo exchanges."""

    def require_two_ranks(_: Transport, ranks: int) -> None:
        if ranks < 2:
            raise ConfigError("bench halo: a single rank has no neighbours; give -n 2 or more")

    def work(world: Transport, _: None) -> int:
        from ...bench.halo import IMAGE_EXTENTS, bench_halo
        from ...bench.tables import halo_table

        with first_rank_progress(world.rank, sys.stderr, unit="size", delay=0) as progress:
            results = bench_halo(world, IMAGE_EXTENTS, progress)
        _print_table_and_write_json(world, results, halo_table, arguments.json)
        return 0

    return run_on_ranks(arguments, require_two_ranks, work)


def _print_table_and_write_json(
    world: Transport,
    result: dict[str, Any],
    table: Callable[[dict[str, Any]], Any],
    file: str | None,
    other_files: Sequence[Path | None] = (),
) -> None:
    """Print the table on rank 0; write the JSON file if requested; print the paths of all written files."""
    if world.rank:
        return
    from ...terminal.rich_console import Console

    Console(soft_wrap=True).print(table(result))
    if file is not None:
        write_text(Path(file), json.dumps(result, indent=2, default=str) + "\n")
    options.print_written([file, *other_files])
