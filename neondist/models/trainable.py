"""What the training loop asks of what it trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ..comm import ProcessGrid
from ..halo import GlobalArray
from ..optim import Optimizer
from ..parallel import GradientSync, ParameterShard
from .model import Model


class Trainable(Protocol):
    """A model, or a stage of its pretraining.

    Attributes
    ----------
    output, output_shape
        Where `cost` counts what `fprop` returns; the shape is global, without the batch.
    uncounted : int
        How many steps the optimiser does not count.
    num_initial_epochs : int
        Epochs after which the optimiser begins anew.
    stages : sequence
        A model's stages, or the stage alone.
    """

    grid: ProcessGrid
    dtype: np.dtype
    seed: int
    optimizer: Optimizer
    cost: Any
    output: GlobalArray
    output_shape: tuple[int, ...]
    accumulate: int
    step: int
    uncounted: int
    learning_rate_scale: float
    num_initial_epochs: int
    stages: Sequence[Any]
    sync: GradientSync

    @property
    def whole(self) -> Model:
        """The model itself, or the one that the stage belongs to."""

    def begin_epoch(self, epoch: int, seen: int = 0) -> None:
        """Take note that an epoch begins or, if samples of it have been `seen`, goes on; `epoch` counts from 0."""

    def train_batch(self, x: Any, targets: Any, batch_size: int | None = None) -> float:
        """Run one step, and return the mean cost of a sample of the whole batch; NaN if it was skipped."""

    def fprop(self, x: Any, training: bool = True, batch_size: int | None = None) -> Any:
        """Return what `cost` and metrics take, for this rank's tile of the images."""

    def local_targets(self, targets: Any, batch_size: int) -> Any:
        """Return the part of the whole batch's targets that belongs to this rank's outputs."""

    def kept_arrays(self) -> dict[str, list[tuple[ParameterShard, Any]]]:
        """Return this rank's parts of all that a checkpoint holds, by group: 'model' and 'optimizer'."""
