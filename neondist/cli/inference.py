"""`neondist evaluate` and `neondist predict`: evaluation and inference with a checkpoint."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ..comm import ProcessGrid, Transport, all_or_none
from ..errors import ConfigError
from ..io.files import partial_path as unfinished
from ..io.files import write_text
from ..launcher.ranks import run_on_ranks
from ..system.job import LAUNCHED_RANKS_VARIABLE, detect_job
from ..terminal.console import emit, say
from . import options
from .experiment import load_and_validate, load_experiment_on_all_ranks, load_factory
from .run import parse_duration_seconds

DEFAULT_CHECKPOINT_POLL_SECONDS = 30.0
_WEIGHTS_OPTIONS = "windows", "stride", "scale", "mean", "std"


def add_parser(commands: Any) -> None:
    """Register the commands."""
    cmd = commands.add_parser(
        "evaluate",
        help="evaluate a checkpoint on the data of an experiment, or a trained module on files",
        allow_abbrev=False,
    )
    options.add_experiment_options(cmd, required=False)
    _add_checkpoint_option(cmd, required=False)
    _add_weights_options(cmd)
    cmd.add_argument(
        "--follow", type=options.parse_path, metavar="DIR",
        help="instead of --checkpoint: evaluate each new checkpoint of a run or session until it completes",
    )  # fmt: skip
    cmd.add_argument(
        "--every", type=parse_duration_seconds, metavar="TIME", help="with --follow: polling interval (default 30s)"
    )
    cmd.add_argument(
        "--max-time", type=parse_duration_seconds, metavar="TIME", help="with --follow: stop after this time"
    )
    cmd.add_argument(
        "--output", type=options.parse_path, metavar="DIR",
        help="with --follow: folder for metrics.jsonl and loggers (default evaluation/ in the followed folder)",
    )  # fmt: skip
    cmd.add_argument(
        "--split", choices=["train", "validation", "test"],
        help="split to evaluate (default test, or validation if there is no test split)",
    )  # fmt: skip
    cmd.add_argument(
        "--input", type=options.parse_path, metavar="X", help="images of any size in a file, instead of the data set"
    )
    cmd.add_argument(
        "--labels", type=options.parse_path, metavar="T", help="classes or targets of these images, in a file"
    )
    cmd.add_argument(
        "--report", type=options.parse_path, metavar="FILE.html",
        help="also write a page with metrics, confusion matrix, and images with targets and predictions",
    )  # fmt: skip
    _add_block_and_axes_options(cmd)
    cmd.set_defaults(command=evaluate, watched=True)

    cmd = commands.add_parser(
        "predict", help="apply a checkpoint or a trained module to new images", allow_abbrev=False
    )
    options.add_experiment_options(cmd, required=False)
    _add_checkpoint_option(cmd, required=False)
    _add_weights_options(cmd)
    cmd.add_argument(
        "--input", type=options.parse_path, metavar="X", required=True,
        help="images of any size: a file such as .npy, .h5 (or FILE.h5:NAME), .tif or .zarr; or FILE,FILE,... with the"
        " channels of one image",
    )  # fmt: skip
    cmd.add_argument(
        "--output", type=options.parse_path, metavar="Y", required=True, help="output file, in one of these formats"
    )
    cmd.add_argument("--classes", action="store_true", help="write the class (argmax) of each pixel")
    cmd.add_argument("--probabilities", action="store_true", help="write the softmax probabilities of each pixel")
    cmd.add_argument("--raw", action="store_true", help="write the raw outputs (default)")
    _add_block_and_axes_options(cmd)
    cmd.add_argument(
        "--steps", type=options.positive_int, metavar="N",
        help="for networks trained on ClimateFiles: roll out N forecasts from the last times of the input",
    )  # fmt: skip
    cmd.add_argument(
        "--overwrite", action="store_true", help="replace an existing output, or an unfinished one of another job"
    )
    cmd.set_defaults(command=predict, watched=True)


def _add_weights_options(cmd: argparse.ArgumentParser) -> None:
    """Add the options for a PyTorch module and its weights, which replace an experiment and a checkpoint."""
    cmd.add_argument(
        "--weights", type=options.parse_path, metavar="W",
        help="instead of FILE.yaml and --checkpoint: a state_dict as .safetensors or .pt",
    )  # fmt: skip
    cmd.add_argument(
        "--factory", type=options.parse_path, metavar="FILE.py:NAME",
        help="with --weights: class or function that returns the torch.nn.Module",
    )  # fmt: skip
    cmd.add_argument(
        "--windows", type=options.positive_int, metavar="CELLS",
        help="with --weights: apply a tile classifier to windows of this size and write a map of its scores",
    )  # fmt: skip
    cmd.add_argument(
        "--stride", type=options.positive_int, metavar="CELLS", help="distance between windows (default: their size)"
    )
    cmd.add_argument(
        "--scale", type=options.positive_float, metavar="S",
        help="with --weights: the module's input is (x / S - M) / D for pixel values x (default 1)",
    )  # fmt: skip
    cmd.add_argument(
        "--mean", type=options.parse_floats, metavar="M", help="one value, or one per channel: 0.485,0.456,0.406"
    )
    cmd.add_argument("--std", type=options.parse_floats, metavar="D", help="one value, or one per channel")


def evaluate(arguments: argparse.Namespace) -> int:
    """Print the cost and metrics of a checkpoint as a line of JSON, or evaluate each checkpoint that a job writes."""
    if arguments.weights is not None:
        return _evaluate_module(arguments)
    _reject_weights_options(arguments)
    if arguments.file is None:
        raise ConfigError("evaluate: give FILE.yaml, or --weights W and --factory FILE.py:NAME")
    if (arguments.checkpoint is None) == (arguments.follow is None):
        raise ConfigError("evaluate: give either --checkpoint FILE, or --follow DIR for each checkpoint of a job")
    if arguments.follow is not None:
        return _evaluate_new_checkpoints(arguments)
    for name in ("every", "max_time", "output"):
        if getattr(arguments, name) is not None:
            raise ConfigError(
                f"evaluate: --{name.replace('_', '-')} requires --follow DIR; leave it out, or add --follow DIR"
            )
    files = arguments.input, arguments.labels
    extras = arguments.block, arguments.axes
    if (None in files) != (files == (None, None)) or (extras != (None, None) and None in files):
        raise ConfigError(
            "evaluate: --input, --labels, --block and --axes apply to files; give both --input and --labels, or none"
            " of these"
        )

    def work(experiment: Any, grid: ProcessGrid) -> None:
        from ..train import evaluate_checkpoint, evaluate_files
        from ..train.class_names import read_checkpoint_class_names, read_run_class_names

        samples: dict[str, Any] | None = None if arguments.report is None else {}
        if None in files:
            results = evaluate_checkpoint(experiment, arguments.checkpoint, grid, arguments.split, samples)
        else:
            results = evaluate_files(
                experiment, arguments.checkpoint, *files, grid, arguments.block, samples, arguments.axes
            )

        def read_class_names() -> Sequence[str]:
            path = Path(arguments.checkpoint)
            class_names = read_checkpoint_class_names(path) or experiment.dataset.class_names
            return class_names or read_run_class_names(path.parent)  # for checkpoints without class names

        _print_results(arguments, grid, arguments.file, arguments.checkpoint, results, samples, read_class_names)

    def check_sources(_: Any) -> None:
        _check_source(arguments.input, arguments.axes)
        _check_source(arguments.labels)

    load_experiment = (
        partial(load_and_validate, arguments)
        if None in files
        else lambda world, ranks: load_experiment_on_all_ranks(arguments, world, check_sources)
    )
    return _run_with_experiment(arguments, load_experiment, work)


def _evaluate_module(arguments: argparse.Namespace) -> int:
    for name in ("follow", "every", "max_time", "output", "split"):
        if getattr(arguments, name) is not None:
            raise ConfigError(
                f"evaluate: --{name.replace('_', '-')} applies to experiments; leave it out with --weights"
            )
    if arguments.input is None or arguments.labels is None:
        raise ConfigError("evaluate: --weights needs images and labels; give --input X and --labels T")

    def work(module: Any, grid: ProcessGrid) -> None:
        from ..train.inference import evaluate_module

        samples: dict[str, Any] | None = None if arguments.report is None else {}
        results = evaluate_module(module, arguments.input, arguments.labels, grid, arguments.block, samples)
        weights = arguments.weights
        _print_results(arguments, grid, weights, weights, results, samples, lambda: module.class_names)

    return _run_with_module(arguments, work)


def _check_source(path: str | Path, axes: str | None = None) -> None:
    """Raise DataError if images or labels cannot be opened; called before ranks are started."""
    from ..formats import open_source

    open_source(path, axes=axes).close()


def _print_results(
    arguments: argparse.Namespace,
    grid: ProcessGrid,
    subject: str,
    checkpoint: str,
    results: dict[str, Any],
    samples: dict[str, Any] | None,
    read_class_names: Callable[[], Sequence[str]],
) -> None:
    """Print the results on rank 0 as a line of JSON, and write the page of --report, named after the subject's file."""
    from ..train.html_report import evaluation_page_html

    with all_or_none(grid.world):
        if grid.rank == 0:
            emit(json.dumps(results))
            if arguments.report is not None:
                settings = {"checkpoint": checkpoint}
                if arguments.input is not None:
                    settings["images"] = arguments.input
                page_html = evaluation_page_html(Path(subject).stem, settings, results, samples, read_class_names())
                write_text(Path(arguments.report), page_html)
                options.print_written([arguments.report], sys.stderr)


