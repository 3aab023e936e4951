"""`neondist evaluate` and `neondist predict`: a checkpoint at work."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ..comm import ProcessGrid, Transport, all_or_none
from ..errors import ConfigError
from ..io.files import partial as unfinished
from ..io.files import write_text
from ..launcher.ranks import on_ranks
from ..system.job import LAUNCHED, detect
from ..terminal.console import emit, say
from . import options
from .experiment import load_factory, loaded, validated
from .run import duration

EVERY = 30.0
"""seconds between two looks for checkpoints"""
_OF_WEIGHTS = "windows", "stride", "scale", "mean", "std"


def add(commands: Any) -> None:
    """Say what can be typed."""
    one = commands.add_parser(
        "evaluate",
        help="evaluate a checkpoint on the data of an experiment, or a trained module on files",
        allow_abbrev=False,
    )
    options.experiment(one, required=False)
    _checkpoint(one, required=False)
    _of_weights(one)
    one.add_argument(
        "--follow", type=options.path, metavar="DIR",
        help="instead of --checkpoint: evaluate each new checkpoint of a run or session until it completes",
    )  # fmt: skip
    one.add_argument("--every", type=duration, metavar="TIME", help="with --follow: polling interval (default 30s)")
    one.add_argument("--max-time", type=duration, metavar="TIME", help="with --follow: stop after this time")
    one.add_argument(
        "--output", type=options.path, metavar="DIR",
        help="with --follow: folder for metrics.jsonl and loggers (default evaluation/ in the followed folder)",
    )  # fmt: skip
    one.add_argument(
        "--split", choices=["train", "validation", "test"],
        help="split to evaluate (default test, or validation if there is no test split)",
    )  # fmt: skip
    one.add_argument(
        "--input", type=options.path, metavar="X", help="images of any size in a file, instead of the data set"
    )
    one.add_argument("--labels", type=options.path, metavar="T", help="classes or targets of these images, in a file")
    one.add_argument(
        "--report", type=options.path, metavar="FILE.html",
        help="also write a page with metrics, confusion matrix, and images with targets and predictions",
    )  # fmt: skip
    _block(one)
    one.set_defaults(command=evaluate, watched=True)

    one = commands.add_parser(
        "predict",
        help="apply a checkpoint or a trained module to new images",
        allow_abbrev=False,
    )
    options.experiment(one, required=False)
    _checkpoint(one, required=False)
    _of_weights(one)
    one.add_argument(
        "--input", type=options.path, metavar="X", required=True,
        help="images of any size: a file such as .npy, .h5 (or FILE.h5:NAME), .tif or .zarr",
    )  # fmt: skip
    one.add_argument(
        "--output", type=options.path, metavar="Y", required=True, help="output file, in one of these formats"
    )
    one.add_argument("--classes", action="store_true", help="write the class (argmax) of each pixel")
    one.add_argument("--probabilities", action="store_true", help="write the softmax probabilities of each pixel")
    one.add_argument("--raw", action="store_true", help="write the raw outputs (default)")
    _block(one)
    one.add_argument(
        "--steps", type=options.positive, metavar="N",
        help="for networks trained on ClimateFiles: roll out N forecasts from the last times of the input",
    )  # fmt: skip
    one.add_argument(
        "--overwrite", action="store_true", help="replace an existing output, or an unfinished one of another job"
    )
    one.set_defaults(command=predict, watched=True)


def _of_weights(one: argparse.ArgumentParser) -> None:
    """Add what a module of PyTorch and its weights need in the place of an experiment and a checkpoint."""
    one.add_argument(
        "--weights", type=options.path, metavar="W",
        help="instead of FILE.yaml and --checkpoint: a state_dict as .safetensors or .pt",
    )  # fmt: skip
    one.add_argument(
        "--factory",
        type=options.path,
        metavar="FILE.py:NAME",
        help="with --weights: class or function that returns the torch.nn.Module",
    )
    one.add_argument(
        "--windows", type=options.positive, metavar="CELLS",
        help="with --weights: apply a tile classifier to windows of this size and write a map of its scores",
    )  # fmt: skip
    one.add_argument(
        "--stride", type=options.positive, metavar="CELLS", help="distance between windows (default: their size)"
    )
    one.add_argument(
        "--scale", type=options.positive_number, metavar="S",
        help="with --weights: the module's input is (x / S - M) / D for pixel values x (default 1)",
    )  # fmt: skip
    one.add_argument(
        "--mean", type=options.numbers, metavar="M", help="one value, or one per channel: 0.485,0.456,0.406"
    )
    one.add_argument("--std", type=options.numbers, metavar="D", help="one value, or one per channel")


def evaluate(arguments: argparse.Namespace) -> int:
    """Print the cost and the metrics of a checkpoint, or of each that a job writes, as a line of JSON."""
    if arguments.weights is not None:
        return _evaluate_module(arguments)
    _refuse_options_of_weights(arguments)
    if arguments.file is None:
        raise ConfigError("evaluate: give FILE.yaml, or --weights W and --factory FILE.py:NAME")
    if (arguments.checkpoint is None) == (arguments.follow is None):
        raise ConfigError("evaluate: give either --checkpoint FILE, or --follow DIR for each checkpoint of a job")
    if arguments.follow is not None:
        return _follow(arguments)
    for name in ("every", "max_time", "output"):
        if getattr(arguments, name) is not None:
            raise ConfigError(
                f"evaluate: --{name.replace('_', '-')} requires --follow DIR; leave it out, or add --follow DIR"
            )
    files = arguments.input, arguments.labels
    if (None in files) != (files == (None, None)) or (arguments.block is not None and None in files):
        raise ConfigError(
            "evaluate: --input, --labels and --block apply to files; give both --input and --labels, or none of these"
        )

    def work(experiment: Any, grid: ProcessGrid) -> None:
        from ..train import evaluate_checkpoint, evaluate_files
        from ..train.html_report import page_of_numbers

        samples: dict[str, Any] | None = None if arguments.report is None else {}
        if None in files:
            found = evaluate_checkpoint(experiment, arguments.checkpoint, grid, arguments.split, samples)
        else:
            found = evaluate_files(experiment, arguments.checkpoint, *files, grid, arguments.block, samples)
        with all_or_none(grid.world):
            if grid.rank == 0:
                emit(json.dumps(found))
                if arguments.report is not None:
                    of = {"checkpoint": arguments.checkpoint}
                    if arguments.input is not None:
                        of["images"] = arguments.input
                    write_text(Path(arguments.report), page_of_numbers(Path(arguments.file).stem, of, found, samples))

    find = partial(validated, arguments) if None in files else lambda world, ranks: loaded(arguments, world)
    return _on_ranks(arguments, find, work)


def _evaluate_module(arguments: argparse.Namespace) -> int:
    """Print the loss and the error of a module with weights of a file, over images and labels in files."""
    for name in ("follow", "every", "max_time", "output", "split"):
        if getattr(arguments, name) is not None:
            raise ConfigError(
                f"evaluate: --{name.replace('_', '-')} applies to experiments; leave it out with --weights"
            )
    if arguments.input is None or arguments.labels is None:
        raise ConfigError("evaluate: --weights needs images and labels; give --input X and --labels T")

    def work(trained: Any, grid: ProcessGrid) -> None:
        from ..train.html_report import page_of_numbers
        from ..train.inference import evaluate_module

        samples: dict[str, Any] | None = None if arguments.report is None else {}
        found = evaluate_module(trained, arguments.input, arguments.labels, grid, arguments.block, samples)
        with all_or_none(grid.world):
            if grid.rank == 0:
                emit(json.dumps(found))
                if arguments.report is not None:
                    of = {"checkpoint": arguments.weights, "images": arguments.input}
                    write_text(
                        Path(arguments.report), page_of_numbers(Path(arguments.weights).stem, of, found, samples)
                    )

    return _with_module(arguments, work)


def _follow(arguments: argparse.Namespace) -> int:
    for name in ("split", "input", "labels", "report", "block"):
        if getattr(arguments, name) is not None:
            raise ConfigError(f"evaluate: --{name} applies to a single checkpoint; leave it out, or give --checkpoint")
    arguments.watched = False  # it waits, perhaps for hours

    def work(experiment: Any, grid: ProcessGrid) -> None:
        from ..session import follow_checkpoints

        times = arguments.every or EVERY, arguments.max_time
        follow_checkpoints(experiment, arguments.follow, grid, arguments.output, *times)

    return _on_ranks(arguments, partial(validated, arguments), work)


def predict(arguments: argparse.Namespace) -> int:
    """Write the outputs for new images; the experiment's data need not be there."""
    with _unfinished_output_noted(Path(arguments.output)):
        return _predict_module(arguments) if arguments.weights is not None else _predict_experiment(arguments)


