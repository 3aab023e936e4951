"""`neondist sweep`: hyperparameter search with Optuna over fields of an experiment."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import product
from math import prod
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import yaml

from .. import safe_path
from ..comm import SingleTransport
from ..config import dump
from ..errors import ConfigError, DataError, LaunchError, MissingPackageError, OutputError
from ..io.files import convert_file_errors, short_reason, write_text
from ..io.output import lock_folder
from ..io.regular_file import read_bytes
from ..launcher.pinning import PIN_VARIABLE
from ..launcher.ranks import needs_launch
from ..system import threads
from ..system.job import detect_job
from ..system.signals import INTERRUPTED_EXIT_CODE, STOPPED_EXIT_CODE
from ..terminal.console import escape_invisible, say
from ..terminal.progress_line import ProgressLine, preparation_progress
from ..train import Best
from ..train.html_elements import escape_html, html_page, is_plottable, table_html, value_html, value_text
from ..train.html_report import read_epoch_records
from ..train.svg_plot import line_plot_svg
from . import options
from .experiment import load_and_validate, load_from_arguments

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial, Trial

DATABASE_FILE = "sweep.db"
PRUNERS = {"median": "MedianPruner", "halving": "SuccessiveHalvingPruner", "hyperband": "HyperbandPruner"}
_POLL_SECONDS = 0.1
_STATE_ORDER = {"COMPLETE": 0, "PRUNED": 1}
_MAX_COMBINATIONS = 10_000  # limit of values or combinations for an exhaustive search
_MIN_FREE_BYTES = 1 << 16
_WRITE_ERROR_PATTERN = re.compile(r"^error: (.* cannot be (?:written|created)(?: to)? \(.*?\)(?=;|$))", re.M)
_SPACE_SYNTAX = "write KEY=LOW..HIGH, LOW..HIGH:log, LOW..HIGH:STEP, or [A, B, ...]"


def add_parser(commands: Any) -> None:
    """Register the command."""
    cmd = commands.add_parser("sweep", help="search the hyperparameters of an experiment", allow_abbrev=False)
    options.add_experiment_options(cmd, "number of ranks of each trial (default 1)")
    cmd.add_argument(
        "--vary", dest="spaces", action="append", required=True, metavar="KEY.PATH=SPACE",
        help="search space: LOW..HIGH (integers, if both are), LOW..HIGH:log, LOW..HIGH:STEP, or a list [A, B]",
    )  # fmt: skip
    cmd.add_argument(
        "--trials", type=options.positive_int, default=20, metavar="K",
        help="total number of trials, including those of earlier calls (default 20, or all combinations if fewer)",
    )  # fmt: skip
    cmd.add_argument(
        "--number", metavar="NAME",
        help="metric to optimise, at the best epoch of each trial (default: that of the field best, or the validation"
             " loss)",
    )  # fmt: skip
    options.add_count_option(cmd, "--jobs", "K", "number of trials to run in parallel", 1)
    cmd.add_argument("--prune", choices=PRUNERS, help="stop unpromising trials early, with this pruner of Optuna")
    options.add_output_option(cmd, "sweep", "output folder, from which a repeated command resumes")
    cmd.set_defaults(command=sweep, stops=True)


def sweep(arguments: argparse.Namespace) -> int:
    """Run trials until there are `--trials` in total, including those of earlier commands."""
    try:
        import optuna
    except ImportError:
        raise MissingPackageError("sweep needs optuna: pip install 'neondist[sweep]'") from None
    if detect_job(os.environ) is not None:
        raise LaunchError("sweep starts the ranks of each trial itself; run it outside an MPI job, with -n RANKS")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    needs_launch(arguments, None)
    spaces: dict[str, BaseDistribution] = {}
    for key, domain in map(parse_space, arguments.spaces):
        if key in spaces:
            raise ConfigError(f"--vary {key}: given twice; give all values of a field in one list or range")
        spaces[key] = domain
    with preparation_progress(owns_process=arguments.signals.owns_process):
        experiment = _validate_spaces(arguments, spaces)
    best = Best(arguments.number) if arguments.number else experiment.best or Best()
    best.check_metric_is_recorded(experiment.metrics, experiment.dataset.fields)
    folder = options.output_folder(arguments, "sweep")
    with lock_folder(SingleTransport(), folder, overwrite=True), _convert_storage_errors(folder / DATABASE_FILE):
        study = optuna.create_study(
            study_name="sweep", storage=f"sqlite:///{folder / DATABASE_FILE}", load_if_exists=True,
            direction="maximize" if best.larger_is_better(experiment.metrics) else "minimize",
            pruner=getattr(optuna.pruners, PRUNERS.get(arguments.prune, "NopPruner"))(),
        )  # fmt: skip
        job_settings = {"experiment": dump(experiment), "--vary": sorted(arguments.spaces), "--number": best.number}
        previous_settings = study.user_attrs.get("job", job_settings)
        if differ := [name for name in job_settings if job_settings[name] != previous_settings[name]]:
            raise OutputError(
                f"{folder}: contains a sweep started with another {' and another '.join(differ)}; repeat the original"
                " command to resume it, or give another folder with --output"
            )
        study.set_user_attr("job", job_settings)
        return _run_trials(study, arguments, spaces, best, experiment.metrics, folder)


def parse_space(text: str) -> tuple[str, BaseDistribution]:
    """Parse 'a.b=1e-4..1e-1:log', 'a=8..64:8' or 'a=[!ReLU {}, !Tanh {}]' into the field and its search space.

    Raises
    ------
    ConfigError
        The text is not a valid search space.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    key, _, values = (part.strip() for part in text.partition("="))
    try:
        if values.startswith("["):
            list_node: Any = yaml.compose(values, yaml.SafeLoader)
            item_spans = [(item.start_mark.index, item.end_mark.index) for item in list_node.value]
            return key, CategoricalDistribution([values[slice(*span)].strip() for span in item_spans])
        match = re.fullmatch(r"(.+?)\.\.(.+?)(?::(.+))?", values)
        if match is None:
            raise ValueError("is neither a range nor a list")
        is_log, step = match[3] == "log", None if match[3] == "log" else match[3]
        if all(re.fullmatch(r"[-+]?\d+", end) for end in (match[1], match[2], step or "1")):
            return key, IntDistribution(int(match[1]), int(match[2]), is_log, int(step or 1))
        return key, FloatDistribution(float(match[1]), float(match[2]), is_log, None if step is None else float(step))
    except (ValueError, yaml.YAMLError) as error:
        problem = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(f"--vary {text}: {problem}; {_SPACE_SYNTAX}") from None


