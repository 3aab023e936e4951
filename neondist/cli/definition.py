"""Experiment from a model-definition file and training records, as given on the command line."""

from __future__ import annotations

import argparse
import ast
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import load_experiment
from ..data.records import Mode, RecordReader, RecordSamples, open_records, record_dataset
from ..data.records.arrays import DatasetSplitRecords
from ..data.records.base import UserRecords
from ..errors import ConfigError, DataError
from ..io.regular_file import open_regular
from ..launcher.restarts import MIN_KEPT_CHECKPOINTS
from ..launcher.workers import SERVERS_VARIABLE
from ..system.job import GENERATION_VARIABLE
from ..terminal.console import counted, say
from .experiment import import_module

if TYPE_CHECKING:
    from ..torch.training.definition import ModelDefinition


def parse_tiles(text: str) -> tuple[int, int]:
    """Parse ROWSxCOLUMNS, such as '2x1'."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})", text)
    if not match:
        raise argparse.ArgumentTypeError(f"'{text}' is not a division into tiles; expected ROWSxCOLUMNS, such as 2x1")
    return int(match[1]), int(match[2])


def parse_workers(text: str) -> int | tuple[int, int]:
    """Parse a number of workers, such as '4', or MIN:MAX, such as '1:4'."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})(?::([1-9][0-9]{0,5}))?", text)
    min_workers, max_workers = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= min_workers <= max_workers:
        raise argparse.ArgumentTypeError(
            f"'{text}' is not a number of workers; expected 1 or more, or MIN:MAX, such as 1:4, with MIN <= MAX"
        )
    return (min_workers, max_workers) if ":" in text else min_workers


DEFINABLE_NAMES = (
    "feed", "loss", "optimizer", "eval_metrics_fn", "callbacks", "custom_data_reader", "PredictionOutputsProcessor",
    "custom_model",
)  # fmt: skip
"""Objects of a model-definition file that options may rename."""


def is_definition_without_program(path: str) -> bool:
    """Return whether a file defines loss, optimizer and feed or dataset_fn, and no other statement uses its names.

    The file is parsed, not executed. Assignments of the module may use each other, but not its functions and classes.
    """
    try:
        with open_regular(path) as file:
            statements = ast.parse(file.read()).body
    except (SyntaxError, ValueError):  # reported when the file is run
        return False
    kinds = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef
    defined = {statement.name for statement in statements if isinstance(statement, kinds)}
    others = [statement for statement in statements if not isinstance(statement, kinds)]
    assigned = {node.id for node in _names(others) if isinstance(node.ctx, ast.Store)}
    assignments = [statement for statement in others if isinstance(statement, ast.Assign | ast.AnnAssign)]
    programs = [statement for statement in others if statement not in assignments]
    return (
        {"loss", "optimizer"} < defined
        and not defined.isdisjoint(("feed", "dataset_fn"))
        and defined.isdisjoint(node.id for node in _names(assignments))
        and not any(node.id in defined | assigned or node.id.startswith("__") for node in _names(programs))
    )


def _names(statements: Sequence[ast.AST]) -> list[ast.Name]:
    return [node for statement in statements for node in ast.walk(statement) if isinstance(node, ast.Name)]


def load_definition(path: str, names: Mapping[str, str] | None = None) -> ModelDefinition:
    """Return the definition in a file; ConfigError if it cannot be imported or is incomplete."""
    if not Path(path).is_file():
        raise ConfigError(f"{path}: no such file; give the path of a model-definition file")
    name = import_module(path, "")
    from ..torch.training.definition import ModelDefinition

    return ModelDefinition(sys.modules[name], path, names)


def open_record_source(source: str, mode: Mode) -> RecordReader:
    """Return the reader of a file, a table, or a data set given as YAML, such as '!MNIST {}'."""
    if source.startswith("!"):
        import neondist.train  # noqa: F401  registers the classes that a text may name

        return DatasetSplitRecords(source, load_experiment(source, text=source, top="Dataset"), mode.value)
    return open_records(source, mode.value)


def create_record_reader(definition: ModelDefinition, source: str, mode: Mode) -> RecordReader:
    """Return the reader of a source: the definition's custom reader, or the reader for this kind of source."""
    custom_reader = definition.custom_reader(source)
    return open_record_source(source, mode) if custom_reader is None else UserRecords(source, custom_reader)


def create_samples(
    definition: ModelDefinition, source: str, mode: Mode, skip_bad: bool, verbose: bool = True
) -> RecordSamples:
    """Return the samples that `definition.feed` returns for a source's records, without bad records if `skip_bad`."""
    reader = create_record_reader(definition, source, mode)
    bad = reader.find_bad_records() if skip_bad else []
    if bad and verbose:
        lines = [f"{reader.source}: {counted(len(bad), 'bad record')} skipped:", *(problem for _, problem in bad[:20])]
        say("\n  ".join(lines))
    return RecordSamples(reader, definition.feed_function(), mode, [number for number, _ in bad])


def create_experiment(
    definition: ModelDefinition,
    arguments: argparse.Namespace,
    training: str | None,
    validation: str | None,
    verbose: bool = True,
) -> Any:
    """Return the experiment that trains the model of a definition or, without training data, evaluates it."""
    from ..train import FitExperiment

    skip = arguments.skip_bad_records
    eval_data = None if validation is None else create_samples(definition, validation, Mode.EVALUATION, skip, verbose)
    if eval_data is not None and training is not None and verbose and not skip:
        for _, problem in eval_data.reader.find_bad_records():  # otherwise found only after the first epoch
            raise DataError(problem)
    train_data = eval_data if training is None else create_samples(definition, training, Mode.TRAINING, skip, verbose)
    assert train_data is not None
    is_supervised = arguments.restarts is not None or arguments.hosts_from is not None
    is_supervised = is_supervised or GENERATION_VARIABLE in os.environ
    replicas = arguments.num_workers if arguments.elastic is None else None  # None: as many as ranks allow
    (rows, cols), single_replica = arguments.tiles, SERVERS_VARIABLE in os.environ  # other workers are separate jobs
    return FitExperiment(
        record_dataset(train_data, eval_data),
        definition.create_model(arguments.seed, train_data.has_integer_features),
        batch_size=arguments.minibatch_size,
        epochs=arguments.num_epochs,
        dist_mode="halodatapar",
        grid={"replicas": 1 if single_replica else replicas, "rows": rows, "cols": cols},
        metrics=definition.metrics(),
        strategy=arguments.strategy,
        nonfinite=arguments.nonfinite,
        checkpoint={
            "every_steps": arguments.checkpoint_steps or None,
            "keep": MIN_KEPT_CHECKPOINTS if is_supervised else None,
        },
    )
