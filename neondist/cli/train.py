"""`neondist train MODEL.py`, and evaluate, predict and check for model-definition files."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..comm import ProcessGrid, Transport, all_or_none
from ..data.records import Mode
from ..errors import ConfigError, UserError
from ..geometry.grid_shape import grid_shape
from ..io.files import atomic_replacement, convert_file_errors
from ..io.output import CHECKPOINT, WEIGHTS
from ..launcher.generations import run_generations
from ..launcher.members import needs_generations
from ..launcher.ranks import run_on_ranks
from ..launcher.workers import check_worker_options, open_job_fork_server, read_worker_spec, run_workers
from ..system.job import detect_job
from ..terminal.console import counted, emit
from . import options
from .definition import DEFINABLE_NAMES, create_experiment, create_samples, load_definition, parse_tiles, parse_workers
from .run import create_hooks, parse_duration_seconds, parse_resume_mode
from .worker_options import resolve_worker_options

STRATEGIES = ("Local", "AllreduceStrategy", "ParameterServerStrategy")
MODEL_COMMANDS = {"evaluate": "evaluate-model", "predict": "predict-model", "check": "check-model"}
"""Commands that accept experiments or model-definition files, and the parser names for the latter."""


def add_parser(commands: Any) -> None:
    """Register the commands."""
    cmd = commands.add_parser("train", help="train from a model-definition file", allow_abbrev=False)
    _add_file_arguments(cmd)
    cmd.add_argument("--training-data", required=True, metavar="F", help=_DATA_HELP)
    cmd.add_argument("--validation-data", metavar="F", help="records for validation after each epoch")
    _add_model_options(cmd)
    options.add_count_option(cmd, "--num-epochs", "N", "number of epochs", 1)
    cmd.add_argument(
        "--num-workers", type=parse_workers, default=1, metavar="N|MIN:MAX",
        help="number of replicas (default 1); MIN:MAX varies with the hosts or, with servers, with the slots that"
             " other jobs leave free",
    )  # fmt: skip
    cmd.add_argument(
        "--hosts-from", dest="slots_from", type=options.parse_path, metavar="FILE|SCRIPT",
        help="hosts as HOST:SLOTS lines, with MIN:MAX workers reread regularly (default: this machine, as"
             " localhost:CORES)",
    )  # fmt: skip
    cmd.add_argument(
        "--wait", dest="slots_wait", type=parse_duration_seconds, metavar="TIME",
        help="with --hosts-from or servers: give up after waiting this long for slots for MIN workers (default 10m)",
    )  # fmt: skip
    cmd.add_argument(
        "--num-ps", type=options.nonnegative_int, default=0, metavar="N",
        help="number of parameter servers (default: one per worker, at most 4; none if the workers own the parameters)",
    )  # fmt: skip
    _add_tiles_option(cmd)
    cmd.add_argument(
        "--distribution-strategy", choices=STRATEGIES, default="Local",
        help="one process, allreduce among the workers, or parameter servers (default Local)",
    )  # fmt: skip
    cmd.add_argument(
        "--use-async", action="store_true", help="apply each gradient immediately, without synchronisation"
    )
    cmd.add_argument(
        "--grads-to-wait", type=options.positive_int, metavar="N",
        help="number of gradients that servers average per update, without --use-async; at most the number of workers"
        " (default 1; with MIN:MAX workers MAX)",
    )  # fmt: skip
    staleness = "maximum staleness of gradients in updates, without --use-async"
    options.add_count_option(cmd, "--sync-version-tolerance", "N", staleness, 0, lowest=0)
    cmd.add_argument(
        "--lr-staleness-modulation", action="store_true",
        help="divide the learning rate by the staleness of the gradient, with --use-async",
    )  # fmt: skip
    options.add_count_option(cmd, "--num-minibatches-per-task", "N", "number of minibatches in a task", 8)
    cmd.add_argument(
        "--nonfinite", choices=("stop", "skip"), default="stop",
        help="stop at a step with a NaN or infinite loss or gradient (default), or skip it",
    )  # fmt: skip
    cmd.add_argument(
        "--evaluation-steps", type=options.nonnegative_int, default=0, metavar="N",
        help="also validate every N steps (default 0: only after each epoch)",
    )  # fmt: skip
    cmd.add_argument(
        "--checkpoint-steps", type=options.nonnegative_int, default=0, metavar="N",
        help="write a checkpoint every N steps (default 0: every epoch; servers as often as 2 %% of the time allows)",
    )  # fmt: skip
    cmd.add_argument(
        "--checkpoint-dir", type=options.parse_path, metavar="D", help="folder of the run (default --output)"
    )
    cmd.add_argument(
        "--output", type=options.parse_path, metavar="D",
        help="folder for checkpoint.h5 and weights.safetensors (default runs/NAME OF THE FILE)",
    )  # fmt: skip
    cmd.add_argument(
        "--resume", nargs="?", default=False, const=True, type=parse_resume_mode, metavar="auto",
        help="resume from the checkpoint in the folder of the run; with auto, start from scratch if there is none",
    )  # fmt: skip
    cmd.add_argument("--overwrite", action="store_true", help="replace an existing run in the folder")
    cmd.add_argument(
        "--restarts", type=options.positive_int, metavar="K",
        help="with AllreduceStrategy: if a rank is killed, restart from the newest checkpoint, at most K times (default"
             " 10 with MIN:MAX workers, else 0)",
    )  # fmt: skip
    options.add_rank_options(cmd, argparse.SUPPRESS)  # hidden: -n is passed to a worker with several tiles
    cmd.set_defaults(
        command=train, stops=True, watched=True, strategy=None, virtual=None, time_limit=None, debug_halo=False
    )

    cmd = _add_model_command(commands, "evaluate")
    cmd.add_argument("--validation-data", required=True, metavar="F", help=_DATA_HELP)
    _add_checkpoint_and_grid_options(cmd)
    cmd.set_defaults(command=evaluate)

    cmd = _add_model_command(commands, "predict")
    cmd.add_argument("--prediction-data", required=True, metavar="F", help=_DATA_HELP)
    _add_checkpoint_and_grid_options(cmd)
    cmd.add_argument(
        "--output", type=options.parse_path, metavar="Y.npy", help="also write the outputs of all records here"
    )
    cmd.add_argument("--overwrite", action="store_true", help="replace an existing output")
    cmd.set_defaults(command=predict)

    cmd = _add_model_command(commands, "check")
    cmd.add_argument("--training-data", metavar="F", help="records to feed: also check shapes, and print the plan")
    cmd.set_defaults(command=check)


def route_to_model_command(words: list[str]) -> list[str]:
    """Return the arguments, with the command for model-definition files if they name such a file."""
    if words and words[0] in MODEL_COMMANDS and any(word.endswith(".py") for word in _positional_arguments(words[1:])):
        return [MODEL_COMMANDS[words[0]], *words[1:]]
    return words


def train(arguments: argparse.Namespace) -> int:
    """Train in this process, or on several replicas and tiles."""
    resolve_worker_options(arguments)

    def load_and_validate(world: Transport, ranks: int) -> tuple[Any, Any]:
        from ..io.output import prepare_run_folder as prepare_folder

        with all_or_none(world):
            definition = load_definition(arguments.file, _custom_names(arguments))
            experiment = create_experiment(
                definition, arguments, arguments.training_data, arguments.validation_data, verbose=world.rank == 0
            )
            if arguments.sync_policy is not None:
                experiment.use_servers()
            experiment.validate(ranks)
            _check_loss(definition, experiment, ranks)
            check_worker_options(arguments, experiment, ranks)
        prepare_folder(world, arguments.folder, arguments.resume, arguments.overwrite)
        return definition, experiment

    def work(world: Transport, prepared: tuple[Any, Any]) -> int:
        from ..train import Hook

        definition, experiment = prepared
        hooks = [*_task_and_evaluation_hooks(arguments, experiment), *definition.callbacks(Hook)]
        result = experiment.run(
            experiment.open_grid(world),
            output=arguments.folder,
            resume=arguments.resume,
            overwrite=arguments.overwrite,
            hooks=[*create_hooks(arguments), *hooks],
            worker=read_worker_spec(os.environ) if experiment.server_strategy is not None else None,
        )
        if world.rank == 0:
            options.print_written([*result.files, *_copy_results(arguments)])
        return result.stop.exit_code if result.stop else 0

    def run_elsewhere(prepared: tuple[Any, Any]) -> int | None:
        if needs_generations(arguments):
            return run_generations(arguments, prepared[1])
        return run_workers(arguments, prepared[1])

    with open_job_fork_server(arguments) as arguments.fork_server:
        return run_on_ranks(arguments, load_and_validate, work, run_elsewhere)


def evaluate(arguments: argparse.Namespace) -> int:
    """Print the loss and the metrics of a checkpoint as one line of JSON."""

    def load_and_validate(world: Transport, ranks: int) -> Any:
        with all_or_none(world):
            definition = load_definition(arguments.file, _custom_names(arguments))
            verbose = world.rank == 0
            experiment = create_experiment(definition, arguments, None, arguments.validation_data, verbose)
            experiment.validate(ranks)
        return experiment

    def work(world: Transport, experiment: Any) -> int:
        from ..train import evaluate_checkpoint

        grid = experiment.open_grid(world)
        results = evaluate_checkpoint(experiment, _checkpoint_file(arguments.checkpoint), grid, "validation")
        if world.rank == 0:
            emit(json.dumps(results))
        return 0

    _resolve_grid_options(arguments)
    return run_on_ranks(arguments, load_and_validate, work)


def predict(arguments: argparse.Namespace) -> int:
    """Pass the outputs for all records, in order, to PredictionOutputsProcessor, or write them to --output, or both."""

    def load_and_validate(world: Transport, ranks: int) -> tuple[Any, Any]:
        with all_or_none(world):
            definition = load_definition(arguments.file, _custom_names(arguments))
            if arguments.output is not None and not arguments.overwrite and Path(arguments.output).exists():
                raise ConfigError(f"{arguments.output}: exists; give another --output, or --overwrite to replace it")
            skip, verbose = arguments.skip_bad_records, world.rank == 0
            samples = create_samples(definition, arguments.prediction_data, Mode.PREDICTION, skip, verbose)
            grid_shape(ranks, arguments.num_workers, *arguments.tiles)
        return definition, samples

    def work(world: Transport, prepared: tuple[Any, Any]) -> int:
        from ..train.inference.record_prediction import predict_records

        (definition, samples), processor, file = prepared, None, None
        with all_or_none(world):
            if world.rank == 0:  # the processor may open files
                processor = definition.create_processor()
                if processor is None and arguments.output is None:
                    problem = "has no PredictionOutputsProcessor; define one, or give --output Y.npy"
                    raise ConfigError(f"{arguments.file}: {problem}")
            model = definition.create_model(arguments.seed, samples.has_integer_features)
        grid = ProcessGrid(world, arguments.num_workers, *arguments.tiles)
        checkpoint = _checkpoint_file(arguments.checkpoint)
        with ExitStack() as output:
            with all_or_none(world, root_only=True):
                if arguments.output is not None and world.rank == 0:
                    file = output.enter_context(atomic_replacement(Path(arguments.output)))
            for outputs in predict_records(model, samples, arguments.minibatch_size, checkpoint, grid):
                with all_or_none(world, root_only=True):
                    if processor is not None:
                        _process_outputs(arguments.file, processor, outputs)
                    if file is not None:
                        _append_outputs(file, arguments.output, outputs, len(samples))
            with all_or_none(world, root_only=True):
                output.close()
        if world.rank == 0:
            emit(f"predicted: {counted(len(samples), 'record')}")
            options.print_written([arguments.output])
        return 0

    _resolve_grid_options(arguments)
    return run_on_ranks(arguments, load_and_validate, work)


def check(arguments: argparse.Namespace) -> int:
    """Validate the file; with records, print the plan of the model."""
    definition = load_definition(arguments.file, _custom_names(arguments))
    definition.metrics()
    definition.create_model(arguments.seed)
    if arguments.training_data is None:
        emit(
            f"{arguments.file}: defines everything that training needs; give --training-data to check feed and the"
            " model's plan"
        )
        return 0
    from ..terminal.rich_console import Console
    from ..train import describe_experiment

    experiment = create_experiment(definition, arguments, arguments.training_data, None)
    experiment.validate(1)
    _check_loss(definition, experiment, 1)
    Console(soft_wrap=True).print(describe_experiment(experiment, 1))
    return 0


_OPTIONS_WITHOUT_VALUES = "--force", "--skip-bad-records", "--classes", "--probabilities", "--raw", "--overwrite"
_DATA_HELP = "CSV, RecordIO, a folder of those, FILE.h5[:ARRAY], a table as SQLAlchemy's URL#TABLE, or '!MNIST {}'"


def _positional_arguments(words: list[str]) -> list[str]:
    """Return the arguments that are neither options nor the values of options."""
    preceding = ["", *words]
    is_value = [word.startswith("-") and "=" not in word and word not in _OPTIONS_WITHOUT_VALUES for word in preceding]
    return [word for word, value in zip(words, is_value, strict=False) if not (value or word.startswith("-"))]


def _check_loss(definition: Any, experiment: Any, ranks: int) -> None:
    from ..train.validate import experiment_grid_shape

    grid = experiment_grid_shape(experiment, ranks)
    plan = experiment.model.plan(experiment.dataset.sample_shape, grid, experiment.batch_size)
    definition.check_loss(plan.output_shape, *experiment.dataset.read_first_samples())


def _task_and_evaluation_hooks(arguments: argparse.Namespace, experiment: Any) -> list[Any]:
    from ..train.callbacks.periodic_evaluation import PeriodicEvaluation
    from ..train.callbacks.task_queue_hook import TaskQueueHook

    hooks: list[Any] = []
    if arguments.distribution_strategy == "Local":
        records_per_task = arguments.minibatch_size * arguments.num_minibatches_per_task
        hooks.append(TaskQueueHook(arguments.folder, records_per_task, arguments.training_data))
    if arguments.evaluation_steps:
        hooks.append(PeriodicEvaluation(arguments.folder, arguments.evaluation_steps, experiment.metrics))
    return hooks


def _copy_results(arguments: argparse.Namespace) -> list[Path]:
    """Copy the results to --output, if that is not the folder of the run."""
    if arguments.output is None or Path(arguments.output) == arguments.folder:
        return []
    target = Path(arguments.output)
    target.mkdir(parents=True, exist_ok=True)
    written = []
    for name in (CHECKPOINT, WEIGHTS):
        if (arguments.folder / name).is_file():
            written.append(Path(shutil.copyfile(arguments.folder / name, target / name)))
    return written


def _checkpoint_file(checkpoint: str) -> Path:
    path = Path(checkpoint)
    return path / CHECKPOINT if path.is_dir() else path


def _process_outputs(file: str, processor: Any, outputs: np.ndarray) -> None:
    try:
        processor.process(outputs, 0)
    except UserError:
        raise
    except Exception as error:
        problem = f"PredictionOutputsProcessor.process failed: {type(error).__name__}: {error}"
        raise ConfigError(f"{file}: {problem}") from error


def _append_outputs(file: BinaryIO, path: str, outputs: np.ndarray, num_records: int) -> None:
    """Append the outputs of a batch to a .npy file of `num_records` outputs; the first batch follows the header."""
    with convert_file_errors(Path(path)):
        if not file.tell():
            shape = num_records, *outputs.shape[1:]
            header = {"descr": outputs.dtype.str, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
        file.write(outputs.tobytes())


def _add_model_command(commands: Any, command: str) -> argparse.ArgumentParser:
    cmd: argparse.ArgumentParser = commands.add_parser(
        MODEL_COMMANDS[command], prog=f"neondist {command}", allow_abbrev=False
    )
    _add_file_arguments(cmd)
    _add_model_options(cmd)
    cmd.set_defaults(num_workers=1, tiles=(1, 1), num_epochs=1, checkpoint_steps=0, strategy=None)
    return cmd


def _add_file_arguments(cmd: argparse.ArgumentParser) -> None:
    cmd.add_argument("file", type=options.parse_path, metavar="MODEL.py", help="the model-definition file")
    group = cmd.add_argument_group("names of objects in the file")
    option_names = {"custom_model": "model-def", "PredictionOutputsProcessor": "prediction-outputs-processor"}
    for name in DEFINABLE_NAMES:
        option_name = option_names.get(name, name.replace("_", "-"))
        group.add_argument(
            f"--{option_name}", dest=f"name_{name}", metavar="NAME", help=f"name of the object to use as {name}"
        )


def _custom_names(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the custom names by object; FILE.NAME, as in ElasticDL, means NAME."""
    names = {name: getattr(arguments, f"name_{name}") for name in DEFINABLE_NAMES}
    return {name: own.rpartition(".")[2] for name, own in names.items() if own is not None}


