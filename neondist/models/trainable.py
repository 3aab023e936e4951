"""Interface between the training loop and the models it trains."""

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
from ..costs import Cost
from ..data import Dataset
from ..errors import ConfigError
from ..formats.fields import FieldMetadata
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
        Layout of the outputs for `cost`; the shape is global, without the batch.
    steps_without_optimizer : int
        Number of steps that the optimiser does not count.
    scheduled_momentum : float or None
        Momentum of the next step; None: the optimiser's own.
    num_initial_epochs : int
        Epochs after which the optimiser is reset.
    stages : sequence
        A model's stages of pretraining; for a stage, the stage alone.
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
    steps_without_optimizer: int
    learning_rate_scale: float
    scheduled_momentum: float | None
    num_initial_epochs: int
    stages: Sequence[Any]

    @property
    def display_name(self) -> str:
        """Name in headlines and messages."""

    sync: GradientSync

    @property
    def is_streamed(self) -> bool:
        """Whether images are read strip by strip, and only these strips are kept in memory."""

    @property
    def whole_model(self) -> TrainableModel:
        """The model itself, or the model of a stage."""

    def begin_epoch(self, epoch: int, samples_seen: int = 0) -> None:
        """Begin an epoch, counted from 0, or resume it after `samples_seen` samples."""

    def train_batch(self, x: Any, targets: Any, batch_size: int | None = None) -> float:
        """Run one step, and return the mean cost over the global batch; NaN if the step was skipped."""

    def evaluate_batch(self, x: Any, targets: Any, batch_size: int) -> tuple[Any, Any, float | list[float]]:
        """Return this rank's outputs, targets, and part of the cost summed over samples, in inference mode.

        For a cost of several parts, the last item is a list with one value per part.
        """

    def checkpoint_arrays(self, slots: Collection[str] = ()) -> dict[str, list[tuple[ParameterShard, Any]]]:
        """Return this rank's parts of the contents of a checkpoint, by group: 'model' and 'optimizer'.

        Parameters
        ----------
        slots : collection of str
            Names in the group 'optimizer' of a checkpoint about to be read. An optimiser that creates its arrays in the
            first step creates these now.
        """


class RemoteUpdate(ABC):
    """Updates of a model's parameters that are applied outside its job, by parameter servers.

    Attributes
    ----------
    version : int
        Number of updates by all workers, as of the last values received.
    """

    strategy: Strategy
    version: int

    @abstractmethod
    def push_gradients_and_pull_values(self, learning_rate_scale: float) -> None:
        """Send the gradients of a step, and receive new values. Collective."""

    @abstractmethod
    def pull_values(self) -> None:
        """Receive new values. Collective."""

    @abstractmethod
    def pull_final_values(self) -> None:
        """Receive the final values at the end of training. Collective."""

    @abstractmethod
    def pull_values_and_optimizer_state(self) -> None:
        """Receive new values and the state of the optimiser, for a checkpoint. Collective."""