def _evaluate_new_checkpoints(arguments: argparse.Namespace) -> int:
    for name in ("split", "input", "labels", "report", "block", "axes"):
        if getattr(arguments, name) is not None:
            raise ConfigError(f"evaluate: --{name} applies to a single checkpoint; leave it out, or give --checkpoint")
    arguments.watched = False  # may wait for hours

    def work(experiment: Any, grid: ProcessGrid) -> None:
        from ..session import follow_checkpoints
        from ..session.checkpoint_follower import EVALUATION_FOLDER, METRICS_FILE

        poll_seconds = arguments.every or DEFAULT_CHECKPOINT_POLL_SECONDS
        follow_checkpoints(experiment, arguments.follow, grid, arguments.output, poll_seconds, arguments.max_time)
        if grid.rank == 0:
            folder = Path(arguments.output or Path(arguments.follow, EVALUATION_FOLDER))
            options.print_written([folder / METRICS_FILE], sys.stderr)

    return _run_with_experiment(arguments, partial(load_and_validate, arguments), work)


def predict(arguments: argparse.Namespace) -> int:
    """Write the outputs for new images; the experiment's data set is not needed."""
    with _resume_hint_on_failure(Path(arguments.output)):
        return _predict_module(arguments) if arguments.weights is not None else _predict_experiment(arguments)


