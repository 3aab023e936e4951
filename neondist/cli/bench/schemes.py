"""`neondist bench schemes` and `bench seams`: accuracy, bytes and time of border schemes; errors at seams."""

from __future__ import annotations

import argparse
import os
import re
import sys
from functools import partial
from typing import Any

import numpy as np

from ...comm import SingleTransport, Transport
from ...errors import ConfigError
from ...launcher.ranks import run_on_ranks
from ...system import threads
from ...terminal.console import emit
from ...terminal.progress_line import first_rank_progress
from .. import options
from ..experiment import load_and_validate

DEFAULT_SCHEMES = "halo,halo_oneway,tower,tower(fill=reflect),stale,every,quantised(bits=8)"
PASSES_PER_SCHEME = 4
"""number of forward and backward passes: two batches with the exact exchange, and two with the scheme"""
DEFAULT_SEAM_SCHEMES = "tower,tower(fill=reflect),halo_oneway,quantised(bits=8)"


def add_parser(benches: Any) -> None:
    """Register the commands."""
    cmd = benches.add_parser("schemes", help="accuracy, bytes and time of border schemes", allow_abbrev=False)
    options.add_experiment_options(cmd)
    options.add_virtual_option(cmd, as_list=True)
    cmd.add_argument(
        "--schemes", default=DEFAULT_SCHEMES, metavar="A,B(x=1),...",
        help=f"schemes to compare (default {DEFAULT_SCHEMES})",
    )  # fmt: skip
    cmd.add_argument(
        "--epochs", type=options.positive_int, metavar="E", help="number of epochs of each run (default: from the file)"
    )
    options.add_count_option(cmd, "--seeds", "S", "number of runs of each scheme", 1)
    options.add_output_option(cmd, "schemes")
    cmd.set_defaults(command=compare_schemes)

    cmd = benches.add_parser(
        "seams", help="errors of border schemes as a function of the distance to the nearest seam", allow_abbrev=False
    )
    options.add_experiment_options(cmd)
    options.add_virtual_option(cmd)
    cmd.add_argument(
        "--schemes", default=DEFAULT_SEAM_SCHEMES, metavar="A,B(x=1),...",
        help=f"schemes to compare (default {DEFAULT_SEAM_SCHEMES})",
    )  # fmt: skip
    options.add_output_option(cmd, "seams")
    cmd.set_defaults(command=measure_all_seams)


def compare_schemes(arguments: argparse.Namespace) -> int:
    """Train with every scheme and seed that has no result yet, and report all results."""
    virtual_counts = arguments.virtual or [None]
    for count in virtual_counts[1:]:  # validate all before the first one trains
        _validate_runs(arguments, SingleTransport(), count)
    rows: list[dict[str, Any]] = []
    for count in virtual_counts:
        rank_arguments = argparse.Namespace(**{**vars(arguments), "virtual": count})
        code = run_on_ranks(
            rank_arguments,
            partial(_validate_runs, rank_arguments),
            partial(_measure_and_report, arguments, rows, is_last=count == virtual_counts[-1]),
        )
        if code:
            return code
    return 0


def _measure_and_report(
    arguments: argparse.Namespace, rows: list[Any], world: Transport, runs: list[argparse.Namespace], is_last: bool
) -> int:
    from ...bench.schemes import bench_schemes, write_report

    folder = options.output_folder(arguments, "schemes")
    runs_and_loaders = [(run, partial(load_and_validate, run, world, world.size)) for run in runs]
    measured_rows = bench_schemes(world, folder, runs_and_loaders, _count_shared_cores(arguments, world))
    if world.rank == 0:
        rows += measured_rows
        table = write_report(rows, folder)
        if is_last:
            emit("", table)
            options.print_written(sorted(folder.glob("*")))
    return 0


def _validate_runs(arguments: argparse.Namespace, world: Transport, ranks: int) -> list[argparse.Namespace]:
    """Return the arguments of every run after validating all runs. Collective."""
    schemes = _parse_schemes(arguments)
    for scheme in schemes:
        load_and_validate(_arguments_for(arguments, scheme, 1), world, ranks)
    return [_arguments_for(arguments, scheme, seed + 1) for seed in range(arguments.seeds) for scheme in schemes]


