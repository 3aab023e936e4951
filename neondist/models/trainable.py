"""What the training loop asks of what it trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ..comm import ProcessGrid
from ..halo import GlobalArray
from ..layers import Context, Layer
from ..optim import Optimizer
from ..parallel import GradientSync, Parameters, ParameterShard, TrainedSubset
from ..plan import Plan
from ..runtime import Executor
from ..runtime.observers.ledger import Ledger
from ..runtime.observers.nonfinite import NonFiniteMonitor
from .passes import ModelPass


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
    def whole(self) -> Whole:
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


class Whole(Trainable, Protocol):
    """A model: what a step and the loop ask of it beside that."""

    context: Context
    compiled: Plan
    executor: Executor
    input: GlobalArray
    leaves: list[Layer]
    parameters: Parameters | None
    trained: Parameters | TrainedSubset
    slots: dict[str, Any]
    last_pass: ModelPass | None
    nonfinite: str
    nonfinite_monitor: NonFiniteMonitor
    num_pretrain_epochs: int

    @property
    def built(self) -> Parameters:
        """All parameters."""

    @property
    def bytes_sent(self) -> int:
        """Of halos, since the build."""

    @property
    def bytes_summed(self) -> int:
        """Given into sums, or sent so that vectors are cut anew."""

    def ledger(self) -> Ledger:
        """Return all messages and sums since the build."""