@contextmanager
def _resume_hint_on_failure(path: Path) -> Iterator[None]:
    """Print, on one rank, instructions for resuming a failed or interrupted command from its completed blocks."""
    part, job = unfinished(path), detect_job(os.environ)
    journal = part.with_name(f"{part.name}.journal")

    def journal_time() -> int | None:
        return journal.stat().st_mtime_ns if journal.exists() else None

    time_before = journal_time()
    try:
        yield
    finally:
        is_first_rank = LAUNCHED_RANKS_VARIABLE not in os.environ and (job is None or job.is_first_rank)
        if is_first_rank and journal_time() not in (None, time_before):
            say(
                f"note: {part} keeps the completed blocks; repeat the command to continue, or give --overwrite to"
                " start over",
                sys.stderr,
            )


def _predict_experiment(arguments: argparse.Namespace) -> int:
    _reject_weights_options(arguments)
    if arguments.file is None or arguments.checkpoint is None:
        raise ConfigError("predict: give FILE.yaml and --checkpoint FILE, or --weights W and --factory FILE.py:NAME")

    def work(experiment: Any, grid: ProcessGrid) -> None:
        from ..train import predict

        files = arguments.checkpoint, arguments.input, arguments.output
        _print_written_shape(
            arguments,
            grid,
            predict(
                experiment, *files, grid, steps=arguments.steps, axes=arguments.axes, **_prediction_options(arguments)
            ),
        )

    return _run_with_experiment(arguments, lambda world, ranks: load_experiment_on_all_ranks(arguments, world), work)


def _predict_module(arguments: argparse.Namespace) -> int:
    if arguments.steps is not None:
        raise ConfigError("predict: --steps applies to networks trained on ClimateFiles; leave it out with --weights")

    def work(trained: Any, grid: ProcessGrid) -> None:
        from ..train.inference import predict_module

        shape = predict_module(trained, arguments.input, arguments.output, grid, **_prediction_options(arguments))
        _print_written_shape(arguments, grid, shape)

    return _run_with_module(arguments, work)