def _validate_spaces(arguments: argparse.Namespace, spaces: Mapping[str, Any]) -> Any:
    """Return the experiment with the first value of each field, after loading it with the ends of each space."""
    end_values = {key: getattr(domain, "choices", None) or (domain.low, domain.high) for key, domain in spaces.items()}
    first_values = {key: values[0] for key, values in end_values.items()}
    for key, values in end_values.items():
        for value in values[1:]:
            load_from_arguments(_override_settings(arguments, first_values | {key: value}))
    return load_and_validate(_override_settings(arguments, first_values), SingleTransport(), arguments.ranks or 1)


def _override_settings(arguments: argparse.Namespace, values: Mapping[str, Any]) -> argparse.Namespace:
    settings = [*arguments.settings, *(f"{key}={value}" for key, value in values.items())]
    return argparse.Namespace(**{**vars(arguments), "settings": settings})


@contextmanager
def _convert_storage_errors(path: Path) -> Iterator[None]:
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (SQLAlchemyError, StorageInternalError) as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        remedy = "free disk space or check permissions and repeat the command, or choose another folder with --output"
        raise OutputError(f"{path}: cannot be used ({reason}); {remedy}") from error


class _RunningTrial:
    def __init__(self, trial: Trial, process: Any, folder: Path, log_start: int) -> None:
        self.trial, self.process, self.folder, self._log_start = trial, process, folder, log_start
        self.pruned = self._terminated = False
        self._metrics_size_at_last_read = 0
        self._reported_epochs = len(trial.study.trials[trial.number].intermediate_values)

    def terminate(self) -> None:
        if not self._terminated:
            self._terminated = True
            self.process.terminate()

    def find_write_problem(self) -> str:
        """Return why the run, which failed, could not write its files; '' if they were not the cause."""
        if match := _WRITE_ERROR_PATTERN.search(_read_log(self.folder, self._log_start)):
            return match[1]
        try:  # on a full disk, the log may lack the message
            with TemporaryFile(dir=self.folder.parent) as file:
                file.write(bytes(_MIN_FREE_BYTES))
        except OSError as error:
            return f"{self.folder.parent}: cannot be written to ({short_reason(error)})"
        return ""

    def report_epochs_to_optuna(self, best: Best) -> None:
        """Report new epochs to Optuna one by one, and terminate the run if it should be pruned."""
        path = self.folder / "metrics.jsonl"
        with suppress(DataError, FileNotFoundError):  # no file yet, or an incomplete line
            previous, self._metrics_size_at_last_read = self._metrics_size_at_last_read, path.stat().st_size
            if self.pruned or self._metrics_size_at_last_read == previous:
                return
            records = read_epoch_records(path)
            name = best.metric_name(records)
            for record in records[self._reported_epochs :]:
                value = record.get(name)
                self.trial.report(value if value is not None and is_plottable(value) else float("nan"), record["epoch"])
                self._reported_epochs += 1
                if self.trial.should_prune():
                    self.pruned = True
                    self.terminate()
                    return


