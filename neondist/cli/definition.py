"""From the words of a command to an experiment: a model-definition file, and the records that it is trained on."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import load_experiment
from ..data.records import Mode, RecordReader, Samples, open_records, record_dataset
from ..data.records.arrays import SplitRecords
from ..data.records.base import Users
from ..errors import ConfigError
from ..launcher.workers import SERVERS
from ..terminal.console import say
from .experiment import import_module

if TYPE_CHECKING:
    from ..torch.definition import ModelDefinition


def tiles(text: str) -> tuple[int, int]:
    """Read '2x1'."""
    found = re.fullmatch(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})", text)
    if not found:
        raise argparse.ArgumentTypeError(f"'{text}' is not a division into tiles; expected ROWSxCOLUMNS, such as 2x1")
    return int(found[1]), int(found[2])


def workers(text: str) -> int | tuple[int, int]:
    """Read a number of workers, '4', or its bounds, '1:4'."""
    found = re.fullmatch(r"([1-9][0-9]{0,5})(?::([1-9][0-9]{0,5}))?", text)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= low <= high:
        raise argparse.ArgumentTypeError(
            f"'{text}' is not a number of workers; expected 1 or more, or MIN:MAX, such as 1:4, with MIN <= MAX"
        )
    return (low, high) if ":" in text else low


NAMES = (
    "feed", "loss", "optimizer", "eval_metrics_fn", "callbacks", "custom_data_reader", "PredictionOutputsProcessor",
    "custom_model",
)  # fmt: skip
"""Those that a file may have under other names."""


def load_definition(path: str, names: Mapping[str, str] | None = None) -> ModelDefinition:
    """Return the definition of a file; ConfigError if the file cannot be imported, or lacks something."""
    if not Path(path).is_file():
        raise ConfigError(f"{path}: no such file; give the path of a model-definition file")
    name = import_module(path, "")
    from ..torch.definition import ModelDefinition

    return ModelDefinition(sys.modules[name], path, names)


def open_source(source: str, mode: Mode) -> RecordReader:
    """Return the reader of a file or a table, or of a data set as YAML names it, such as '!MNIST {}'."""
    if source.startswith("!"):
        import neondist.train  # noqa: F401  registers the classes that a text may name

        return SplitRecords(source, load_experiment(source, text=source, top="Dataset"), mode.value)
    return open_records(source, mode.value)


def reader_of(definition: ModelDefinition, source: str, mode: Mode) -> RecordReader:
    """Return the reader of a source: the user's own, or that of the source's kind."""
    own = definition.custom_reader(source)
    return open_source(source, mode) if own is None else Users(source, own)


def samples_of(definition: ModelDefinition, source: str, mode: Mode, skip_bad: bool, speaks: bool = True) -> Samples:
    """Return the samples that feed makes of a source's records, without bad ones if `skip_bad`."""
    reader = reader_of(definition, source, mode)
    bad = reader.find_bad() if skip_bad else []
    if bad and speaks:
        say("\n  ".join([f"{reader.name}: {len(bad)} bad records are skipped:", *(what for _, what in bad[:20])]))
    return Samples(reader, definition.feed(), mode, [number for number, _ in bad])


def experiment_of(
    definition: ModelDefinition,
    arguments: argparse.Namespace,
    training: str | None,
    validation: str | None,
    speaks: bool = True,
) -> Any:
    """Return the experiment that trains the model of a definition, or, without training data, judges it."""
    from ..train import FitExperiment

    skip = arguments.skip_bad_records
    judged = None if validation is None else samples_of(definition, validation, Mode.EVALUATION, skip, speaks)
    trained = judged if training is None else samples_of(definition, training, Mode.TRAINING, skip, speaks)
    assert trained is not None
    (rows, cols), alone = arguments.tiles, SERVERS in os.environ  # other workers are jobs of their own
    return FitExperiment(
        record_dataset(trained, judged),
        definition.model(arguments.seed),
        batch_size=arguments.minibatch_size,
        epochs=arguments.num_epochs,
        grid={"replicas": 1 if alone else arguments.num_workers, "rows": rows, "cols": cols},
        metrics=definition.metrics(),
        strategy=arguments.strategy,
        checkpoint={"every_steps": arguments.checkpoint_steps} if arguments.checkpoint_steps else None,
    )