def _reject_weights_options(arguments: argparse.Namespace) -> None:
    command = arguments.words[0]
    for name in ("factory", *_WEIGHTS_OPTIONS):
        if getattr(arguments, name) is not None:
            raise ConfigError(f"{command}: --{name} requires --weights W; leave it out, or add --weights W")


def _run_with_module(arguments: argparse.Namespace, work: Callable[[Any, ProcessGrid], None]) -> int:
    """Run `work` on the module of `--factory` with its weights, here or on ranks started by mpirun."""
    command = arguments.words[0]
    for name in ("file", "checkpoint"):
        if (value := getattr(arguments, name)) is not None:
            raise ConfigError(f"{command}: --weights cannot be combined with {value}; leave out one of them")
    if arguments.factory is None:
        raise ConfigError(f"{command}: --weights W contains no network; give --factory FILE.py:NAME, which returns it")
    memory_limits = [word.removeprefix("memory=") for word in arguments.settings if word.startswith("memory=")]
    if len(memory_limits) < len(arguments.settings) or arguments.modules:
        raise ConfigError(
            f"{command}: --set, --strategy and --import apply to experiments; leave them out with --weights"
        )

    def load_module(world: Transport, ranks: int) -> Any:
        from ..train.inference import TrainedModule

        module_options = {
            name: value for name in (*_WEIGHTS_OPTIONS, "axes") if (value := getattr(arguments, name)) is not None
        }
        module_options |= {"memory": memory_limits[-1]} if memory_limits else {}
        with all_or_none(world):
            factory = load_factory(arguments.factory, "--factory ")
            trained = TrainedModule(factory, arguments.weights, arguments.factory, **module_options)
            trained.check_images(arguments.input)
            if command == "evaluate":
                _check_source(arguments.labels)
        return trained

    return _run_on_grid(arguments, load_module, lambda world, trained: ProcessGrid(world), work)


def _prediction_options(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in ("classes", "probabilities", "raw", "block", "overwrite")}


def _print_written_shape(arguments: argparse.Namespace, grid: ProcessGrid, shape: tuple[int, ...]) -> None:
    if grid.rank == 0:
        from ..train.inference import output_kinds

        kinds = output_kinds.selected_output_kinds(arguments.raw, arguments.probabilities, arguments.classes)
        for kind, path in output_kinds.output_paths(kinds, Path(arguments.output)).items():
            extents = shape[:-1] if kind == "classes" and kinds[0] != "classes" else shape
            emit(f"written: {path}, {' x '.join(map(str, extents))}")


def _add_block_and_axes_options(cmd: argparse.ArgumentParser) -> None:
    cmd.add_argument(
        "--block", type=options.positive_int, metavar="CELLS",
        help="process images in blocks of at most this size (default: only if they do not fit in memory)",
    )  # fmt: skip
    cmd.add_argument(
        "--axes", metavar="LETTERS",
        help="axes of an input that does not name them: NYX (samples, rows, columns), YXC (rows, columns, channels)",
    )  # fmt: skip


def _add_checkpoint_option(cmd: argparse.ArgumentParser, required: bool = True) -> None:
    cmd.add_argument(
        "--checkpoint", type=options.parse_path, metavar="FILE", required=required,
        help="checkpoint.h5 of a run on any number of ranks",
    )  # fmt: skip


def _run_with_experiment(
    arguments: argparse.Namespace,
    load_experiment: Callable[[Transport, int], Any],
    work: Callable[[Any, ProcessGrid], None],
) -> int:
    """Run `work` on the experiment that `load_experiment` returns, here or on ranks started by mpirun."""
    return _run_on_grid(arguments, load_experiment, lambda world, experiment: experiment.open_grid(world), work)


def _run_on_grid(
    arguments: argparse.Namespace,
    load: Callable[[Transport, int], Any],
    open_grid: Callable[[Transport, Any], ProcessGrid],
    work: Callable[[Any, ProcessGrid], None],
) -> int:
    def work_on_grid(world: Transport, loaded: Any) -> int:
        grid = open_grid(world, loaded)
        if arguments.watchdog is not None:
            arguments.watchdog.observe_grid(grid)
        work(loaded, grid)
        return 0

    return run_on_ranks(arguments, load, work_on_grid)
