"""`neondist bench scaling` and `bench model`: steps on more and more ranks, measured, or predicted for elsewhere."""

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
    """Say what can be typed."""
    one = benches.add_parser("scaling", help="training step on an increasing number of ranks", allow_abbrev=False)
    options.experiment(one)
    one.add_argument(
        "--ranks", dest="counts", type=options.counts, default=[1, 2, 4], metavar="1,2,4", help="rank counts"
    )
    one.add_argument("--weak", action="store_true", help="weak scaling: the batch grows with the number of ranks")
    options.rounds(one, "each rank count is", steps=10)
    one.add_argument(
        "--output", type=options.path, metavar="DIR", help="output folder (default runs/NAME OF THE FILE-scaling)"
    )
    one.set_defaults(command=scaling, of_layers=None)

    two = benches.add_parser("model", help="predict step times for other machines and numbers of ranks")
    parts = two.add_subparsers(required=True, metavar="WHAT")

    one = parts.add_parser("calibrate", help="measure this machine", allow_abbrev=False)
    options.ranks(one, "ranks to start with mpirun (default: two per core)")
    one.add_argument(
        "--output",
        type=options.path,
        default="machine.yaml",
        metavar="FILE",
        help="output file (default machine.yaml)",
    )
    one.set_defaults(command=calibrate)

    one = parts.add_parser("predict", help="predict training steps", allow_abbrev=False)
    options.experiment(one, "use --ranks")
    one.add_argument(
        "--machine",
        type=options.path,
        default="machine.yaml",
        metavar="FILE",
        help="the machine (default machine.yaml)",
    )
    one.add_argument("--ranks", dest="counts", type=span, default=[1, 2, 4], metavar="1..4096", help="or 1,2,4")
    one.add_argument(
        "--measure", type=_none_or, metavar="1,2",
        help="numbers of ranks to measure for the prediction error, or none (default: those that this machine can run)",
    )  # fmt: skip
    one.add_argument(
        "--measured", type=_times, default={}, metavar="8=0.24,16=0.25",
        help="measured seconds per step by number of ranks, to calibrate compute_factor and jitter",
    )  # fmt: skip
    one.add_argument(
        "--output", type=options.path, metavar="DIR", help="output folder (default runs/NAME OF THE FILE-model)"
    )
    one.set_defaults(command=predict, of_layers=None)


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
            grown = batch * count // arguments.counts[0] if arguments.weak else batch
            found = step_of(arguments, count, [f"batch_size={grown}"], arguments.steps)
            progress.add(1)
            return found

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
    each: int | None = None,
    more: Sequence[str] = (),
) -> dict[str, Any]:
    """Return what `neondist bench step` measures in a job of its own, on so many threads a rank, with more settings."""
    words = ["-n", str(count), "--steps", str(steps), *more]
    words += ["--set", *arguments.settings, *settings] if arguments.settings or settings else []
    env = dict(os.environ) | ({} if each is None else dict.fromkeys(threads.VARIABLES, str(each)))
    words += [f"--import={module}" for module in arguments.modules]
    return json_of(
        ["step", options.word(arguments.file), *words], env,
        lambda code, _: LaunchError(f"{count} ranks ended with exit code {code}; see their output above"), told=None,
    )  # fmt: skip


def json_of(
    words: Sequence[str],
    env: Mapping[str, str],
    failure: Callable[[int, str], UserError],
    told: int | None = subprocess.PIPE,
) -> dict[str, Any]:
    """Return what `neondist bench`, with these words, writes to its JSON file.

    Parameters
    ----------
    env : mapping
    failure : function of the exit code, if that is not 0, and of what the process has said
        Returns the error.
    told : what subprocess does with its stderr
        None: it is this process's own, and `failure` is given nothing.
    """
    with tempfile.TemporaryDirectory(prefix="neondist-bench-") as folder:
        file = Path(folder, "made.json")
        command = safe_path.command("neondist", "bench", *words, "--json", file)
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=told, text=True, check=False, env=env)
        if done.returncode:
            raise failure(done.returncode, done.stderr or "")
        found: dict[str, Any] = json.loads(read_bytes(file))
        return found


