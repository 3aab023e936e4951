"""`neondist bench scaling` and `bench model`: training steps by number of ranks, measured or predicted."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ... import safe_path
from ...comm import Transport
from ...errors import ConfigError, LaunchError, UserError
from ...io.regular_file import read_bytes
from ...launcher.ranks import job_of, on_ranks
from ...system import threads
from ...terminal.console import counted, emit
from .. import options
from ..experiment import load, validated


def add(benches: Any) -> None:
    """Register the commands."""
    cmd = benches.add_parser("scaling", help="training step on an increasing number of ranks", allow_abbrev=False)
    options.experiment(cmd)
    cmd.add_argument(
        "--ranks", dest="counts", type=options.counts, default=[1, 2, 4], metavar="1,2,4", help="rank counts"
    )
    cmd.add_argument("--weak", action="store_true", help="weak scaling: the batch grows with the number of ranks")
    options.rounds(cmd, "each rank count is", steps=10)
    cmd.add_argument(
        "--output", type=options.path, metavar="DIR", help="output folder (default runs/NAME OF THE FILE-scaling)"
    )
    cmd.set_defaults(command=scaling, of_layers=None)

    group = benches.add_parser("model", help="predict step times for other machines and numbers of ranks")
    parts = group.add_subparsers(required=True, metavar="WHAT")

    cmd = parts.add_parser("calibrate", help="measure this machine", allow_abbrev=False)
    options.ranks(cmd, "ranks to start with mpirun (default: two per core)")
    cmd.add_argument(
        "--output",
        type=options.path,
        default="machine.yaml",
        metavar="FILE",
        help="output file (default machine.yaml)",
    )
    cmd.set_defaults(command=calibrate)

    cmd = parts.add_parser("predict", help="predict training steps", allow_abbrev=False)
    options.experiment(cmd, "use --ranks")
    cmd.add_argument(
        "--machine",
        type=options.path,
        default="machine.yaml",
        metavar="FILE",
        help="the machine (default machine.yaml)",
    )
    cmd.add_argument("--ranks", dest="counts", type=span, default=[1, 2, 4], metavar="1..4096", help="or 1,2,4")
    cmd.add_argument(
        "--measure", type=_read_counts, metavar="1,2",
        help="numbers of ranks to measure for the prediction error, or none (default: those that this machine can run)",
    )  # fmt: skip
    cmd.add_argument(
        "--measured", type=_read_times, default={}, metavar="8=0.24,16=0.25",
        help="measured seconds per step by number of ranks, to calibrate compute_factor and jitter",
    )  # fmt: skip
    cmd.add_argument(
        "--output", type=options.path, metavar="DIR", help="output folder (default runs/NAME OF THE FILE-model)"
    )
    cmd.set_defaults(command=predict, of_layers=None)


def scaling(arguments: argparse.Namespace) -> int:
    """Measure each rank count in turn, several times, and write tables and a picture."""
    from ...bench.scaling import bench_scaling, scaling_table, write
    from ...comm import SingleTransport
    from ...io.output import prepare
    from ...train.inference.progress import Progress

    if job_of(arguments) is not None or arguments.ranks is not None:
        raise LaunchError(
            "bench scaling starts MPI jobs itself; run it outside of an MPI job, with --ranks instead of -n"
        )
    for count in arguments.counts:
        batch = validated(arguments, SingleTransport(), count).batch_size
    folder = options.folder(arguments, "scaling")
    prepare(SingleTransport(), folder)

    jobs = len(arguments.counts) * arguments.rounds
    with Progress(jobs, sys.stderr, "measurement", first=0) as progress:

        def measure(count: int) -> dict[str, Any]:
            progress.begin(counted(count, "rank"))
            batch_size = batch * count // arguments.counts[0] if arguments.weak else batch
            result = step_of(arguments, count, [f"batch_size={batch_size}"], arguments.steps)
            progress.add(1)
            return result

        rows = bench_scaling(measure, arguments.counts, arguments.rounds)
    kind = "weak" if arguments.weak else "strong"
    emit(scaling_table(rows))
    options.print_written(write(folder, rows, f"{Path(arguments.file).name}, {kind} scaling"))
    return 0


def step_of(
    arguments: argparse.Namespace,
    count: int,
    settings: Sequence[str],
    steps: int,
    cores: int | None = None,
    extra: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the results of `neondist bench step` in a new job with `cores` threads per rank and extra options."""
    words = ["-n", str(count), "--steps", str(steps), *extra]
    words += ["--set", *arguments.settings, *settings] if arguments.settings or settings else []
    env = dict(os.environ) | ({} if cores is None else dict.fromkeys(threads.VARIABLES, str(cores)))
    words += [f"--import={module}" for module in arguments.modules]
    return json_of(
        ["step", options.word(arguments.file), *words], env,
        lambda code, _: LaunchError(f"{count} ranks ended with exit code {code}; see their output above"), stderr=None,
    )  # fmt: skip


def json_of(
    words: Sequence[str],
    env: Mapping[str, str],
    failure: Callable[[int, str], UserError],
    stderr: int | None = subprocess.PIPE,
) -> dict[str, Any]:
    """Return the contents of the JSON file that `neondist bench` with these words writes.

    Parameters
    ----------
    env : mapping
    failure : callable
        Returns the error, given a nonzero exit code and the stderr of the process.
    stderr : int or None
        As in subprocess.run. None: inherited from this process, and `failure` gets ''.
    """
    with tempfile.TemporaryDirectory(prefix="neondist-bench-") as folder:
        file = Path(folder, "made.json")
        command = safe_path.command("neondist", "bench", *words, "--json", file)
        process = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=stderr, text=True, check=False, env=env)
        if process.returncode:
            raise failure(process.returncode, process.stderr or "")
        result: dict[str, Any] = json.loads(read_bytes(file))
        return result


