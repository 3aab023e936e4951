"""`neondist bench scaling` and `bench model`: training steps by number of ranks, measured or predicted."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import safe_path
from ...comm import Transport
from ...errors import ConfigError, LaunchError, UserError
from ...io.regular_file import read_bytes
from ...launcher.ranks import get_mpi_job, run_on_ranks
from ...system import threads
from ...terminal.console import counted, emit
from ...terminal.progress_line import ProgressLine, first_rank_progress
from .. import options
from ..experiment import load_and_validate, load_from_arguments

if TYPE_CHECKING:
    from ...bench.least_time import CoreSpeed
    from ...system.machine import Machine


def add_parser(benches: Any) -> None:
    """Register the commands."""
    cmd = benches.add_parser("scaling", help="training steps on increasing numbers of ranks", allow_abbrev=False)
    options.add_experiment_options(cmd, argparse.SUPPRESS)  # -n is rejected
    cmd.add_argument(
        "--ranks", dest="counts", type=options.parse_rank_counts, default=[1, 2, 4], metavar="1,2,4",
        help="numbers of ranks (default 1,2,4)",
    )  # fmt: skip
    cmd.add_argument(
        "--weak", action="store_true", help="weak scaling: the batch size is proportional to the number of ranks"
    )
    options.add_round_options(cmd, "each rank count is", steps=10)
    options.add_output_option(cmd, "scaling")
    cmd.set_defaults(command=measure_scaling, layers_only_feature=None)

    model_parser = benches.add_parser("model", help="predict step times for other machines and numbers of ranks")
    subparsers = model_parser.add_subparsers(required=True, metavar="WHAT")

    cmd = subparsers.add_parser(
        "calibrate", help="measure message times, core speed and memory bandwidth", allow_abbrev=False
    )
    options.add_rank_options(cmd, "number of ranks to start with mpirun (default: two per core)")
    cmd.add_argument(
        "--output", type=options.parse_path, default="machine.yaml", metavar="FILE",
        help="output file (default machine.yaml)",
    )  # fmt: skip
    cmd.set_defaults(command=calibrate)

    cmd = subparsers.add_parser("predict", help="predict times, bytes and memory of training steps", allow_abbrev=False)
    options.add_experiment_options(cmd, argparse.SUPPRESS)  # -n is rejected
    cmd.add_argument(
        "--machine", type=options.parse_path, default="machine.yaml", metavar="FILE",
        help="machine file of `bench model calibrate` (default machine.yaml)",
    )  # fmt: skip
    cmd.add_argument(
        "--ranks", dest="counts", type=parse_rank_counts, default=[1, 2, 4], metavar="1..4096",
        help="numbers of ranks, as a range of powers of two or a list (default 1,2,4)",
    )  # fmt: skip
    cmd.add_argument(
        "--measure", type=_parse_measured_rank_counts, metavar="1,2",
        help="numbers of ranks on which to measure the prediction error, or none (default: all that this machine can"
             " run)",
    )  # fmt: skip
    cmd.add_argument(
        "--measured", type=_parse_seconds_by_rank_count, default={}, metavar="8=0.24,16=0.25",
        help="measured seconds per step by number of ranks, to calibrate compute_factor and jitter",
    )  # fmt: skip
    options.add_output_option(cmd, "model")
    cmd.set_defaults(command=predict, layers_only_feature=None)


def measure_scaling(arguments: argparse.Namespace) -> int:
    """Measure each rank count in turn, several times, and write a table and a plot."""
    from ...bench.least_time import CoreSpeed
    from ...bench.noise import noise_warnings
    from ...bench.scaling import bench_scaling, scaling_table, write_scaling_report
    from ...comm import SingleTransport
    from ...io.output import prepare_run_folder

    if get_mpi_job(arguments) is not None or arguments.ranks is not None:
        raise LaunchError("bench scaling starts MPI jobs itself; run it outside an MPI job, with --ranks instead of -n")
    folder = options.output_folder(arguments, "scaling")
    with (
        ProgressLine(None, sys.stderr, "measurement", delay=0) as progress,
        tempfile.TemporaryDirectory(prefix="neondist-progress-") as progress_folder,
    ):
        progress.begin_part("checking the experiment")
        speed, cores, least_seconds = CoreSpeed.measure(), threads.count_cores(), list[float]()
        file = Path(progress_folder, "end")
        for count in arguments.counts:
            growth = count / arguments.counts[0] if arguments.weak else 1
            batch, bench_seconds = estimate_step_bench_seconds(arguments, count, arguments.steps * growth, speed, cores)
            least_seconds.append(bench_seconds)
        prepare_run_folder(SingleTransport(), folder)
        progress.set_total_parts(
            len(least_seconds) * arguments.rounds, planned_seconds=least_seconds * arguments.rounds
        )

        def measure(count: int) -> dict[str, Any]:
            progress.begin_process(counted(count, "rank"), file)
            batch_size = batch * count // arguments.counts[0] if arguments.weak else batch
            result = run_step_bench(arguments, count, [f"batch_size={batch_size}"], arguments.steps, progress_file=file)
            progress.add_done_parts(1)
            return result

        rows = bench_scaling(measure, arguments.counts, arguments.rounds)
    scaling_kind = "weak" if arguments.weak else "strong"
    emit(scaling_table(rows), *noise_warnings(max(row["noise"] for row in rows)))
    options.print_written(write_scaling_report(folder, rows, f"{Path(arguments.file).name}, {scaling_kind} scaling"))
    return 0


def estimate_step_bench_seconds(
    arguments: argparse.Namespace, ranks: int, steps: float, speed: CoreSpeed, cores: int
) -> tuple[int, float]:
    """Return the batch size of an experiment, and the minimum duration in seconds of `run_step_bench` for it."""
    from ...bench.step import ROUND_SECONDS
    from ...comm import SingleTransport

    start_time = time.monotonic()
    experiment = load_and_validate(arguments, SingleTransport(), ranks)
    loading_seconds = (time.monotonic() - start_time) * (1 + (ranks > 1))  # also loaded once before mpirun starts
    step_seconds = speed.step_seconds_lower_bound(experiment, ranks, cores)
    return experiment.batch_size, loading_seconds + max(ROUND_SECONDS, steps * step_seconds)


def run_step_bench(
    arguments: argparse.Namespace,
    ranks: int,
    settings: Sequence[str],
    steps: int,
    cores: int | None = None,
    extra: Sequence[str] = (),
    progress_file: Path | str = os.devnull,
) -> dict[str, Any]:
    """Return the results of `neondist bench step` in a new job with `cores` threads per rank and extra options."""
    words = ["-n", str(ranks), "--steps", str(steps), "--progress", str(progress_file), *extra]
    words += ["--set", *arguments.settings, *settings] if arguments.settings or settings else []
    env = dict(os.environ) | ({} if cores is None else dict.fromkeys(threads.THREAD_COUNT_VARIABLES, str(cores)))
    words += [f"--import={module}" for module in arguments.modules]
    return run_bench_for_json(
        ["step", options.escape_leading_dash(arguments.file), *words], env,
        lambda code, _: LaunchError(f"{counted(ranks, 'rank')} ended with exit code {code}; see the output above"),
        stderr=None,
    )  # fmt: skip


def run_bench_for_json(
    words: Sequence[str],
    env: Mapping[str, str],
    create_error: Callable[[int, str], UserError],
    stderr: int | None = subprocess.PIPE,
) -> dict[str, Any]:
    """Run `neondist bench` with the arguments `words`, and return the contents of the JSON file that it writes.

    Parameters
    ----------
    env : mapping
        Environment of the process.
    create_error : callable
        Returns the error, given a nonzero exit code and the stderr of the process.
    stderr : int or None
        As in subprocess.run. None: inherited from this process, and `create_error` receives ''.
    """
    with tempfile.TemporaryDirectory(prefix="neondist-bench-") as folder:
        file = Path(folder, "made.json")
        command = safe_path.python_command("neondist", "bench", *words, "--json", file)
        process = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=stderr, text=True, check=False, env=env)
        if process.returncode:
            raise create_error(process.returncode, process.stderr or "")
        result: dict[str, Any] = json.loads(read_bytes(file))
        return result


def calibrate(arguments: argparse.Namespace) -> int:
    """Measure this machine."""
    if get_mpi_job(arguments) is None and arguments.ranks is None:
        arguments.ranks = 2 * max(2, threads.count_cores())  # two per core, to measure the cost of sharing a core

    def require_two_ranks(_: Transport, ranks: int) -> None:
        if ranks < 2:
            raise ConfigError("bench model calibrate: timing messages needs two ranks; give -n 2 or more")

    def work(world: Transport, _: None) -> int:
        from ...bench.model import calibrate as model
        from ...bench.noise import noise_warnings
        from ...system.machine import write_machine

        cores = max(2, threads.count_cores(os.getppid()))
        with first_rank_progress(world.rank, sys.stderr, unit="measurement", delay=0) as progress:
            machine, noise = model.calibrate(world, cores, progress)
            machine = replace(machine, error=model.measure_prediction_error(world, cores, machine, progress))
        if world.rank == 0:
            write_machine(
                Path(arguments.output),
                machine,
                f"measured by neondist bench model calibrate on {counted(world.size, 'rank')}",
            )
            emit(read_bytes(arguments.output).decode(), *noise_warnings(noise))
            options.print_written([arguments.output])
        return 0

    return run_on_ranks(arguments, require_two_ranks, work)


def predict(arguments: argparse.Namespace) -> int:
    """Predict the times of training steps, and report the prediction error."""
    from threadpoolctl import threadpool_limits

    from ...bench.least_time import CoreSpeed
    from ...bench.model import predict as model
    from ...bench.model import table
    from ...bench.model.rank_profile import LEAST_STEPS
    from ...comm import SingleTransport
    from ...io.output import prepare_run_folder
    from ...system.machine import read_machine

    if get_mpi_job(arguments) is not None or arguments.ranks is not None:
        raise LaunchError("bench model predict runs in one process; run it outside an MPI job, with --ranks, not -n")
    machine = read_machine(Path(arguments.machine))
    measured = arguments.measure
    if measured is None:  # by default, measure only on the machine that the file describes
        on_own_machine = machine.host == platform.node()
        measured = [count for count in arguments.counts if on_own_machine and count <= 2 * threads.count_cores()]
    folder = options.output_folder(arguments, "model")
    times = arguments.measured
    measured = [count for count in measured if count not in times]
    counts, rows = sorted({*arguments.counts, *measured, *times}), list[dict[str, Any]]()
    with (
        ProgressLine(None, sys.stderr, "step", delay=0) as progress,
        tempfile.TemporaryDirectory(prefix="neondist-progress-") as progress_folder,
    ):
        progress.begin_part("checking the experiment")
        num_profiles, least_seconds = {}, {}
        speed, file = CoreSpeed.measure(), Path(progress_folder, "end")
        for count in counts:  # a fixed grid suits only one rank count
            experiment = load_and_validate(arguments, SingleTransport(), count)
            num_profiles[count] = model.count_rank_profiles(count, experiment)
            least_seconds[count] = LEAST_STEPS * speed.step_seconds_lower_bound(experiment, count)
        prepare_run_folder(SingleTransport(), folder)
        planned_seconds = [num_profiles[count] * least_seconds[count] for count in counts]
        # two profiles, and a job with at least as many steps whose ranks share the cores
        planned_seconds += [
            least_seconds[count] * (2 + max(1, count / threads.count_cores())) for count in counts if count in measured
        ]
        progress.set_total_parts(len(planned_seconds), planned_seconds=planned_seconds)
        for count in counts:
            progress.begin_part(counted(count, "rank"))
            with threadpool_limits(1):  # one rank per core
                profile = model.profile_with_progress(progress, num_profiles[count])
                rows += model.predict(lambda: _load_with_sample_shape(arguments), [count], machine, profile)
            progress.add_done_parts(1)
        if times:
            prior, machine = machine, model.fit_machine(machine, rows, times)
            rows = [model.rescale_row(machine, r, prior) | {"measured_seconds": times.get(r["ranks"])} for r in rows]
            emit(
                f"calibrated by --measured: compute_factor {machine.compute_factor:.4g}, jitter {machine.jitter:.3g}\n"
            )
        for at, row in enumerate(rows):
            if row["ranks"] in measured:
                progress.begin_process(f"measuring {counted(row['ranks'], 'rank')}", file)
                rows[at] = _measure_row(arguments, machine, row, file)
                progress.add_done_parts(1)
    emit(table.prediction_table(rows))
    if any(row["schemes"] for row in rows):
        emit(f"\n{table.schemes_table(rows)}")
    emit("\n" + "\n".join(table.describe_conclusions(rows)))
    options.print_written(
        table.write_report(folder, rows, f"{Path(arguments.file).name} on {Path(arguments.machine).name}")
    )
    return 0


def _load_with_sample_shape(arguments: argparse.Namespace) -> Any:
    """Return the experiment with its data set checked, so that the sample shape is known."""
    experiment = load_from_arguments(arguments)
    experiment.dataset.check()
    return experiment


def _measure_row(
    arguments: argparse.Namespace, machine: Machine, row: dict[str, Any], progress_file: Path
) -> dict[str, Any]:
    """Return a row with the measured step time, and the prediction from uncontended times measured around it."""
    from threadpoolctl import threadpool_limits

    from ...bench.model.predict import measure_uncontended_seconds, replace_uncontended_seconds

    with threadpool_limits(1):
        before = measure_uncontended_seconds(row, _load_with_sample_shape(arguments))
    measured_seconds = _measure_step_seconds(arguments, row, progress_file)
    with threadpool_limits(1):
        after = measure_uncontended_seconds(row, _load_with_sample_shape(arguments))
    return replace_uncontended_seconds(machine, row, [before, after]) | {"measured_seconds": measured_seconds}


def _measure_step_seconds(arguments: argparse.Namespace, row: dict[str, Any], progress_file: Path) -> float:
    """Return the seconds per step on the row's ranks and grid, one thread per rank, as in the prediction."""
    settings = [f"grid.{axis}={count}" for axis, count in row["grid"].items()]
    steps = max(4, round(1 / row["seconds_per_step"]))
    result = run_step_bench(arguments, row["ranks"], settings, steps, cores=1, progress_file=progress_file)
    return float(result["seconds_per_step"])