class TrainableModel(Registered, Trainable, ABC):
    """A model that an experiment can train: the rest of the interface to the training loop and its hooks.

    Attributes
    ----------
    batch_size : int
        Batch size of the built model, over all replicas.
    compiled : result of `plan`
    memory : int or None
        Memory limit in bytes for the total of all processes on one machine, if set.
    vector_parallel : bool or None
        Whether fully connected layers are divided by outputs and inputs alternately; None: unsupported.
    remote_update : RemoteUpdate or None
        Update of the parameters that replaces the optimiser's.
    precision : ComputePrecision
        Precision of the operands of convolutions and matrix products.
    loss_scaler : LossScaler or None
        Scales the loss if gradients of that precision may underflow; known after `build`.
    available_bytes_per_rank : int or None
        Bytes available to a rank, if known. A step that needs more is streamed, unless `memory` is set.
    """

    memory: int | None = None
    available_bytes_per_rank: int | None = None
    vector_parallel: bool | None = None
    remote_update: RemoteUpdate | None = None
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
    recompute: bool
    strips: int | Literal["auto"] | None
    sync_class: type[GradientSync]
    stages: Sequence[Any] = ()

    @property
    def pretraining_arguments(self) -> dict[str, Any]:
        """Constructor arguments that determine the pretraining, by name."""
        return {}

    @property
    @abstractmethod
    def built_parameters(self) -> Parameters:
        """The trained parameters; raises ConfigError if the model is not built."""

    @property
    def sync_states(self) -> list[SyncState]:
        """State of gradient synchronisation kept from step to step."""
        return self.built_parameters.compressed.sync_states()

    @property
    @abstractmethod
    def schemes(self) -> Mapping[str, ExchangePolicy]:
        """The border schemes, by layer or path of a module."""

    @property
    def exchanged_arrays(self) -> Mapping[str, Sequence[GlobalArray]]:
        """The arrays, by layer, whose border schemes may have state to checkpoint."""
        return {}

    @property
    def output_error_subject(self) -> Any:
        """Object that messages about the outputs name."""
        return self

    def check_targets(self, plan: Any, classes: int | None, target_shape: tuple[int, ...] | None) -> None:
        """Raise UserError if outputs cannot be compared with targets of this shape per sample (None: unknown)."""
        if isinstance(self.cost, Cost):
            self.cost.check_target_shape(plan.output_shape, target_shape)

    @abstractmethod
    def enable_debug_checks(self, seed: int) -> None:
        """Check a user's layers and border schemes in all steps of a built model; see DebugHalo."""

    def check_replicated_arrays(self, step: int) -> None:
        """Raise HaloError on all ranks if weights or state of a user's layers differ between ranks. Collective."""

    def array_backend(self) -> Backend:
        """Return the backend for the model's precision; raise ConfigError if the precision is not supported."""
        self.precision.check_parameter_dtype(self.dtype)
        return get_backend(self.backend).in_precision(self.precision)

    @property
    def layer_backend_name(self) -> str | None:
        """Name of the backend of the layers; None if there are none."""
        return None

    def use_averaged_weights(self) -> AbstractContextManager[None]:
        """Replace the weights by their running mean within the context, if the optimiser keeps one."""
        return nullcontext()

    def wait_for_messages(self) -> None:
        """Finish pending messages of steps. Collective."""
        return

    @abstractmethod
    def configure_execution(
        self,
        accumulate: int | None = None,
        sync: str | None = None,
        recompute: bool | None = None,
        strips: int | Literal["auto"] | None = None,
        memory: int | str | None = None,
        strategy: StrategyBuilder | Strategy | str | None = None,
    ) -> None:
        """Set how a step is executed, before the model is built; raise ConfigError if a setting is not supported."""

    @abstractmethod
    def plan(self, input_shape: Sequence[int], grid: GridShape | None = None, batch_size: int | None = None) -> Any:
        """Return the plan for every rank of a grid, without communication; raise the errors of `build`."""

    def fit_plan_to_memory(self, plan: Any) -> Any:
        """Return the plan adapted to `memory`; unchanged if the method `plan` has already adapted it."""
        return plan

    @abstractmethod
    def build(
        self, input_shape: Sequence[int], batch_size: int, grid: ProcessGrid | None = None, plan: Any = None
    ) -> None:
        """Build the model for this rank."""

    @abstractmethod
    def fprop(self, x: Any, training: bool = True, batch_size: int | None = None) -> Any:
        """Return this rank's tile of the output for its tile of the images."""

    def timing_batch(self, dataset: Dataset) -> tuple[Any, Any]:
        """Return images and labels of this rank for timing steps of a built model."""
        dataset.open(self.grid)
        lo, hi = self.grid.sample_range(self.batch_size)
        sample_numbers = np.arange(lo, hi) % len(dataset.train)
        return dataset.train.images(sample_numbers, self.dtype), dataset.train.targets(sample_numbers)

    def restrict_cost_to_local_cells(self, fields: FieldMetadata | None) -> None:
        """Restrict the cost to the output cells that this rank owns; call it after `build`."""

    def per_cell_cost(self) -> Any:
        """Return a cost whose values for boxes that divide an image add up to its value for the image."""
        return self.cost

    def summary(
        self, input_shape: Sequence[int] | None = None, grid: GridShape | None = None, batch_size: int | None = None
    ) -> Summary:
        """Return a table of all layers with output, parameters, tile, halo and memory, as printed by `neondist check`.

        Parameters
        ----------
        input_shape : (*spatial, C), global
            Default: that of the built model, whose plan is then shown.
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
            raise ConfigError("summary: the model is not built; give the shape of its input, such as (28, 28, 1)")
        return Summary(self.compiled.describe())

    @property
    def display_name(self) -> str:
        """Name of the model in headlines and messages."""
        return type(self).__name__

    def __repr__(self) -> str:
        is_built = getattr(self, "compiled", None) is not None
        return str(self.summary()) if is_built else f"{self.display_name} (not built)"

    def _repr_html_(self) -> str:
        is_built = getattr(self, "compiled", None) is not None
        return (self.summary() if is_built else Summary(repr(self)))._repr_html_()

    def begin_epoch(self, epoch: int, samples_seen: int = 0) -> None:
        """Begin an epoch, counted from 0, or resume it after `samples_seen` samples."""
        return

    def export(self, folder: Path) -> None:
        """Write a trained model for other programs to the folder of its run. Collective."""
        return

    @property
    @abstractmethod
    def bytes_sent(self) -> int:
        """Bytes of halos sent since `build`."""

    @property
    @abstractmethod
    def bytes_summed(self) -> int:
        """Bytes contributed to reductions, or sent in redistributions, since `build`."""

    @abstractmethod
    def ledger(self) -> Ledger:
        """Return all messages and reductions since `build`."""

    @property
    def is_streamed(self) -> bool:
        """Whether images are read strip by strip, and only these strips are kept in memory."""
        return bool(self.compiled.is_streamed)

    @property
    def whole_model(self) -> TrainableModel:
        """The model itself; for a stage of pretraining, the model that the stage belongs to."""
        return self