@contextmanager
def _unfinished_output_noted(path: Path) -> Iterator[None]:
    """Say, once, how a command that failed or was interrupted can go on from the blocks that are complete."""
    part, job = unfinished(path), detect(os.environ)
    journal = part.with_name(f"{part.name}.journal")

    def written() -> int | None:
        return journal.stat().st_mtime_ns if journal.exists() else None

    before = written()
    try:
        yield
    finally:
        first = LAUNCHED not in os.environ and (job is None or job.first)
        if first and written() not in (None, before):
            say(
                f"note: {part} keeps the completed blocks; repeat the command to continue, or give --overwrite to"
                " start over",
                sys.stderr,
            )


def _predict_experiment(arguments: argparse.Namespace) -> int:
    """Write the outputs of a checkpoint of an experiment."""
    _refuse_options_of_weights(arguments)
    if arguments.file is None or arguments.checkpoint is None:
        raise ConfigError("predict: give FILE.yaml and --checkpoint FILE, or --weights W and --factory FILE.py:NAME")

    def work(experiment: Any, grid: ProcessGrid) -> None:
        from ..train import predict

        files = arguments.checkpoint, arguments.input, arguments.output
        _tell_written(arguments, grid, predict(experiment, *files, grid, steps=arguments.steps, **_asked(arguments)))

    return _on_ranks(arguments, lambda world, ranks: loaded(arguments, world), work)


