"""A list of layers with a cost and an optimiser; serial here, distributed with the mixin `DistModel`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np

from ..arrays.namespace import as_real_numbers, to_host
from ..arrays.precision import FLOAT32, ComputePrecision, PrecisionName
from ..backends import Backend
from ..comm import ProcessGrid
from ..costs import Cost, CrossEntropy
from ..errors import ConfigError, PassOrderError, ShapeError
from ..formats.fields import FieldMetadata
from ..geometry import GridShape
from ..halo import ExchangePolicy, GlobalArray, Phase, as_scheme, halo_in_precision, scheme_text
from ..layers import ModelContext, Node, Sequential, declared_with
from ..optim import SGD, Optimizer
from ..parallel import SYNC_CLASSES_BY_NAME, GradientSync, LayerParameters, TrainedSubset
from ..parallel.parameters import gather_arrays, load_arrays
from ..plan import Plan, TrainingSettings, compile_plan, max_micro_batch_size, micro_batch_ranges
from ..plan.choices import set_schemes
from ..registry.arguments import type_checked
from ..registry.ranges import Count, Index
from ..runtime import Executor
from ..runtime.observers.nonfinite import NonFiniteMonitor
from ..strategies import Strategy, StrategyBuilder, as_strategy
from ..system.memory import count_local_ranks, model_bytes_per_rank, parse_bytes, process_overhead_bytes
from ..terminal.console import counted
from .consistency import CallComparison
from .layer_checks import check_grid_and_batch_size, name_layers
from .layer_model import LayerModel
from .passes import ModelPass, to_backend_images
from .scope import resolve_model_class
from .targets import are_global_targets, local_targets, random_batch
from .train_step import ModelStep
from .trainable import TrainableModel
from .vector_parallel import alternate_output_and_input_splits


class Model(LayerModel):
    """A chain of layers, trained by gradient descent.

    Parameters
    ----------
    layers : sequence of layers and containers
        Unnamed layers are named by class and number: 'conv1', 'conv2', 'fc1', 'sum1.conv1'.
    cost : Cost
        Cost that training minimises. Default: CrossEntropy.
    optimizer : Optimizer
        Optimiser of the parameters. Default: SGD.
    seed : int
        Seed of all random numbers; each is keyed by the seed, a name and a global index.
    backend : str or Backend
        'auto' selects the fastest backend available; the name of an imported module selects the backend it defines.
    dtype : {'float32', 'float64'}
    precision : {'float32', 'tf32', 'bfloat16', 'float16'}
        Precision of the operands of convolutions and fully connected layers, and of the halos of convolutions;
        parameters and everything else stay float32. With 'float16' the loss is scaled, and steps with overflowing
        gradients are skipped.
    scheme : ExchangePolicy or str
        Border scheme for all layers without their own scheme.
    accumulate : int
        Number of micro-batches into which a rank's samples are divided in a training step, at most one per sample.
        Results equal those of the whole batch up to rounding, and need less memory, unless a layer computes statistics
        over the batch, which requires all activations to be stored.
    sync : {'allreduce', 'bucketed'}
        Whether gradients are reduced over ranks after the backward pass, or in buckets, most of which overlap with the
        computation of other gradients.
    recompute : bool
        Store only the inputs of sections of several layers, and recompute each section in the backward pass. This
        reduces activation memory roughly to its square root; a step takes about a third longer. Results are identical.
    strips : int or 'auto', optional
        Execute consecutive layers that have no reductions between them as one unit, this many rows of their output at a
        time ('auto': as many as fit in the cache), without storing the activations between them. Results equal those of
        whole tiles up to rounding.
    strategy : StrategyBuilder or Strategy or str, optional
        Synchronisation of gradients and ownership of updates: a builder of `nd.strategies`, its name, such as
        'ShardedOptimizer', or the path of a strategy file. Results are the same up to rounding. Default: AllReduce.
    memory : int or str, optional
        Memory limit for the total of all processes on one machine, such as '8GiB'. If a step needs more, its first
        layers are executed strip by strip (`strips` rows of their output at a time, or as many as fit) and recomputed
        in the backward pass. Results are the same up to rounding. Default: the available memory; for steps that need
        more than 64 MiB on one tile, half of what the step needs, if that costs little time.

    Attributes
    ----------
    leaves : list of Layer
        All layers, including those inside containers.
    grid, batch_size, input_shape, output_shape
        Known after `build`; shapes are global, without the batch.
    bytes_sent : int
        Bytes of halos that this rank has sent since `build`.
    bytes_summed : int
        Bytes that this rank has contributed to reductions, or sent to redistribute vectors, since `build`.
    step : int
        Training steps so far.
    steps_without_optimizer : int
        Number of steps that the optimiser does not count: skipped steps, and all steps before it was reset.
    pending_state : dict or None
        State passed to `load_state` before the first build.
    nonfinite : {'stop', 'skip'}
        Action of a training step when a loss or gradient is not finite.
    nonfinite_monitor : NonFiniteMonitor
        Record of the last skipped step and its reason.
    sync : GradientSync
        Reduction of the gradients over ranks, which also carries flags from one rank to all.
    stages : sequence
        Stages that `nd.pretrain` trains first; empty except for GB (sparse autoencoder) models.
    """

    trained_parameters: LayerParameters | TrainedSubset
    sync: GradientSync
    has_dist_counterpart = True
    distributed = False
    timing_batch = random_batch
    #: reason why the model's layers cannot be executed in strips, if any
    strips_blocker = ""
    vector_parallel = False

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        return super().__new__(resolve_model_class(cls), *args, **kwargs)

    def __init__(
        self,
        layers: Sequence[Node | Sequence[Any]],
        *,
        cost: Cost | None = None,
        optimizer: Optimizer | None = None,
        seed: Index = 0,
        backend: str | Backend = "auto",
        dtype: str = "float32",
        precision: PrecisionName = "float32",
        accumulate: Count = 1,
        sync: Literal["allreduce", "bucketed"] = "allreduce",
        recompute: bool = False,
        strips: Count | Literal["auto"] | None = None,
        memory: int | str | None = None,
        scheme: ExchangePolicy | str = "halo",
        strategy: StrategyBuilder | Strategy | str | None = None,
    ) -> None:
        if not layers:
            raise ConfigError("layers: a model needs at least one layer")
        if str(dtype) not in ("float32", "float64"):
            raise ConfigError(f"dtype {dtype!r}: choose from float32, float64")
        self.chain = Sequential(layers)
        self.layers, self.leaves = self.chain.layers, self.chain.leaves
        self.cost, self.optimizer = cost or CrossEntropy(), optimizer or SGD()
        self._arguments |= {"cost": self.cost, "optimizer": self.optimizer}  # so that experiment.yaml names them
        self.seed, self.backend, self.dtype = int(seed), backend, np.dtype(dtype)
        self.precision = ComputePrecision(precision)
        self.scheduled_momentum: float | None = None
        self.learning_rate_scale, self.step, self.steps_without_optimizer = 1.0, 0, 0
        self.nonfinite, self.nonfinite_monitor = "stop", NonFiniteMonitor()
        self.parameters: LayerParameters | None = None
        self.pending_state: dict[str, Any] | None = None
        self._call_comparison = CallComparison()
        self.last_pass: ModelPass | None = None
        name_layers(self.layers, self.leaves)
        self.scheme = as_scheme(scheme)
        for layer in self.leaves:
            layer.scheme = layer.scheme or self.scheme
        self.accumulate, self.recompute, self.sync_class = accumulate, recompute, SYNC_CLASSES_BY_NAME[sync]
        self.strips: int | Literal["auto"] | None = None
        self.memory: int | None = None
        self.strategy: StrategyBuilder | Strategy | None = None
        self.configure_execution(strips=strips, memory=memory, strategy=strategy)

    def configure_execution(
        self,
        accumulate: int | None = None,
        sync: str | None = None,
        recompute: bool | None = None,
        strips: int | Literal["auto"] | None = None,
        memory: int | str | None = None,
        strategy: StrategyBuilder | Strategy | str | None = None,
    ) -> None:
        """Set how a step is executed, before the model is built, with arguments of the constructor; None: unchanged.

        Raises
        ------
        ConfigError
            The model, or the scheme of a layer, does not support a setting.
        """
        for field, value in (("strips", strips), ("memory", memory)):
            if value is not None and self.strips_blocker:
                reason = f"not supported by {type(self).__name__}, which {self.strips_blocker}"
                raise ConfigError(f"{field}: {reason}; leave out {field}")
        self.accumulate = self.accumulate if accumulate is None else accumulate
        self.recompute = self.recompute if recompute is None else recompute
        self.strips = self.strips if strips is None else strips
        self.memory = self.memory if memory is None else parse_bytes("memory", memory)
        self.sync_class = self.sync_class if sync is None else SYNC_CLASSES_BY_NAME[sync]
        self.strategy = self.strategy if strategy is None else as_strategy(strategy)
        if isinstance(self.strategy, Strategy) and self.strategy.schemes:
            try:
                set_schemes(self.leaves, self.strategy.schemes)
            except ConfigError as error:
                raise self.strategy.create_error(str(error), "schemes") from None
        for layer in self.leaves if self.accumulate > 1 else ():
            if layer.scheme is not None and layer.scheme.reuses_cells:
                raise ConfigError(
                    f"accumulate: the scheme {scheme_text(layer.scheme)} of layer '{layer.name}' reuses cells of"
                    " earlier steps, which accumulate would mix up; leave out accumulate, or use an exact scheme (halo)"
                )

    @type_checked
    def plan(self, input_shape: Sequence[int], grid: GridShape | None = None, batch_size: int | None = None) -> Plan:
        """Return the plan for every rank of a grid, without communication; raise the errors of `build`.

        Parameters
        ----------
        batch_size : int, optional
            Samples over all replicas. Default: one sample per replica.
        """
        grid = grid or GridShape()
        if self.vector_parallel:
            alternate_output_and_input_splits(self.layers, tuple(input_shape))
        self.precision.check_parameter_dtype(self.dtype)
        for layer in self.leaves:
            tolerates_rounding = declared_with(layer, "tolerates_rounded_view", "forward")
            layer.scheme = halo_in_precision(layer.scheme, self.precision if tolerates_rounding else FLOAT32)
        memory, backend, local_ranks = self.memory, self.layer_backend_name, count_local_ranks(grid.size)
        memory = None if memory is None else model_bytes_per_rank(memory, local_ranks, backend)
        execution_args = self.accumulate, self.recompute, self.strips, memory
        options: Any = {"backend": backend, "strategy": self.strategy}
        options["halve_memory_by_streaming"] = not self.strips_blocker
        settings = TrainingSettings(self.cost, self.optimizer, self.dtype, *execution_args, **options)
        plan = compile_plan(self.chain, tuple(input_shape), grid, batch_size, settings)
        available_bytes, is_fixed = self.available_bytes_per_rank, bool(memory is not None or self.strips_blocker)
        if available_bytes is None or is_fixed or plan.needed_bytes <= available_bytes:
            return plan
        settings = replace(settings, memory=max(1, available_bytes - process_overhead_bytes(backend)))
        return compile_plan(self.chain, tuple(input_shape), grid, batch_size, settings)

    @type_checked
    def build(
        self, input_shape: Sequence[Count], batch_size: Count, grid: ProcessGrid | None = None, plan: Plan | None = None
    ) -> None:
        """Fix all shapes, create the inputs of all layers for this rank, and initialise the weights.

        Parameters
        ----------
        input_shape : (*spatial, C), global
        batch_size : int
            Samples over all replicas.
        grid : ProcessGrid, optional
            Default: all ranks (distributed models), or this process alone (serial ones).
        plan : Plan, optional
            Result of `plan` for the same arguments, if already known.
        """
        self.grid = grid or (ProcessGrid() if self.distributed else ProcessGrid.serial())
        self.input_shape, self.batch_size = tuple(map(int, input_shape)), int(batch_size)
        check_grid_and_batch_size(self, self.grid, batch_size)
        plan = plan or self.plan(self.input_shape, self.grid.shape, batch_size)
        if (plan.input_shape, plan.grid, plan.batch_size) != (self.input_shape, self.grid.shape, batch_size):
            raise ConfigError("plan: made for another input_shape, grid or batch_size; leave plan out, or plan again")
        self.compiled, self.output_shape, self.loss_scaler = plan, plan.output_shape, self.precision.new_scaler()
        context = self.context = ModelContext(self.grid, self.array_backend(), self.dtype, self.seed, batch_size)
        for planned in plan:
            planned.layer.regions = planned.regions
            planned.layer.build(planned.input_shape, context)
            planned.check_messages_match(planned.layer.arrays, self.grid.tile)
        self.last_pass = None
        create = partial(GlobalArray, self.grid, dtype=str(self.dtype), backend=context.backend)
        self.input, self.output = create((batch_size, *self.input_shape)), create((batch_size, *self.output_shape))
        if plan.overlapping_tiles is not None:
            self.input.repartition(plan.overlapping_tiles, plan.overlapping_tiles)
        self.parameters = self.trained_parameters = LayerParameters(
            self.leaves, context, self.sync_class, plan.parameters.shares, plan.parameters.gradient_compressors
        )
        self.sync = self.parameters.sync
        max_samples = max_micro_batch_size(micro_batch_ranges(self.input.local_shape[0], self.accumulate))
        self.executor = Executor(plan, context, max_samples)
        self.slots = self.parameters.create_slots(self.optimizer)
        self._call_comparison = CallComparison(includes_settings=True, includes_weights=True)
        if self.pending_state is not None:
            self.load_state(self.pending_state)

    def restrict_cost_to_local_cells(self, fields: FieldMetadata | None) -> None:
        """Restrict the cost to the output cells that this rank owns."""
        if isinstance(self.cost, Cost):
            self.cost = self.cost.restrict_to_box(self.output.extent, self.output.own, fields)

    # Passes.

    def forward(self, x: Any, training: bool = True, batch_size: int | None = None) -> ModelPass:
        """Run a forward pass on this rank's tile; return `run` with `run.output` and `run.backward(dy)`.

        Passes may interleave: each stores its own activations.

        Parameters
        ----------
        x : array (n, *tile, C)
            Real numbers of any dtype and memory order; the array may be modified afterwards.
        training : bool
            False: inference mode, without dropout and with running statistics.
        batch_size : int, optional
            Samples over all replicas, if not the batch size the model was built for.
        """
        parameters = self.built_parameters
        x = to_backend_images(self, x, copy=True)
        batch = self._global_batch_size(x, batch_size)
        self.input.check_tile_shape("x", x)
        self._compare_call_across_ranks("forward", {"training": training, "batch_size": batch})
        run = self.executor.forward(x, Phase(training, self.step, self.grid.sample_range(batch)[0]))
        return ModelPass(self.executor, run, parameters, (self.input, self.output))

    def fprop(self, x: Any, training: bool = True, batch_size: int | None = None) -> Any:
        """Return this rank's tile of the output (or the whole output after an FC layer), a new array (n, *tile, C').

        The arguments are those of `forward`; `bprop` differentiates this pass.
        """
        last, self.last_pass = self.last_pass, None
        replaced = bool(not training and last and (last.is_training or last.replaced_training_pass))
        del last  # so that the new pass reuses its memory
        run = self.forward(x, training, batch_size)
        run.replaced_training_pass = replaced
        self.last_pass = run
        return run.output

    def bprop(self, dy: Any) -> Any:
        """Return the gradient of this rank's tile of the input; afterwards `grads` are summed over all ranks.

        The last `fprop` is differentiated; `bprop` may be called again with another `dy`.

        Parameters
        ----------
        dy : array
            This rank's part of the output's gradient (`scatter_output`).

        Returns
        -------
        array (n, *tile, C), a new one

        Raises
        ------
        PassOrderError
            If there was no `fprop`, an `fprop` with `training=False` followed one with `training=True`, or the weights
            have changed since.
        """
        run = self.last_pass if self.built_parameters else None
        if run is None:
            raise PassOrderError(
                "bprop: no fprop to differentiate: none was run, the last one failed, or train_batch was called since;"
                " run fprop of the batch right before bprop"
            )
        if run.replaced_training_pass:
            raise PassOrderError(
                "bprop: an fprop with training=False followed the one with training=True; run fprop of the batch"
                " right before bprop, or keep passes apart: run = model.forward(x), then run.backward(dy)"
            )
        return run.backward(dy)

    def update(self) -> None:
        """Update the weights by one step of the optimiser, with the gradients of the last backward pass. Collective.

        Raises
        ------
        PassOrderError
            If no backward pass has been run since the weights last changed.
        """
        parameters = self.built_parameters
        if parameters.version_of_gradients != parameters.version:
            raise PassOrderError(
                "update: no gradients: the weights have changed since the last backward pass, or there was none; run"
                " fprop and bprop first"
            )
        self._compare_call_across_ranks("update", {})
        ModelStep(self).apply_gradients()
        self.step += 1

    def train_batch(self, x: Any, targets: Any, batch_size: int | None = None) -> float:
        """Run one step - fprop, cost, bprop, update - and return the mean loss over the global batch.

        Parameters
        ----------
        x : array
            This rank's tile of the images.
        targets : array
            Targets of the whole batch, the same on every rank, or this rank's part of them.
        batch_size : int, optional
            Samples of this batch over all replicas, if not the batch size the model was built for.

        Raises
        ------
        NonFiniteError
            On every rank, if the loss or a gradient is not finite on any rank. With `nonfinite` set to 'skip', weights,
            state, the optimiser's slots and count, and the state of border schemes are unchanged; `step` is
            incremented, and NaN is returned.
        """
        self.last_pass = None
        targets = as_real_numbers("targets", targets, self._built().context.backend.xp)
        batch = self._global_batch_size(x, batch_size)
        # with one sample, targets of global shape may be one replica's part
        if (batch > 1 or self.grid.replicas == 1) and are_global_targets(targets, self.output, batch):
            self.grid.record_replicated_array("the array of targets passed to train_batch", to_host(targets))
        self._compare_call_across_ranks("train_batch", {"batch_size": batch})
        return ModelStep(self).run(x, targets, batch)

    def evaluate_batch(self, x: Any, targets: Any, batch_size: int) -> tuple[Any, Any, list[float]]:
        """Return this rank's outputs, its targets, and its share of each part of the summed cost, in inference mode."""
        y, targets = self.fprop(x, training=False, batch_size=batch_size), self.local_targets(targets, batch_size)
        costs = [float(part.local_sum(y, targets, self.output.sum_over_ranks)) for _, part in self.cost.parts]
        return y, targets, costs

    # Whole arrays and this rank's parts.

    def scatter(self, images: Any) -> Any:
        """Return this rank's tile of images (N, *spatial, C) that are the same on every rank."""
        return self._built().input.scatter(images)

    def scatter_output(self, dy: Any) -> Any:
        """Return this rank's part of an array of the output's shape that is the same on every rank."""
        return self._built().output.scatter(dy)

    def gather(self, y: Any) -> Any:
        """Return the whole output on every rank. Collective."""
        return self._built().output.gather(y)

    def gather_input(self, dx: Any) -> Any:
        """Return the whole input (or its gradient) on every rank. Collective."""
        return self._built().input.gather(dx)

    def local_targets(self, targets: Any, batch_size: int) -> Any:
        """Return the part of the whole batch's targets that belongs to this rank's outputs."""
        targets = as_real_numbers("targets", targets, self._built().context.backend.xp)
        return local_targets(targets, self.output, batch_size, self.input)

    # Saving and loading.

    def state(self) -> dict[str, Any]:
        """Return copies of all whole arrays by '<layer name>/<parameter>', equal on every grid. Collective."""
        arrays = self.built_parameters.arrays()
        self._compare_call_across_ranks("state", {})
        return gather_arrays(arrays)

    @type_checked
    def load_state(self, state: dict[str, Any]) -> None:
        """Load arrays returned by `state`; before the first build, keep them, and load them in `build`."""
        if self.parameters is None:
            self.pending_state = {
                name: as_real_numbers(f"state: '{name}'", array).copy() for name, array in state.items()
            }
        else:
            self.parameters.version += 1
            self._call_comparison.includes_weights = True
            load_arrays(self.built_parameters.arrays(), state, "state")

    def gradients(self) -> dict[str, Any]:
        """Return copies of all whole gradients by '<layer name>/<parameter>', summed over all ranks. Collective."""
        gradients = self.built_parameters.gradients()
        self._compare_call_across_ranks("gradients", {})
        return gather_arrays(gradients)

    def optimizer_state(self) -> dict[str, Any]:
        """Return copies of the optimiser's whole arrays by '<layer name>/<parameter>/<slot>'. Collective."""
        slots = self.built_parameters.slot_arrays(self.slots)
        self._compare_call_across_ranks("optimizer_state", {})
        return gather_arrays(slots)

    @type_checked
    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Load arrays returned by `optimizer_state`."""
        load_arrays(self.built_parameters.slot_arrays(self.slots), state, "optimiser state")

    # Private methods.

    def _built(self) -> Model:
        """Return the model itself; raise ConfigError before `build`."""
        _ = self.built_parameters
        return self

    def _compare_call_across_ranks(self, call_name: str, values: dict[str, Any]) -> None:
        self._call_comparison.compare(self, self.built_parameters, call_name, values)

    def _global_batch_size(self, x: Any, batch_size: int | None) -> int:
        """Return the number of samples over all replicas; raise ShapeError if x is not this rank's share."""
        grid = self.built_parameters.context.grid
        batch = batch_size or (len(x) if grid.replicas == 1 else self.batch_size)
        lo, hi = grid.sample_range(batch)
        if len(x) != hi - lo:
            raise ShapeError(
                f"got {counted(len(x), 'sample')}, but rank {grid.rank} takes {hi - lo} of a batch of {batch}; give"
                " batch_size for a batch smaller than the one the model was built for"
            )
        return batch


def require_layer_model(model: TrainableModel, feature: str, remedy: str) -> Model:
    """Return a model of neondist layers; for another model, raise ConfigError about the `feature` that needs layers."""
    if not isinstance(model, Model):
        raise ConfigError(f"{feature}: applies to neondist layers, which {model.display_name} does not have; {remedy}")
    return model
