"""Interface between the training loop and the objects it trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from ..arrays.precision import FLOAT32, ComputePrecision, LossScaler
from ..backends import Backend, get_backend
from ..comm import ProcessGrid
from ..data import Dataset
from ..errors import ConfigError
from ..formats.fields import Fields
from ..geometry import GridShape
from ..halo import ExchangePolicy, GlobalArray
from ..optim import Optimizer
from ..parallel import GradientSync, Parameters, ParameterShard, SyncState
from ..registry import Registered
from ..runtime.observers.ledger import Ledger
from ..runtime.observers.nonfinite import NonFiniteMonitor
from ..strategies import Strategy, StrategyBuilder
from .summary import Summary


class Trainable(Protocol):
    """A model, or a stage of its pretraining.

    Attributes
    ----------
    output, output_shape
        Where `cost` counts what `fprop` returns; the shape is global, without the batch.
    uncounted : int
        How many steps the optimiser does not count.
    momentum : float or None
        Of the next step; None: the optimiser's own.
    num_initial_epochs : int
        Epochs after which the optimiser is reset.
    stages : sequence
        A model's stages, or the stage alone.
    """

    grid: ProcessGrid
    dtype: np.dtype
    seed: int
    optimizer: Any
    cost: Any
    output: GlobalArray
    output_shape: tuple[int, ...]
    accumulate: int
    step: int
    uncounted: int
    learning_rate_scale: float
    momentum: float | None
    num_initial_epochs: int
    stages: Sequence[Any]
    sync: GradientSync

    @property
    def streams(self) -> bool:
        """Whether it reads images strip by strip, and has no more of them in memory."""

    @property
    def whole(self) -> TrainableModel:
        """The model itself, or the one that the stage belongs to."""

    def begin_epoch(self, epoch: int, seen: int = 0) -> None:
        """Take note that an epoch begins or, if samples of it have been `seen`, goes on; `epoch` counts from 0."""

    def train_batch(self, x: Any, targets: Any, batch_size: int | None = None) -> float:
        """Run one step, and return the mean cost of a sample of the whole batch; NaN if it was skipped."""

    def judged(self, x: Any, targets: Any, batch_size: int) -> tuple[Any, Any, float | list[float]]:
        """Return this rank's outputs, its targets, as metrics take them, and its part of the cost; as for inference.

        Of a cost of several parts it is that of each.
        """

    def kept_arrays(self, slots: Collection[str] = ()) -> dict[str, list[tuple[ParameterShard, Any]]]:
        """Return this rank's parts of all that a checkpoint holds, by group: 'model' and 'optimizer'.

        Parameters
        ----------
        slots : collection of str
            What a checkpoint that is about to be read has in 'optimizer'. An optimiser that makes its arrays in its
            first step makes these now.
        """


class RemoteUpdate(ABC):
    """Updates of all parameters of a model that are applied outside of its job."""

    strategy: Strategy

    @abstractmethod
    def update(self, scale: float) -> None:
        """Hand over the gradients of a step, and take over new values; collective.

        Parameters
        ----------
        scale : float
            Factor on the learning rate.
        """

    @abstractmethod
    def finish(self) -> None:
        """Take over the values at the end of training; collective."""


class TrainableModel(Registered, Trainable, ABC):
    """A model that an experiment can train: what the loop and its hooks ask of it beside that.

    Attributes
    ----------
    batch_size : int
        That it is built for, over all replicas.
    compiled : what `plan` has returned
    memory : int or None
        Memory limit in bytes for the processes on one machine together, if set.
    vector_parallel : bool or None
        Whether fully connected layers are divided by outputs and inputs in turn; None: they cannot be.
    remote : RemoteUpdate or None
        Updates the parameters in the place of the optimiser.
    precision : ComputePrecision
        Of the operands of its products.
    loss_scaler : LossScaler or None
        Scales the loss, where gradients of that precision might vanish; known after `build`.
    room : int or None
        Bytes that a rank has, where it is known. If a step takes more, and no `memory` is asked for, it is streamed.
    """

    memory: int | None = None
    room: int | None = None
    vector_parallel: bool | None = None
    remote: RemoteUpdate | None = None
    precision: ComputePrecision = FLOAT32
    loss_scaler: LossScaler | None = None
    strategy: StrategyBuilder | Strategy | None = None
    backend: str | Backend
    batch_size: int
    compiled: Any
    input: GlobalArray
    nonfinite: str
    nonfinite_monitor: NonFiniteMonitor
    num_pretrain_epochs = num_initial_epochs = 0
    pretrain_optimizer: Optimizer
    distributed: bool
    accumulate = 1
    stages: Sequence[Any] = ()

    @property
    @abstractmethod
    def built(self) -> Parameters:
        """The trained parameters; ConfigError if the model is not built."""

    @property
    def sync_states(self) -> list[SyncState]:
        """State of gradient synchronisation that is kept from step to step."""
        return self.built.compressed.state()

    @property
    @abstractmethod
    def schemes(self) -> Mapping[str, ExchangePolicy]:
        """The border schemes, by layer or path of a module."""

    @property
    def exchanged(self) -> Mapping[str, Sequence[GlobalArray]]:
        """The arrays whose border schemes may remember earlier steps, in checkpoints too, by layer."""
        return {}

    @property
    def subject_of_outputs(self) -> Any:
        """Subject of messages about the outputs."""
        return self

    @abstractmethod
    def guard(self, seed: int) -> None:
        """Look for mistakes of a user's layers and border schemes in all steps of a built model; see DebugHalo."""

    def array_backend(self) -> Backend:
        """Return the backend that computes in the model's precision; ConfigError where none can."""
        self.precision.check(self.dtype)
        return get_backend(self.backend).in_precision(self.precision)

    def averaged(self) -> AbstractContextManager[None]:
        """Have the running mean of the weights in their place meanwhile, where the optimiser keeps one."""
        return nullcontext()

    def settle(self) -> None:
        """Finish what steps have put off; collective."""
        return

    @abstractmethod
    def execute(
        self,
        accumulate: int | None = None,
        sync: str | None = None,
        recompute: bool | None = None,
        strips: int | Literal["auto"] | None = None,
        memory: int | str | None = None,
        strategy: StrategyBuilder | Strategy | str | None = None,
    ) -> None:
        """Say how a step is executed, before the model is built; ConfigError if it cannot be so."""

    @abstractmethod
    def plan(self, input_shape: Sequence[int], grid: GridShape | None = None, batch_size: int | None = None) -> Any:
        """Return what every rank of a grid would do; needs no MPI, and raises what `build` would raise."""

    def within(self, plan: Any) -> Any:
        """Return the plan of a training in `memory`, where `plan` leaves that to this."""
        return plan

    @abstractmethod
    def build(
        self, input_shape: Sequence[int], batch_size: int, grid: ProcessGrid | None = None, plan: Any = None
    ) -> None:
        """Make everything for this rank."""

    @abstractmethod
    def fprop(self, x: Any, training: bool = True, batch_size: int | None = None) -> Any:
        """Return this rank's tile of the output for its tile of the images."""

    def trial_batch(self, dataset: Dataset) -> tuple[Any, Any]:
        """Return images and labels of this rank, for steps that are only timed; the model is built."""
        dataset.open(self.grid)
        lo, hi = self.grid.sample_range(self.batch_size)
        numbers = np.arange(lo, hi) % len(dataset.train)
        return dataset.train.images(numbers, self.dtype), dataset.train.targets(numbers)

    def place(self, fields: Fields | None) -> None:
        """Let the cost know what the outputs are, and which cells of them this rank has; the model is built."""

    def cost_of_cells(self) -> Any:
        """Return the cost such that sums over boxes of an image's cells, whole samples or not, add up."""
        return self.cost

    def summary(
        self,
        input_shape: Sequence[int] | None = None,
        grid: GridShape | None = None,
        batch_size: int | None = None,
    ) -> Summary:
        """Return a table: what every layer gives, its parameters, its tile, halo and memory, as `neondist check`.

        Parameters
        ----------
        input_shape : (*spatial, C), global
            Not needed once the model is built; then it is about the plan that runs.
        grid, batch_size : optional
            As in `plan`.

        Raises
        ------
        ConfigError
            The model is not built, and no shape is given.
        """
        if input_shape is not None:
            return Summary(self.plan(input_shape, grid, batch_size).describe())
        if getattr(self, "compiled", None) is None:
            raise ConfigError("summary: the model is not built; give the shape of an image, such as (28, 28, 1)")
        return Summary(self.compiled.describe())

    def __repr__(self) -> str:
        built = getattr(self, "compiled", None) is not None
        return str(self.summary()) if built else f"{type(self).__name__} (not built)"

    def _repr_html_(self) -> str:
        built = getattr(self, "compiled", None) is not None
        return (self.summary() if built else Summary(f"{self} (not built)"))._repr_html_()

    def begin_epoch(self, epoch: int, seen: int = 0) -> None:
        """Take note that an epoch begins or, if samples of it have been `seen`, goes on; `epoch` counts from 0."""
        return

    def export(self, folder: Path) -> None:
        """Write what other programs read of a trained model into the folder of its run; collective."""
        return

    @property
    @abstractmethod
    def bytes_sent(self) -> int:
        """Of halos, since the build."""

    @property
    @abstractmethod
    def bytes_summed(self) -> int:
        """Bytes given into sums, or sent to redistribute vectors."""

    @abstractmethod
    def ledger(self) -> Ledger:
        """Return all messages and sums since the build."""

    @property
    def streams(self) -> bool:
        """Whether it reads images strip by strip, and has no more of them in memory."""
        return bool(self.compiled.streams)

    @property
    def whole(self) -> TrainableModel:
        """The model itself; of a stage of pretraining it is the model that the stage belongs to."""
        return self
