"""`neondist run` and `neondist check`: train an experiment or run a script; print the plan of each layer."""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from ..comm import Transport
from ..config import dump
from ..errors import LaunchError
from ..launcher.ranks import create_watchdog, run_on_ranks, run_script_on_ranks
from ..launcher.workers import check_worker_options, read_worker_spec, run_workers
from ..system.job import JOB_START_TIME_VARIABLE, detect_job
from ..terminal.progress_line import preparation_progress
from ..train import Hook
from . import options
from .definition import is_definition_without_program
from .experiment import DEFINITION_REMEDY, load_and_validate, load_from_arguments

_EXPERIMENT_OPTIONS = (
    "settings", "output", "virtual", "resume", "overwrite", "init_from", "time_limit", "stall_timeout", "debug_halo",
    "snapshot",
)  # fmt: skip
_OPTIONS_WITH_FILE_VALUES = ("--import", "--set", "--hosts-from", "--init-from", "--output", "--strategy")
_SECONDS_BY_UNIT = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_MAX_SECONDS = 10**9
"""Maximum duration, about 30 years; longer durations overflow in clocks and timeouts."""


def add_parser(commands: Any) -> None:
    """Register the commands."""
    cmd = commands.add_parser(
        "run", help="train an experiment from a YAML file, or run a script on all ranks", allow_abbrev=False,
        usage="neondist run [options] FILE.yaml | SCRIPT.py [arguments of the script]",
    )  # fmt: skip
    add_run_options(cmd)
    cmd.set_defaults(command=run, stops=True, watched=True)

    cmd = commands.add_parser(
        "check", help="validate an experiment and print the plan of each layer", allow_abbrev=False
    )
    options.add_experiment_options(cmd, "number of ranks to plan for (default 1); none is started")
    cmd.add_argument(
        "--measure-memory", action="store_true",
        help="also run a few batches as rank 0 in this process, with evaluation and output files, and print the peak"
             " memory",
    )  # fmt: skip
    cmd.set_defaults(command=check)