def _run_trials(
    study: Study, arguments: argparse.Namespace, spaces: dict[str, Any], best: Best, metrics: Any, folder: Path
) -> int:
    """Train all trials, up to `--jobs` at a time, and print their results.

    A trial that cannot write its files ends the sweep, which resumes it when repeated.
    """
    from optuna.trial import TrialState

    combinations = _all_combinations(arguments.trials, spaces)
    trials = _propose_trials(study, combinations, arguments.trials, spaces)
    running_trials, stop_code, write_problem = list[_RunningTrial](), 0, ""
    progress = ProgressLine(unit="trial", file=sys.stderr, delay=0)
    finished_trials = [t for t in study.trials if t.state.is_finished()]
    num_repeated = len(finished_trials) - len({str(sorted(t.params.items())) for t in finished_trials})
    num_trials = len(combinations) + num_repeated if combinations else arguments.trials
    progress.set_total_parts(num_trials, len(finished_trials))
    while True:
        while len(running_trials) < arguments.jobs and not stop_code and (trial := next(trials, None)) is not None:
            trial_folder = _trial_folder(folder, trial.number)
            log_start = _log_path(trial_folder).stat().st_size if _log_path(trial_folder).exists() else 0
            process = start_training(
                _run_arguments(_override_settings(arguments, trial.params), trial_folder),
                _log_path(trial_folder),
                _run_environment(arguments),
            )
            running_trials.append(_RunningTrial(trial, process, trial_folder, log_start))
            progress.begin_part(", ".join(str(run.trial.number) for run in running_trials))
        if not running_trials:
            progress.close()
            if write_problem:
                raise OutputError(
                    f"{write_problem}; free disk space or check permissions, then repeat the command to continue"
                )
            return stop_code or _report_results(study, folder)
        time.sleep(_POLL_SECONDS)
        for run in list(running_trials):
            exit_code = run.process.poll()
            if arguments.prune:
                run.report_epochs_to_optuna(best)
            if arguments.signals.received_signals or stop_code:
                run.terminate()
            if exit_code is None:
                continue
            running_trials.remove(run)
            number = run.trial.number
            if run.pruned:
                result = study.tell(number, state=TrialState.PRUNED)
            elif arguments.signals.received_signals or exit_code in (STOPPED_EXIT_CODE, INTERRUPTED_EXIT_CODE):
                stop_code = exit_code if exit_code == INTERRUPTED_EXIT_CODE else STOPPED_EXIT_CODE
                say(f"stopped during trial {number}; repeat the command to continue")
                continue
            elif exit_code and (problem := run.find_write_problem()):
                stop_code, write_problem = STOPPED_EXIT_CODE, write_problem or f"trial {number}: {problem}"
                continue
            else:
                value = _read_objective(run.folder, best, metrics) if exit_code == 0 else None
                result = study.tell(number, value, TrialState.FAIL if value is None else TrialState.COMPLETE)
            parameters_text = ", ".join(f"{k}={v}" for k, v in result.params.items())
            line_start = "\r\x1b[K" if progress.is_terminal else ""
            say(f"trial {number}: {parameters_text}: {_describe_result(result, folder)}", start=line_start)
            progress.add_done_parts(1)