def measure_all_seams(arguments: argparse.Namespace) -> int:
    """Compare every scheme with the exact exchange on one batch with initial weights."""

    def work(world: Transport, runs: dict[str, argparse.Namespace]) -> int:
        from ...bench.least_time import CoreSpeed
        from ...bench.seams import seam_table, write_seam_report

        folder, seam_errors = options.output_folder(arguments, "seams"), {}
        with first_rank_progress(world.rank, sys.stderr, unit="scheme", delay=0) as progress:
            experiment = load_and_validate(next(iter(runs.values())), world, world.size)
            if world.rank == 0:
                cores = _count_shared_cores(arguments, world)
                step_seconds = CoreSpeed.measure().step_seconds_lower_bound(experiment, world.size, cores)
                progress.set_total_parts(len(runs), planned_seconds=[PASSES_PER_SCHEME * step_seconds] * len(runs))
            for scheme, run in runs.items():
                progress.begin_part(scheme)
                seam_errors[scheme] = _measure_seams(arguments, world, run)
                progress.add_done_parts(1)
        if world.rank == 0:
            files = write_seam_report(folder, seam_errors)
            emit(seam_table(seam_errors))
            options.print_written(files)
        return 0

    return run_on_ranks(arguments, partial(_validate_seam_runs, arguments), work)


def _count_shared_cores(arguments: argparse.Namespace, world: Transport) -> int:
    """Return the number of cores that the ranks share: at least one each in an MPI job, which may span machines."""
    cores = threads.count_cores(os.getppid())
    return cores if arguments.virtual else max(world.size, cores)


def _measure_seams(arguments: argparse.Namespace, world: Transport, run: argparse.Namespace) -> dict[str, Any]:
    from ...bench.seams import measure_seam_errors

    pair = [load_and_validate(command, world, world.size) for command in (_arguments_for(arguments, "halo", 1), run)]
    dataset, grid = pair[0].dataset, pair[0].open_grid(world)
    dataset.open(grid.with_tiles(pair[0].model.plan(dataset.sample_shape, grid.shape).overlapping_tiles))
    for experiment in pair:
        experiment.model.build(dataset.sample_shape, experiment.batch_size, grid)
    batch_indices = [np.arange(pair[0].batch_size) % len(dataset.train) + shift for shift in (1, 0)]
    lo, hi = grid.sample_range(pair[0].batch_size)
    images = [dataset.train.images(b[lo:hi] % len(dataset.train), pair[0].model.dtype) for b in batch_indices]
    return measure_seam_errors(pair[0].model, pair[1].model, images)


def _validate_seam_runs(arguments: argparse.Namespace, world: Transport, ranks: int) -> dict[str, argparse.Namespace]:
    from ...halo.fusion import fusion_scheme_or_none

    run_by_scheme = {scheme: _arguments_for(arguments, scheme, 1) for scheme in _parse_schemes(arguments)}
    for scheme, run in run_by_scheme.items():
        if fusion_scheme_or_none(load_and_validate(run, world, ranks).model.scheme) is not None:
            raise ConfigError(
                f"--schemes {scheme}: its tiles overlap and its results are exact; specify approximate schemes"
            )
    return run_by_scheme


def _parse_schemes(arguments: argparse.Namespace) -> list[str]:
    schemes = [text.strip() for text in re.split(r",(?![^()]*\))", arguments.schemes) if text.strip()]
    if not schemes:
        raise ConfigError("--schemes: no scheme is given; give at least one, such as --schemes halo,tower")
    return schemes


def _arguments_for(arguments: argparse.Namespace, scheme: str, seed: int) -> argparse.Namespace:
    overrides = [f"model.scheme={scheme}", f"seed={seed}"]
    if getattr(arguments, "epochs", None) is not None:
        overrides.append(f"epochs={arguments.epochs}")
    settings = [*arguments.settings, *overrides]
    return argparse.Namespace(**{**vars(arguments), "settings": settings, "scheme": scheme, "seed": seed})