def parse_rank_counts(text: str) -> list[int]:
    """Parse RANKS,..., such as '1,2,4', or FIRST..LAST, such as '1..4096': FIRST times powers of two."""
    first, separator, last = text.partition("..")
    if not separator:
        return options.parse_rank_counts(text)
    low, high = options.rank_count(first), options.rank_count(last)
    return [low << power for power in range((high // low).bit_length())]


def _parse_measured_rank_counts(text: str) -> list[int]:
    """Parse RANKS,..., such as '1,2', or 'none'."""
    return [] if text == "none" else options.parse_rank_counts(text)


def _parse_seconds_by_rank_count(text: str) -> dict[int, float]:
    """Parse RANKS=SECONDS,..., such as '8=0.24,16=0.25'."""
    seconds_by_ranks = {}
    for word in text.split(","):
        ranks, _, seconds = word.partition("=")
        try:
            seconds_by_ranks[options.positive_int(ranks)] = float(seconds)
        except ValueError:
            seconds_by_ranks[options.positive_int(ranks)] = 0.0
        if not 0 < seconds_by_ranks[int(ranks)] < float("inf"):
            raise argparse.ArgumentTypeError(f"'{word}' is not RANKS=SECONDS; expected a list such as 8=0.24,16=0.25")
    return seconds_by_ranks