def _all_combinations(count: int, spaces: dict[str, Any]) -> list[dict[str, Any]]:
    """Return all combinations of values if there are no more than `count`; else none."""
    values = [_domain_values(domain) for domain in spaces.values()]
    is_exhaustive = 0 < prod(map(len, values)) <= min(count, _MAX_COMBINATIONS)
    return [dict(zip(spaces, combination, strict=True)) for combination in product(*values)] if is_exhaustive else []


def _propose_trials(
    study: Study, combinations: list[dict[str, Any]], count: int, spaces: dict[str, Any]
) -> Iterator[Trial]:
    """Yield the trials to run: trials that were interrupted in an earlier call, then new trials.

    Proposals depend only on earlier results and the trial's number, so a resumed sweep equals an uninterrupted one.
    """
    from optuna.trial import Trial, TrialState

    for trial in study.get_trials(states=[TrialState.RUNNING]):
        yield _sample_parameters(Trial(study, trial._trial_id), spaces)
    for combination in combinations:  # an earlier call with fewer trials may already have sampled some
        study.enqueue_trial(combination, skip_if_exists=True)
        if study.get_trials(deepcopy=False, states=[TrialState.WAITING]):
            yield _sample_parameters(study.ask(), spaces)
    started_trials = [trial for trial in study.trials if trial.state != TrialState.WAITING]
    for _ in range(len(started_trials), 0 if combinations else count):
        yield _sample_parameters(study.ask(), spaces)


def _sample_parameters(trial: Trial, spaces: dict[str, Any]) -> Trial:
    """Sample the parameters of a trial that an earlier call, killed while it sampled, has not stored."""
    from optuna.samplers import TPESampler

    for position, (key, domain) in enumerate(spaces.items()):
        trial.study.sampler = TPESampler(seed=trial.number * len(spaces) + position)
        trial._suggest(key, domain)
    return trial


def _domain_values(domain: Any) -> Sequence[Any]:
    """Return all values of a search space; none if it is continuous."""
    if hasattr(domain, "choices"):
        return list(domain.choices)
    count = int((domain.high - domain.low) / domain.step + 1.5) if domain.step else 0
    if count > _MAX_COMBINATIONS:
        return ()
    return [min(domain.low + at * domain.step, domain.high) for at in range(count)]


def _trial_folder(folder: Path, number: int) -> Path:
    return folder / f"trial_{number:03d}"


def _run_arguments(arguments: argparse.Namespace, run: Path) -> list[str]:
    words = ["run", options.escape_leading_dash(arguments.file), f"--output={run}", "--resume", "auto"]
    words += ["--force"] * arguments.force + ([] if arguments.ranks is None else ["-n", str(arguments.ranks)])
    words += [f"--import={module}" for module in arguments.modules]
    return words + [f"--set={setting}" for setting in arguments.settings]