def calibrate(arguments: argparse.Namespace) -> int:
    """Measure this machine."""
    if job_of(arguments) is None and arguments.ranks is None:
        arguments.ranks = 2 * max(2, threads.cores())  # two for each core: what it costs to share one

    def check(_: Transport, ranks: int) -> None:
        if ranks < 2:
            raise ConfigError("bench model calibrate: timing messages needs two ranks; give -n 2 or more")

    def work(world: Transport, _: None) -> int:
        from ...bench.model import calibrate as model
        from ...bench.model.table import disturbed
        from ...system.machine import write
        from ...train.inference.progress import first_rank_progress

        cores = max(2, threads.cores(os.getppid()))
        parts = model.measurements(world, cores)
        with first_rank_progress(world.rank, sys.stderr, parts, "measurement", first=0) as progress:
            machine, noise = model.calibrate(world, cores, progress)
            machine = replace(machine, error=model.prediction_error(world, cores, machine, progress))
        if world.rank == 0:
            write(Path(arguments.output), machine, f"measured by neondist bench model calibrate on {world.size} ranks")
            emit(read_bytes(arguments.output).decode(), *disturbed(noise))
        return 0

    return on_ranks(arguments, check, work)


def predict(arguments: argparse.Namespace) -> int:
    """Predict steps, and tell how wrong the predictions are."""
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
    if measured is None:  # by itself where it can: on the machine that the file describes
        here = machine.host == platform.node()
        measured = [count for count in arguments.counts if here and count <= 2 * threads.cores()]
    folder = options.folder(arguments, "model")
    prepare(SingleTransport(), folder)
    given = arguments.measured
    measured = [count for count in measured if count not in given]
    for count in (*arguments.counts, *given):  # a grid that the file fixes is for one of them
        validated(arguments, SingleTransport(), count)
    counts, rows = sorted({*arguments.counts, *measured, *given}), list[dict[str, Any]]()
    with Progress(len(counts) + len(measured), sys.stderr, "step", first=0) as progress:
        for count in counts:
            progress.begin(counted(count, "rank"))
            with threadpool_limits(1):  # a rank for each core
                rows += model.predict(lambda: _looked_at(arguments), [count], machine)
            progress.add(1)
        if given:
            better = model.calibrated(machine, rows, given)
            rows = [model.on(better, row, machine) | {"measured_seconds": given.get(row["ranks"])} for row in rows]
            emit(f"calibrated by --measured: compute_factor {better.compute_factor:.4g}, jitter {better.jitter:.3g}\n")
        for row in rows:
            if row["ranks"] in measured:
                progress.begin(f"measuring {counted(row['ranks'], 'rank')}")
                row["measured_seconds"] = _measure(arguments, row)
                with threadpool_limits(1):
                    row["noise"] = max(row["noise"], model.drift(row, _looked_at(arguments)))
                progress.add(1)
    emit(table.prediction_table(rows))
    if any(row["schemes"] for row in rows):
        emit(f"\n{table.schemes_table(rows)}")
    emit("\n" + "\n".join(table.words(rows)))
    options.print_written(table.write(folder, rows, f"{Path(arguments.file).name} on {Path(arguments.machine).name}"))
    return 0


def _looked_at(arguments: argparse.Namespace) -> Any:
    """Return the experiment, whose data set knows the shape of its samples."""
    experiment = load(arguments)
    experiment.dataset.check()
    return experiment


def _measure(arguments: argparse.Namespace, row: dict[str, Any]) -> float:
    """Return the seconds of a step on the row's ranks and grid, a thread each, as the prediction has it."""
    settings = [f"grid.{axis}={count}" for axis, count in row["grid"].items()]
    steps = max(4, round(1 / row["seconds_per_step"]))
    made = step_of(arguments, row["ranks"], settings, steps, each=1)
    return float(made["seconds_per_step"])


def span(text: str) -> list[int]:
    """Read '1,2,4', or '1..4096': the powers of two times the first."""
    first, dots, last = text.partition("..")
    if not dots:
        return options.counts(text)
    low, high = options.positive(first), options.positive(last)
    return [low << power for power in range((high // low).bit_length())]


def _none_or(text: str) -> list[int]:
    """Read '1,2', or 'none'."""
    return [] if text == "none" else options.counts(text)


def _times(text: str) -> dict[int, float]:
    """Read '8=0.24,16=0.25'."""
    found = {}
    for word in text.split(","):
        ranks, _, seconds = word.partition("=")
        try:
            found[options.positive(ranks)] = float(seconds)
        except ValueError:
            found[options.positive(ranks)] = 0.0
        if not 0 < found[int(ranks)] < float("inf"):
            raise argparse.ArgumentTypeError(f"'{word}' is not RANKS=SECONDS; expected for instance 8=0.24,16=0.25")
    return found
