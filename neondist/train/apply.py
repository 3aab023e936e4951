"""A trained model at work: predictions for new images, and its cost and metrics on the data set."""

from __future__ import annotations

import sys
from contextlib import closing
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np

from ..comm import ProcessGrid, all_or_none
from ..data.base import SPLITS, normalised
from ..data.predictions import Predictions
from ..data.sources import Source, open_source
from ..errors import ConfigError, DataError
from ..geometry import Box
from ..geometry import split as share
from ..io.checkpoint import Piece, collect, opened, take
from ..io.checkpoint.texts import of_kind, plain_json, whole
from ..metrics import Misclassification
from ..models import Whole
from ..namespace import to_host
from ..registry.ranges import choice
from .consistency import check_consistency, check_data_consistency, outline
from .experiment import FitExperiment
from .loop import evaluate
from .validate import grid_shape_of, validate


def evaluate_checkpoint(
    experiment: FitExperiment, checkpoint: str | Path, grid: ProcessGrid | None = None, split: str = "test"
) -> dict[str, Any]:
    """Return the cost and the metrics of a checkpoint's weights over a split of the experiment's data; collective.

    Parameters
    ----------
    experiment : FitExperiment
        The one that wrote the checkpoint; its optimiser and its number of epochs do not matter.
    checkpoint : path
        Written by any number of ranks.
    grid : ProcessGrid, optional
        Default `experiment.open_grid()`.
    split : {'test', 'validation', 'train'}

    Returns
    -------
    dict
        'samples', 'loss' and the metrics by their names ('error' is the misclassification), None where a metric does
        not suit the targets; equal on every rank.

    Raises
    ------
    UserError
        As `FitExperiment.validate`; DataError if the checkpoint is missing, damaged or of another model.
    """
    choice("split", split, SPLITS)
    grid = experiment.open_grid() if grid is None else grid
    model, dataset = experiment.model, experiment.dataset
    with all_or_none(grid.world):
        plan = validate(experiment, grid.size, grid.shape)
        lines = outline(experiment, plan)
    check_consistency(grid.world, lines)
    dataset.open(grid.reading(plan.wide_tiles), checked=True)
    with closing(dataset):
        check_data_consistency(grid, dataset)
        with all_or_none(grid.world):
            if split not in dataset.splits:
                raise ConfigError(f"split: the data set has no {split} split; choose from {', '.join(dataset.splits)}")
            model.build(dataset.sample_shape, experiment.batch_size, grid, plan)
        with opened(Path(checkpoint), grid.world) as file:
            take(file, model.kept_arrays()["model"], strict=True)
        samples = dataset.splits[split]
        found = evaluate(model, samples, experiment.batch_size, experiment.metrics)
    loss = found.pop("loss")
    told = {name: None if isnan(value) else value for name, value in found.items()}
    return {"samples": len(samples), "loss": loss, "error": told.pop(Misclassification.name, None), **told}


def predict(
    experiment: FitExperiment,
    checkpoint: str | Path,
    source: str | Path,
    target: str | Path,
    grid: ProcessGrid | None = None,
    classes: bool = False,
) -> tuple[int, ...]:
    """Write the outputs of a checkpoint's weights for new images; return their whole shape; collective.

    Raw values are treated as the training images were: the checkpoint knows how they were normalised, so the data set
    need not be there. Each rank reads its tile of the images; outputs come to rank 0 in blocks, so that no rank holds
    whole maps. Images may have another size than those of training, if the weights fit.

    Parameters
    ----------
    experiment : FitExperiment
        The one that wrote the checkpoint.
    checkpoint : path
        Written by any number of ranks.
    source : path
        Images (N, *spatial, C): .npy; .h5 (its data set 'images' or its only one, or FILE.h5:NAME); an image file, or
        a folder of images of one size.
    target : path
        .npy, or .h5 (data set 'predictions').
    grid : ProcessGrid, optional
        Default `experiment.open_grid()`.
    classes : bool
        Write the number of the largest output instead of all outputs.

    Raises
    ------
    UserError
        On every rank: DataError for a file that cannot be read or does not fit, OutputError if nothing can be written.
    """
    grid = experiment.open_grid() if grid is None else grid
    model, world, batch = experiment.model, grid.world, experiment.batch_size
    with all_or_none(world):
        grid_shape_of(experiment, grid.size)
    with opened(Path(checkpoint), world) as file:
        factor, offset, sample_shape = _images(Path(checkpoint), file.facts.texts)
        with all_or_none(world):
            images = open_source(source, sample_shape)
        with all_or_none(world):
            model.build(input_shape=images.shape[1:], batch_size=batch, grid=grid)
        take(file, model.kept_arrays()["model"], strict=True)
    shape = (images.shape[0], *model.output_shape[: len(model.output_shape) - classes])
    dtype = np.min_scalar_type(model.output_shape[-1] - 1) if classes else model.dtype
    with closing(images):
        sink = Predictions(Path(target), shape, dtype, world)
        try:
            for first in range(0, len(images), batch):
                samples = range(first, min(first + batch, len(images)))
                with all_or_none(world):
                    x = _tiles(images, samples, model)
                y = model.fprop(normalised(x, factor, offset, model.dtype), training=False, batch_size=len(samples))
                for _, place, values in collect(world, [_piece(model, y, len(samples), classes)]):
                    sink.put((slice(first + place[0].start, first + place[0].stop), *place[1:]), values)
            sink.close()
        finally:
            sink.discard()
    return shape


def _images(path: Path, texts: dict[str, str]) -> tuple[list[float], list[float], tuple[int, ...]]:
    """Return how the images were normalised, and the shape of one; the same on every rank."""
    try:
        facts = plain_json(texts["images"], dict)
        shape = tuple(whole("'shape'", n, 1) for n in of_kind("'shape'", facts["shape"], list))
        return _channels(facts, "factor", shape), _channels(facts, "offset", shape), shape
    except (KeyError, ValueError) as problem:
        raise DataError(f"{path}: does not say what its images were ({problem}); name another file") from None


def _channels(facts: dict[str, Any], name: str, shape: tuple[int, ...]) -> list[float]:
    """Return the finite numbers of one name: one, or one for each channel."""
    numbers = of_kind(f"'{name}'", facts[name], list)
    if not all(type(n) in (int, float) and abs(n) <= sys.float_info.max for n in numbers):
        raise ValueError(f"'{name}' are no numbers")
    if len(numbers) not in (1, *shape[-1:]):
        raise ValueError(f"'{name}' has {len(numbers)} numbers")
    return numbers


def _tiles(images: Source, samples: range, model: Whole) -> np.ndarray:
    """Return this rank's tile of its replica's share of these samples, raw."""
    lo, hi = model.grid.sample_range(len(samples))
    return images.read(samples[lo:hi], model.input.own.slices)


def _piece(model: Whole, y: Any, batch: int, classes: bool) -> Piece:
    """Return this rank's part of a batch's outputs, which is cut into samples and tiles."""
    grid, (*extent, channels), y = model.grid, model.output_shape, to_host(y)
    last, boxes = () if classes else (channels,), []
    for rank in range(grid.size):
        replica, tile = divmod(rank, grid.shape.tiles)
        (lo, hi), cells = share(batch, grid.replicas, replica), grid.partition(extent).box(tile)
        boxes.append(Box((lo, *cells.lo, *(0 for _ in last)), (hi, *cells.hi, *last)))
    if classes:
        y = y.argmax(axis=-1).astype(np.min_scalar_type(channels - 1))
    return Piece("predictions", (batch, *extent, *last), y, boxes)