def _add_model_options(cmd: argparse.ArgumentParser) -> None:
    options.add_count_option(cmd, "--minibatch-size", "N", "batch size, with parameter servers per worker", 64)
    options.add_count_option(cmd, "--seed", "N", "random seed of weights and data order", 0, lowest=0)
    cmd.add_argument("--skip-bad-records", action="store_true", help="skip unreadable records and list them")


def _add_tiles_option(cmd: argparse.ArgumentParser) -> None:
    cmd.add_argument(
        "--tiles", type=parse_tiles, default=(1, 1), metavar="RxC",
        help="tiles of an image in each replica (default 1x1)",
    )  # fmt: skip


def _add_checkpoint_and_grid_options(cmd: argparse.ArgumentParser) -> None:
    cmd.add_argument(
        "--checkpoint", "--checkpoint-dir", type=options.parse_path, required=True, metavar="FILE|D",
        help="checkpoint.h5 of a run, or its folder",
    )  # fmt: skip
    cmd.add_argument(
        "--num-workers", type=options.positive_int, default=None, metavar="N",
        help="number of replicas (default: the ranks divided by the tiles)",
    )  # fmt: skip
    _add_tiles_option(cmd)
    options.add_rank_options(cmd)
    cmd.set_defaults(watched=True)


def _resolve_grid_options(arguments: argparse.Namespace) -> None:
    """Set `num_workers` and `ranks` where they are not given: the ranks are those of all tiles of all replicas."""
    tiles, job = prod(arguments.tiles), detect_job(os.environ)
    if arguments.num_workers is None:
        ranks = arguments.ranks or (1 if job is None else job.size)
        arguments.num_workers = max(1, ranks // tiles)
    if arguments.ranks is None and job is None and arguments.num_workers * tiles > 1:
        arguments.ranks = arguments.num_workers * tiles