def _run_environment(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the environment of a run; parallel runs share the cores."""
    extra_variables = {}
    if arguments.jobs > 1:
        extra_variables[PIN_VARIABLE] = "no"
        if not threads.is_thread_count_set(os.environ):
            thread_count = threads.threads_per_rank(arguments.jobs * (arguments.ranks or 1))
            extra_variables |= dict.fromkeys(threads.THREAD_COUNT_VARIABLES, str(thread_count))
    return {**os.environ, **extra_variables}


def start_training(words: Sequence[str], log: Path, env: Mapping[str, str]) -> Any:
    """Start a process that trains, with its output in a log file."""
    with convert_file_errors(log), log.open("ab") as file:
        return subprocess.Popen(
            safe_path.python_command("neondist", *words, ends_with_parent=True), stdin=subprocess.DEVNULL, stdout=file,
            stderr=file,
            start_new_session=True, env=env,
        )  # fmt: skip


def _read_objective(run: Path, best: Best, metrics: Any) -> float | None:
    """Return the number to optimise at a run's best epoch; None if it is not finite in any epoch."""
    records = read_epoch_records(run / "metrics.jsonl")
    best_epoch = best.find_best_epoch(records, metrics)
    values = [record.get(best.metric_name(records)) for record in records if record["epoch"] == best_epoch]
    return next((float(value) for value in values if value is not None and is_plottable(value)), None)


def _log_path(run: Path) -> Path:
    return run.with_suffix(".log")


def _read_log(run: Path, start: int = 0) -> str:
    """Return the log of a run from a byte on; '' if there is none."""
    path = _log_path(run)
    return read_bytes(path, root=path.parent)[start:].decode(errors="replace") if path.exists() else ""


def _last_log_line(run: Path) -> str:
    lines = reversed(_read_log(run).split("\n"))
    return next((line.removeprefix("error: ") for line in lines if line.strip()), "no output")


def _describe_result(trial: FrozenTrial, folder: Path) -> str:
    if trial.state.name == "COMPLETE":
        return f"{trial.value:.6g}"
    if trial.state.name == "PRUNED":
        return f"pruned after epoch {trial.last_step}"
    return f"failed: {_last_log_line(_trial_folder(folder, trial.number))}"


def _best_trial_plot_point(trial: FrozenTrial, key: str) -> tuple[float, float] | None:
    """Return the point of the best trial in the plot of a field; None if the field is not a number."""
    parameter, value = trial.params[key], trial.value
    return (parameter, value) if is_plottable(parameter) and value is not None else None


def _report_results(study: Study, folder: Path) -> int:
    """Print the trials, the best first, and write them and the best experiment; ConfigError if none has a result."""
    from rich.table import Table

    from ..terminal.rich_console import Console

    sign = -1 if study.direction.name == "MAXIMIZE" else 1
    trials = sorted(study.trials, key=lambda t: (_STATE_ORDER.get(t.state.name, 2), sign * (t.value or 0), t.number))
    if trials[0].value is None:
        raise ConfigError(
            f"sweep: no trial has a result; correct the error of trial {trials[0].number}:"
            f" {_last_log_line(_trial_folder(folder, trials[0].number))}"
        )
    keys = list(trials[0].params)
    ends = [key.rpartition(".")[2] for key in keys]
    names = [key if ends.count(end) > 1 else end for key, end in zip(keys, ends, strict=True)]
    header = ["trial", study.user_attrs["job"]["--number"] or "loss", *names]
    rows = [[t.number, _describe_result(t, folder), *(t.params.get(key) for key in keys)] for t in trials]
    trial_table = Table(*header)
    for row in rows:
        trial_table.add_row(*map(value_text, row))
    Console(soft_wrap=True).print(trial_table)
    completed = [t for t in trials if t.state.name == "COMPLETE"]
    results = [(t.number, float(t.value or 0), t.params) for t in sorted(completed, key=lambda t: t.number)]
    points = {key: [(params[key], value) for _, value, params in results if is_plottable(params[key])] for key in keys}
    text = read_bytes(_trial_folder(folder, trials[0].number) / "experiment.yaml", root=folder).decode()
    origin_comment = f"# trial {trials[0].number} of {escape_invisible(str(folder), keep='')}: {trials[0].value:.6g}"
    write_text(folder / "best.yaml", f"{origin_comment}\n{text}")
    write_text(folder / "sweep.html", html_page(folder.resolve().name, [
        f"<p class='lead'>Best {escape_html(header[1])}: {value_html(trials[0].value)}, trial {trials[0].number}</p>",
        "<h2>Results</h2>", line_plot_svg(
            header[1], {header[1]: [(number, value) for number, value, _ in results]}, points_only=True,
            best_point=(trials[0].number, float(trials[0].value)), x_label="trial",
        ),
        *(line_plot_svg(header[1], {header[1]: values}, points_only=True,
               logarithmic_x=getattr(trials[0].distributions[key], "log", False),
               best_point=_best_trial_plot_point(trials[0], key), x_label=key)
          for key, values in points.items() if values),
        table_html(header, [map(value_html, row) for row in rows]),
        f"<h2>Best experiment</h2><pre>{escape_html(text, len(text))}</pre>",
    ]))  # fmt: skip
    options.print_written([folder / "best.yaml", folder / "sweep.html"])
    return 0
