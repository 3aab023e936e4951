"""Predictions of a checkpoint's network for records, in their order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ...comm import ProcessGrid, all_or_none
from ...data.records import RecordSamples
from ...io.checkpoint import open_checkpoint
from ...models import TrainableModel
from ..inference_weights import load_inference_weights


def predict_records(
    model: TrainableModel, samples: RecordSamples, batch_size: int, checkpoint: Path, grid: ProcessGrid
) -> Iterator[np.ndarray]:
    """Yield the outputs (n, C, *spatial) batch by batch, whole on every rank. Collective.

    Raises
    ------
    UserError
        DataError if the checkpoint is missing, damaged or of another model; ConfigError if the feed function fails.
    """
    batch_size = max(grid.replicas, min(batch_size, len(samples)))
    with all_or_none(grid.world):
        shape = samples.features_and_labels(range(min(batch_size, len(samples))))[0].shape[1:]
        plan = model.plan(shape, grid.shape, batch_size)
        model.build(shape, batch_size, grid, plan)
    tile = grid.with_tiles(plan.overlapping_tiles).tile_box(shape[:-1]).slices if shape[:-1] else ()
    with open_checkpoint(checkpoint, grid.world) as file:
        load_inference_weights(file, model)
    for first in range(0, len(samples), batch_size):
        count = min(batch_size, len(samples) - first)
        lo, hi = grid.sample_range(count)
        with all_or_none(grid.world):
            features = samples.features_and_labels(range(first + lo, first + hi))[0][(slice(None), *tile)]
            x = np.ascontiguousarray(features, features.dtype if samples.has_integer_features else model.dtype)
        local_y = np.asarray(model.fprop(x, training=False, batch_size=count))
        extents = model.output_shape[:-1]
        cells = grid.partition(extents).box(grid.tile).slices if extents else ()
        y = np.empty((count, *model.output_shape), local_y.dtype)
        for place, values in grid.world.allgather(((slice(lo, hi), *cells), local_y)):
            y[place] = values
        yield np.ascontiguousarray(np.moveaxis(y, -1, 1))
