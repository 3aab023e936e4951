"""Evaluation of a checkpoint on the experiment's data set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from ..comm import ProcessGrid, all_or_none
from ..data import Dataset
from ..errors import ConfigError, DataError
from ..io.checkpoint import open_checkpoint
from ..io.checkpoint.read import CheckpointReader
from ..models import TrainableModel
from ..registry.arguments import check_value
from .callbacks.worst_samples import find_worst_samples
from .checkpoint_field_metadata import restore_dataset_normalisation
from .consistency import check_same_data_on_ranks, check_same_lines_on_ranks, format_settings_to_compare
from .experiment import FitExperiment
from .inference_weights import load_inference_weights
from .loop import evaluate
from .state import format_evaluation_results
from .validate import validate_experiment

MAX_PICTURE_EXTENT = 256
"""Largest height and width of pictures in a report."""


def evaluate_checkpoint(
    experiment: FitExperiment,
    checkpoint: str | Path,
    grid: ProcessGrid | None = None,
    split: str | None = None,
    pictures: dict[str, np.ndarray] | None = None,
) -> dict[str, Any]:
    """Return the cost and the metrics of a checkpoint's weights over a split of the experiment's data. Collective.

    Parameters
    ----------
    experiment : FitExperiment
        The experiment that wrote the checkpoint; its optimiser and number of epochs are ignored.
    checkpoint : path
        Checkpoint, written on any number of ranks.
    grid : ProcessGrid, optional
        Default: `experiment.open_grid()`.
    split : {'test', 'validation', 'train'}, optional
        Default: the first of test, validation and train that the data set has.
    pictures : dict, optional
        Filled with small pictures of the samples with the largest losses, as `find_worst_samples` returns them.

    Returns
    -------
    dict
        'split', 'samples', 'loss' and the metrics by name ('error' is the misclassification rate), None for values that
        are not finite or do not apply to the targets; equal on every rank.

    Raises
    ------
    UserError
        As in `FitExperiment.validate`; DataError if the checkpoint is missing, damaged or of another model.
    """
    check_value("split", split, Literal["train", "validation", "test"] | None)
    settings = {"the checkpoint": checkpoint, "pictures": pictures is not None}
    with open_model_and_dataset(experiment, grid, split, settings) as (model, dataset):
        if split is None:
            split = next(name for name in ("test", "validation", "train") if name in dataset.splits)
        with open_checkpoint(Path(checkpoint), model.grid.world) as file:
            load_weights_and_normalisation(file, model, dataset)
        evaluated_split = dataset.splits[split]
        results = evaluate(model, evaluated_split, experiment.batch_size, experiment.metrics)
        if pictures is not None:
            pictures |= find_worst_samples(model, evaluated_split, experiment.batch_size, MAX_PICTURE_EXTENT)
    return {"split": split, **format_evaluation_results(len(evaluated_split), results)}


def load_weights_and_normalisation(file: CheckpointReader, model: TrainableModel, dataset: Dataset) -> None:
    """Load a checkpoint's weights into a model, and its normalisation of fields into an open data set. Collective."""
    load_inference_weights(file, model)
    with all_or_none(model.grid.world):
        try:
            restore_dataset_normalisation(file.contents.texts, dataset)
        except ValueError as problem:
            raise DataError(f"{file.contents.path}: {problem}") from None


@contextmanager
def open_model_and_dataset(
    experiment: FitExperiment,
    grid: ProcessGrid | None = None,
    split: str | None = None,
    settings_to_compare: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[tuple[TrainableModel, Dataset]]:
    """Open an experiment's data and build its model without loading weights. Collective. Raises the errors of `run`.

    Parameters
    ----------
    settings_to_compare : dict of str to object
        Other arguments that must be equal on all ranks.
    """
    grid = experiment.open_grid() if grid is None else grid
    model, dataset = experiment.model, experiment.dataset
    grid.check("evaluate", {"split": split, **settings_to_compare})
    with all_or_none(grid.world):
        plan = validate_experiment(experiment, grid.size, grid.shape)
        lines = format_settings_to_compare(experiment, plan)
    check_same_lines_on_ranks(grid.world, lines)
    dataset.open(grid.with_tiles(plan.overlapping_tiles), checked=True)
    with closing(dataset):
        check_same_data_on_ranks(grid, dataset)
        with all_or_none(grid.world):
            if split is not None and split not in dataset.splits:
                raise ConfigError(f"split: the data set has no {split} split; choose from {', '.join(dataset.splits)}")
            model.build(dataset.sample_shape, experiment.batch_size, grid, plan)
            model.restrict_cost_to_local_cells(dataset.fields)
        yield model, dataset