def calibrate(arguments: argparse.Namespace) -> int:
    """Measure this machine."""
    if job_of(arguments) is None and arguments.ranks is None:
        arguments.ranks = 2 * max(2, threads.cores())  # two per core, to measure the cost of sharing one

    def check(_: Transport, ranks: int) -> None:
        if ranks < 2:
            raise ConfigError("bench model calibrate: timing messages needs two ranks; give -n 2 or more")

    def work(world: Transport, _: None) -> int:
        from ...bench.model import calibrate as model
        from ...bench.model.table import noise_warnings
        from ...system.machine import write
        from ...train.inference.progress import first_rank_progress

        cores = max(2, threads.cores(os.getppid()))
        parts = model.measurements(world, cores)
        with first_rank_progress(world.rank, sys.stderr, parts, "measurement", first=0) as progress:
            machine, noise = model.calibrate(world, cores, progress)
            machine = replace(machine, error=model.prediction_error(world, cores, machine, progress))
        if world.rank == 0:
            write(Path(arguments.output), machine, f"measured by neondist bench model calibrate on {world.size} ranks")
            emit(read_bytes(arguments.output).decode(), *noise_warnings(noise))
        return 0

    return on_ranks(arguments, check, work)


def predict(arguments: argparse.Namespace) -> int:
    """Predict training steps and report the prediction error."""
    from threadpoolctl import threadpool_limits

    from ...bench.model import predict as model
    from ...bench.model import table
    from ...comm import SingleTransport
    from ...io.output import prepare
    from ...system.machine import read
    from ...train.inference.progress import Progress

    if job_of(arguments) is not None or arguments.ranks is not None:
        raise LaunchError("bench model predict runs in one process; run it outside of an MPI job, with --ranks, not -n")
    machine = read(Path(arguments.machine))
    measured = arguments.measure
    if measured is None:  # automatic on the machine that the file describes
        local = machine.host == platform.node()
        measured = [count for count in arguments.counts if local and count <= 2 * threads.cores()]
    folder = options.folder(arguments, "model")
    prepare(SingleTransport(), folder)
    times = arguments.measured
    measured = [count for count in measured if count not in times]
    for count in (*arguments.counts, *times):  # a fixed grid suits only one of them
        validated(arguments, SingleTransport(), count)
    counts, rows = sorted({*arguments.counts, *measured, *times}), list[dict[str, Any]]()
    with Progress(len(counts) + len(measured), sys.stderr, "step", first=0) as progress:
        for count in counts:
            progress.begin(counted(count, "rank"))
            with threadpool_limits(1):  # one rank per core
                rows += model.predict(lambda: _load_checked(arguments), [count], machine)
            progress.add(1)
        if times:
            best = model.calibrated(machine, rows, times)
            rows = [model.rescale_row(best, r, machine) | {"measured_seconds": times.get(r["ranks"])} for r in rows]
            emit(f"calibrated by --measured: compute_factor {best.compute_factor:.4g}, jitter {best.jitter:.3g}\n")
        for row in rows:
            if row["ranks"] in measured:
                progress.begin(f"measuring {counted(row['ranks'], 'rank')}")
                row["measured_seconds"] = _measure(arguments, row)
                with threadpool_limits(1):
                    row["noise"] = max(row["noise"], model.drift(row, _load_checked(arguments)))
                progress.add(1)
    emit(table.prediction_table(rows))
    if any(row["schemes"] for row in rows):
        emit(f"\n{table.schemes_table(rows)}")
    emit("\n" + "\n".join(table.conclusions(rows)))
    options.print_written(table.write(folder, rows, f"{Path(arguments.file).name} on {Path(arguments.machine).name}"))
    return 0


def _load_checked(arguments: argparse.Namespace) -> Any:
    """Return the experiment with its data set checked, so that the sample shape is known."""
    experiment = load(arguments)
    experiment.dataset.check()
    return experiment


def _measure(arguments: argparse.Namespace, row: dict[str, Any]) -> float:
    """Return the seconds per step on the row's ranks and grid, one thread per rank, as in the prediction."""
    settings = [f"grid.{axis}={count}" for axis, count in row["grid"].items()]
    steps = max(4, round(1 / row["seconds_per_step"]))
    result = step_of(arguments, row["ranks"], settings, steps, cores=1)
    return float(result["seconds_per_step"])


def span(text: str) -> list[int]:
    """Parse '1,2,4', or '1..4096': the first times powers of two."""
    first, dots, last = text.partition("..")
    if not dots:
        return options.counts(text)
    low, high = options.positive(first), options.positive(last)
    return [low << power for power in range((high // low).bit_length())]


def _read_counts(text: str) -> list[int]:
    """Parse '1,2' or 'none'."""
    return [] if text == "none" else options.counts(text)


def _read_times(text: str) -> dict[int, float]:
    """Parse '8=0.24,16=0.25'."""
    seconds_by_ranks = {}
    for word in text.split(","):
        ranks, _, seconds = word.partition("=")
        try:
            seconds_by_ranks[options.positive(ranks)] = float(seconds)
        except ValueError:
            seconds_by_ranks[options.positive(ranks)] = 0.0
        if not 0 < seconds_by_ranks[int(ranks)] < float("inf"):
            raise argparse.ArgumentTypeError(f"'{word}' is not RANKS=SECONDS; expected for instance 8=0.24,16=0.25")
    return seconds_by_ranks