def _predict_module(arguments: argparse.Namespace) -> int:
    """Write the outputs of a module with weights of a file, which need no experiment."""

    if arguments.steps is not None:
        raise ConfigError("predict: --steps applies to networks trained on ClimateFiles; leave it out with --weights")

    def work(trained: Any, grid: ProcessGrid) -> None:
        from ..train.inference import predict_module

        shape = predict_module(trained, arguments.input, arguments.output, grid, **_asked(arguments))
        _tell_written(arguments, grid, shape)

    return _with_module(arguments, work)


def _refuse_options_of_weights(arguments: argparse.Namespace) -> None:
    command = arguments.words[0]
    for name in ("factory", *_OF_WEIGHTS):
        if getattr(arguments, name) is not None:
            raise ConfigError(f"{command}: --{name} requires --weights W; leave it out, or add --weights W")


def _with_module(arguments: argparse.Namespace, work: Callable[[Any, ProcessGrid], None]) -> int:
    """Work with the module of `--factory` and the weights of a file, here or on ranks that mpirun starts."""
    command = arguments.words[0]
    for name in ("file", "checkpoint"):
        if (given := getattr(arguments, name)) is not None:
            raise ConfigError(f"{command}: --weights needs no {given}; leave out one of them")
    if arguments.factory is None:
        raise ConfigError(f"{command}: --weights W contains no network; give --factory FILE.py:NAME, which returns one")
    memory = [word.removeprefix("memory=") for word in arguments.settings if word.startswith("memory=")]
    if len(memory) < len(arguments.settings) or arguments.modules:
        raise ConfigError(
            f"{command}: --set, --strategy and --import apply to experiments; leave them out with --weights"
        )

    def prepare(world: Transport, ranks: int) -> Any:
        from ..train.inference import TrainedModule

        given = {name: value for name in _OF_WEIGHTS if (value := getattr(arguments, name)) is not None}
        given |= {"memory": memory[-1]} if memory else {}
        with _preparing(arguments, world), all_or_none(world):
            factory = load_factory(arguments.factory, "--factory ")
            trained = TrainedModule(factory, arguments.weights, arguments.factory, **given)
            trained.check(arguments.input)
        return trained

    def do(world: Transport, trained: Any) -> int:
        grid = ProcessGrid(world)
        if arguments.watchdog is not None:
            arguments.watchdog.observe(grid)
        work(trained, grid)
        return 0

    return on_ranks(arguments, prepare, do)


def _preparing(arguments: argparse.Namespace, world: Transport) -> AbstractContextManager[object]:
    """Print after a few seconds that the command is preparing: to import PyTorch may take long."""
    from ..train.inference.progress import first_rank_progress

    return first_rank_progress(world.rank, sys.stderr if arguments.words[0] == "evaluate" else None)


def _asked(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in ("classes", "probabilities", "raw", "block", "overwrite")}


def _tell_written(arguments: argparse.Namespace, grid: ProcessGrid, shape: tuple[int, ...]) -> None:
    if grid.rank == 0:
        emit(f"written: {arguments.output}, {' x '.join(map(str, shape))}")


def _block(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "--block", type=options.positive, metavar="CELLS",
        help="process images in blocks of at most this size (default: only if they do not fit in memory)",
    )  # fmt: skip


def _checkpoint(one: argparse.ArgumentParser, required: bool = True) -> None:
    one.add_argument(
        "--checkpoint",
        type=options.path,
        metavar="FILE",
        required=required,
        help="checkpoint.h5 of a run on any number of ranks",
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

    def prepare(world: Transport, ranks: int) -> Any:
        with _preparing(arguments, world):
            return find(world, ranks)

    return on_ranks(arguments, prepare, do)