def add_run_options(cmd: argparse.ArgumentParser, launch: bool = False) -> None:
    """Add the file and the options of `run`, or those of `launch`, whose hosts are in a resource file."""
    ranks_note, hosts_note = ("", "") if launch else ("with -n: ", "with --hosts-from: ")
    ranks_help = "number of ranks (default: all devices of the resource file)" if launch else options.RANKS_HELP
    options.add_experiment_options(cmd, ranks_help)
    options.add_output_option(cmd)
    if not launch:
        options.add_virtual_option(cmd)
    cmd.add_argument(
        "--resume", nargs="?", default=False, const=True, type=parse_resume_mode, metavar="auto",
        help="resume from the checkpoint in the output folder; with auto, start from scratch if there is none",
    )  # fmt: skip
    cmd.add_argument("--overwrite", action="store_true", help="replace an existing run in the output folder")
    cmd.add_argument("--init-from", metavar="FILE", help="initialise the weights from a checkpoint, by name")
    cmd.add_argument(
        "--time-limit", type=parse_duration_seconds, metavar="TIME",
        help="write a checkpoint and stop with exit code 75 before this time limit: 3h30m, 03:30:00 or seconds",
    )  # fmt: skip
    cmd.add_argument(
        "--stall-timeout", type=parse_duration_seconds, metavar="TIME",
        help="abort the job if there is no progress for this long, and report what each rank is waiting for (default"
             " 10m)",
    )  # fmt: skip
    cmd.add_argument(
        "--debug-halo", action="store_true",
        help="detect invalid accesses of custom layers, rules and schemes: slow, with identical results",
    )  # fmt: skip
    cmd.add_argument(
        "--restarts", type=options.positive_int, metavar="K",
        help=f"{ranks_note}if a rank is killed, restart from the newest complete checkpoint, at most K times",
    )  # fmt: skip
    cmd.add_argument(
        "--elastic", type=parse_rank_bounds, metavar="MIN:MAX",
        help=f"with --restarts{'' if launch else ' or --hosts-from'}: continue on the remaining ranks, at least MIN;"
             " start on MAX ranks, or on those of -n",
    )  # fmt: skip
    if not launch:
        cmd.add_argument(
            "--hosts-from", type=options.parse_path, metavar="FILE|SCRIPT",
            help="hosts to start ranks on: a host file, a resource file, or a program that prints HOST:SLOTS lines;"
                 " reread regularly with --elastic",
        )  # fmt: skip
    cmd.add_argument(
        "--spares", type=options.nonnegative_int, default=0, metavar="K",
        help=f"{hosts_note}keep K slots idle to replace lost ranks on the same grid",
    )  # fmt: skip
    cmd.add_argument(
        "--cooldown", type=parse_duration_seconds, metavar="TIME",
        help=f"{hosts_note or 'with --restarts: '}do not use a failed host for this long (default 1m)",
    )  # fmt: skip
    cmd.add_argument(
        "--wait", type=parse_duration_seconds, metavar="TIME",
        help=f"{hosts_note or 'with --restarts: '}give up after waiting this long for enough hosts (default 10m)",
    )  # fmt: skip
    cmd.add_argument(
        "--snapshot", type=parse_snapshot_steps, metavar="auto|STEPS|off",
        help="with --restarts: keep snapshots of the run in the shared memory of two nodes, every STEPS steps, or using"
             " at most 2 %% of the time (auto, the default)",
    )  # fmt: skip
    cmd.add_argument(
        "--lease", type=parse_duration_seconds, metavar="TIME",
        help=f"{ranks_note}treat a rank that is stopped or unreachable for this long as lost (default 15s)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Train in this process, on virtual ranks, in the current MPI job, or under mpirun."""
    if arguments.script:
        return _run_script(arguments)
    from ..io.output import missing_folders, remove_empty_folders

    def work(world: Transport, experiment: Any) -> int:
        start_args = {"resume": arguments.resume, "init_from": arguments.init_from, "overwrite": arguments.overwrite}
        outputs = {
            "output": arguments.folder, "yaml_text": dump(experiment), "snapshot": arguments.snapshot or None,
        }  # fmt: skip
        worker = read_worker_spec(os.environ) if experiment.server_strategy is not None else None
        hooks = create_hooks(arguments)
        result = experiment.run(experiment.open_grid(world), **outputs, hooks=hooks, **start_args, worker=worker)
        if world.rank == 0:
            options.print_written(result.files)
        return result.stop.exit_code if result.stop else 0

    new_folders = missing_folders(arguments.folder)
    try:
        return run_on_ranks(arguments, partial(_load_and_prepare, arguments), work, partial(run_workers, arguments))
    finally:
        remove_empty_folders(new_folders)


def split_at_script(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments of `run` or `launch` up to a script, and the script with its arguments ([]: no script)."""
    first_index = {"run": 1, "launch": 2}.get(words[0] if words else "", len(words))
    for index in range(first_index, len(words)):
        word = words[index]
        is_value = words[index - 1] in _OPTIONS_WITH_FILE_VALUES or re.match(r"[\w.-]+=", word) is not None
        if word.endswith(".py") and not word.startswith("-") and not is_value:
            return list(words[: index + 1]), list(words[index:])
    return list(words), []


def _run_script(arguments: argparse.Namespace) -> int:
    for name in _EXPERIMENT_OPTIONS:
        if getattr(arguments, name) not in (None, False, []):
            option = "--set, --memory and --strategy" if name == "settings" else f"--{name.replace('_', '-')}"
            verb, pronoun = ("apply", "them") if name == "settings" else ("applies", "it")
            raise LaunchError(
                f"{option}: {verb} to experiments; leave {pronoun} out, and put a script's own arguments after its name"
                " (nd.DistributedSession writes the checkpoints of a script)"
            )
    if not os.path.isfile(arguments.file):
        raise LaunchError(f"{arguments.file}: no such script; give the path of an existing file")
    if is_definition_without_program(arguments.file):
        raise LaunchError(
            f"{arguments.file}: is a model-definition file without a main program, so running it would train nothing;"
            f" {DEFINITION_REMEDY}, or call its functions in a program, under if __name__ == '__main__'"
        )
    return run_script_on_ranks(arguments)


def check(arguments: argparse.Namespace) -> int:
    """Validate the experiment for `ranks` ranks and print its plan, without starting ranks."""
    job = detect_job(os.environ)
    ranks = arguments.ranks or (job.size if job and job.size else 1)
    from ..terminal.rich_console import Console
    from ..train import describe_experiment

    is_first_rank = job is None or job.is_first_rank
    with preparation_progress(int(not is_first_rank), arguments.signals.owns_process):
        experiment = load_from_arguments(arguments)
        if not is_first_rank:
            experiment.validate(ranks)
            return 0
        description = describe_experiment(experiment, ranks)
    Console(soft_wrap=True).print(description)
    if arguments.measure_memory:
        from ..bench.model.rank_profile import measure_peak_memory
        from ..plan.report import format_size
        from ..terminal.console import emit
        from ..train.validate import experiment_grid_shape

        emit("measuring a short run of rank 0 ...")
        peak = measure_peak_memory(experiment, experiment_grid_shape(experiment, ranks))
        emit(f"measured peak: {format_size(peak)} for the whole process of rank 0, which also writes files and plots")
    return 0


def _load_and_prepare(arguments: argparse.Namespace, world: Transport, ranks: int) -> Any:
    """Return the experiment after validating file, data, grid and output folder. Collective."""
    from ..io.output import prepare_run_folder

    experiment = load_and_validate(arguments, world, ranks)
    check_worker_options(arguments, experiment, ranks)
    prepare_run_folder(world, arguments.folder, arguments.resume, arguments.overwrite)
    return experiment


def create_hooks(arguments: argparse.Namespace) -> list[Hook]:
    """Return the hooks for progress, hang detection, stopping and halo checks of a run."""
    from ..train import DebugHalo, ProgressBar, StopOnSignal, TimeLimit

    watchdog = arguments.watchdog or create_watchdog(arguments, owns_process=False)
    hooks: list[Hook] = [ProgressBar(), StopOnSignal(arguments.signals), watchdog]
    if arguments.time_limit is not None:
        hooks.append(TimeLimit(arguments.time_limit, float(os.environ.get(JOB_START_TIME_VARIABLE, time.time()))))
    if arguments.debug_halo:
        hooks.append(DebugHalo())
    return hooks


def parse_resume_mode(text: str) -> bool | str:
    """Parse the value of --resume."""
    if text not in ("yes", "auto"):
        raise argparse.ArgumentTypeError(f"'{text}' is invalid; expected --resume or --resume auto")
    return text == "yes" or text


def parse_rank_bounds(text: str) -> tuple[int, int]:
    """Parse a range such as '2:8'."""
    bounds = [options.rank_count(part) if part.strip("0").isdecimal() else 0 for part in text.split(":")]
    if len(bounds) != 2 or not 1 <= bounds[0] <= bounds[1]:
        raise argparse.ArgumentTypeError(f"'{text}' is not a valid range of ranks; expected MIN:MAX, such as 2:8")
    return bounds[0], bounds[1]


def parse_snapshot_steps(text: str) -> int | Literal["auto"]:
    """Parse the steps between snapshots: a number, 'auto', or 0 for 'off'."""
    if text == "auto":
        return "auto"
    if text != "off" and not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"invalid interval '{text}'; expected auto, off or a number of steps")
    return 0 if text == "off" else options.positive_int(text)


def parse_duration_seconds(text: str) -> float:
    """Return the seconds of '3h30m', '90', '2.5h', '01:30:00' or Slurm's '1-12:00:00' (days)."""
    seconds = _parse_seconds_with_units(text) if ":" not in text else _parse_clock_seconds(text)
    if not seconds:
        raise argparse.ArgumentTypeError(f"'{text}' is not a duration; expected 3h30m, 03:30:00 or a number of seconds")
    if seconds > _MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"'{text:.30}' is too long; give at most {_MAX_SECONDS // 86400}d")
    return seconds


def _parse_seconds_with_units(text: str) -> float:
    if re.fullmatch(r"[0-9]+(\.[0-9]*)?", text):
        return float(text)
    number_pattern = r"[0-9]+(?:\.[0-9]+)?"
    if not re.fullmatch("".join(f"(?:{number_pattern}{unit})?" for unit in _SECONDS_BY_UNIT), text):
        return 0.0
    return sum(float(n) * _SECONDS_BY_UNIT[unit] for n, unit in re.findall(f"({number_pattern})([dhms])", text))


def _parse_clock_seconds(text: str) -> float:
    match = re.fullmatch(r"(?:([0-9]+)-)?([0-9]+):([0-5][0-9]):([0-5][0-9])", text)  # 12:30 is minutes in Slurm
    if not match:
        return 0.0
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
