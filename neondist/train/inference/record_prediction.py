"""Predictions of a checkpoint's network for records, in their order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ...comm import ProcessGrid
from ...data.records import RecordSamples
from ...io.checkpoint import open_checkpoint
from ...models import TrainableModel
from ..inference_weights import load_inference_weights


def predict_records(
    model: TrainableModel, samples: RecordSamples, batch_size: int, checkpoint: Path
) -> Iterator[np.ndarray]:
    """Yield the outputs (n, C, *spatial) batch by batch, in this process.

    Raises
    ------
    UserError
        DataError if the checkpoint is missing, damaged or of another model; ConfigError if the feed function fails.
    """
    grid, batch_size = ProcessGrid.serial(), min(batch_size, len(samples))
    shape = samples.features_and_labels(range(batch_size))[0].shape[1:]
    model.build(shape, batch_size, grid, model.plan(shape, grid.shape, batch_size))
    with open_checkpoint(checkpoint, grid.world) as file:
        load_inference_weights(file, model)
    for first in range(0, len(samples), batch_size):
        record_numbers = range(first, min(first + batch_size, len(samples)))
        features = samples.features_and_labels(record_numbers)[0]
        x = np.ascontiguousarray(features, features.dtype if samples.has_integer_features else model.dtype)
        y = np.asarray(model.fprop(x, training=False, batch_size=len(record_numbers)))
        yield np.ascontiguousarray(np.moveaxis(y, -1, 1))
