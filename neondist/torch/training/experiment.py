"""PyTorch modules as models of an experiment, with the training loop's model interface."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from ...arrays.precision import ComputePrecision, PrecisionName
from ...arrays.rng import key
from ...comm import ProcessGrid, all_or_none
from ...errors import ConfigError, ShapeError, UserError
from ...geometry import GridShape
from ...halo import ExchangePolicy, GlobalArray
from ...io.output import WEIGHTS
from ...models import TrainableModel
from ...parallel import SYNC_CLASSES_BY_NAME, ParameterShard
from ...plan import GRADIENTS, LOSS
from ...registry.ranges import Count, Index
from ...runtime.observers.ledger import Ledger, collect_message_counts
from ...runtime.observers.nonfinite import NonFiniteMonitor
from ...strategies import Strategy, StrategyBuilder, as_strategy
from ...system.memory import count_local_ranks, model_bytes_per_rank, parse_bytes
from ...terminal.console import counted, say
from ..capture.tracing import DTYPE_ERROR_PATTERN
from ..exchange.schemes import Schemes, parse_schemes
from ..execution.image_blocks import ModuleBlocks, TracedImageModule
from ..execution.options import ExecutionOptions
from ..ir.layout import Mesh, axes_of, shape_of
from ..module.criteria import check_criterion
from ..module.distributing import distribute
from ..module.module import DistributedModule
from ..module.parameters import MODULE_KEY, ModuleParameters, sparse_embedding_weights, whole_arrays
from ..module.weights import create_optimizer_state, load_weights, save_weights, state_tensors
from .factory import ModuleFactory
from .losses_and_optimizers import TorchLoss, TorchOptimizer, unwrap_named_function
from .module_inputs import apply_feed, channels_first
from .module_outputs import CellLoss, OwnedOutputTotals, channels_last, metric_targets
from .module_plan import ModulePlan
from .train_step import ModuleStep, compute_in_precision

TORCH_DTYPES = {"float32": torch.float32, "float64": torch.float64}


class TorchModel(TrainableModel):
    """A PyTorch module that FitExperiment trains like a model of neondist layers.

    Parameters
    ----------
    factory : callable
        Function that returns the torch.nn.Module. In a YAML file, MODULE:NAME, where MODULE is given by `--import`.
    arguments : mapping, optional
        Arguments of the factory.
    shape : sequence of int, optional
        Shape (C, *spatial) of a sample returned by `feed`. Default: that of the data set.
    loss : TorchLoss, optional
        Default: CrossEntropyLoss.
    optimizer : TorchOptimizer, optional
        Default: SGD.
    feed : callable, optional
        Function that maps this rank's tiles (n, *tile, C) and labels (or None) to tensors for the module, (n, C,
        *tile), and for the loss. It sees only one tile and must therefore act on each cell independently; with
        `overlap_tile` the tile includes a margin, which the loss ignores. Default: move channels first, and convert
        integer labels to int64.
    weights : path, optional
        File of initial weights, as for `load_weights`.
    gather_at : sequence of str
        Paths of modules that every rank computes on whole arrays.
    seed : int
        Seed for the initial weights, the module's random numbers and the order of samples.
    dtype : {'float32', 'float64'}
        Dtype to which the module is converted, including parameters that the factory creates with another dtype.
    precision : {'float32', 'tf32', 'bfloat16', 'float16'}
        With bfloat16 and float16, the module and its loss run under `torch.autocast`; parameters stay float32. With
        float16, the loss is scaled, and steps with overflowing gradients are skipped. tf32 has an effect on GPUs only.
    recompute : bool
        Recompute segments of the module in the backward pass instead of storing their activations.
    scheme : ExchangePolicy or str, or a mapping of module path to scheme
        Border scheme for cells of other tiles. Default: exact halo exchange.
    strips : int or 'auto', optional
        Rows per strip, as in `distribute`.
    sync, strategy : optional
        Synchronisation of gradients and owners of updates, as in Model.

    Notes
    -----
    A module is captured once for each mode and batch size, including that of a smaller last batch.
    """

    distributed = True

    def __init__(
        self,
        factory: Callable[..., Any],
        *,
        arguments: Mapping[str, Any] | None = None,
        shape: Sequence[Count] | None = None,
        loss: TorchLoss | None = None,
        optimizer: TorchOptimizer | None = None,
        feed: Callable[..., Any] | None = None,
        weights: str | Path | None = None,
        gather_at: Sequence[str] = (),
        seed: Index = 0,
        dtype: Literal["float32", "float64"] = "float32",
        precision: PrecisionName = "float32",
        recompute: bool = False,
        scheme: Schemes = "halo",
        strips: Count | Literal["auto"] | None = None,
        sync: Literal["allreduce", "bucketed"] = "allreduce",
        strategy: StrategyBuilder | Strategy | str | None = None,
    ) -> None:
        self.cost, self.optimizer = loss or TorchLoss(), optimizer or TorchOptimizer()
        self._arguments |= {"loss": self.cost, "optimizer": self.optimizer}  # written to experiment.yaml
        self.shape, self.gather_at, self.weights = shape, list(gather_at), weights
        self.recompute, self.scheme, self.strips = recompute, scheme, strips
        self.seed, self.dtype, self.backend = int(seed), np.dtype(dtype), "torch"
        self.has_integer_inputs = False  # whether inputs are int64, such as ids; set before the first plan
        self.precision = ComputePrecision(precision)
        self.scheduled_momentum: float | None = None
        self.step = self.steps_without_optimizer = 0
        self.learning_rate_scale = 1.0
        self.nonfinite = "stop"
        self.nonfinite_monitor = NonFiniteMonitor()
        self.strategy = None if strategy is None else as_strategy(strategy)
        self.sync_class = SYNC_CLASSES_BY_NAME[sync]
        self._guard_seed: int | None = None
        self.parameters: ModuleParameters | None = None
        self._plans: dict[Any, ModulePlan] = {}
        self._feed = unwrap_named_function(self._arguments["feed"])

    @property
    def display_name(self) -> str:
        """Name of the model in headlines and messages."""
        return f"TorchModel {getattr(unwrap_named_function(self._arguments['factory']), '__name__', '')}"

    def configure_execution(
        self,
        accumulate: int | None = None,
        sync: str | None = None,
        recompute: bool | None = None,
        strips: int | Literal["auto"] | None = None,
        memory: int | str | None = None,
        strategy: StrategyBuilder | Strategy | str | None = None,
    ) -> None:
        """Set how a step is executed; micro-batches, which apply only to neondist layers, are rejected."""
        self.recompute = self.recompute if recompute is None else recompute
        self.memory = self.memory if memory is None else parse_bytes("memory", memory)
        self.strips = self.strips if strips is None else strips
        self.sync_class = self.sync_class if sync is None else SYNC_CLASSES_BY_NAME[sync]
        self.strategy = self.strategy if strategy is None else as_strategy(strategy)
        if accumulate is not None:
            raise ConfigError("accumulate: applies to neondist layers, which a TorchModel does not have; leave it out")

    def plan(
        self, input_shape: Sequence[int], grid: GridShape | None = None, batch_size: int | None = None
    ) -> ModulePlan:
        """Return the plan for every rank of a grid; needs no MPI.

        Raises
        ------
        UserError
            ConfigError if a field is invalid; UnsupportedOperator if the module cannot be distributed.
        """
        if self.backend not in ("auto", "torch"):
            raise ConfigError(f"backend: '{self.backend}', but a TorchModel computes with PyTorch; leave it out")
        grid, input_shape = grid or GridShape(), tuple(input_shape)
        batch = batch_size or grid.replicas
        if (input_shape, grid, batch) not in self._plans:
            self._plans[input_shape, grid, batch] = self._create_plan(input_shape, grid, batch)
        return self._plans[input_shape, grid, batch]

    def check_targets(self, plan: ModulePlan, classes: int | None, target_shape: tuple[int, ...] | None) -> None:
        """Capture the loss for a single output and labels of known shape and dtype; raise its errors."""
        y = plan.output
        cells_shape = plan.output_shape[:-1]
        are_class_labels = classes is not None and target_shape in ((), cells_shape)
        are_dense = target_shape == plan.output_shape and type(self.cost.criterion).__module__.startswith("torch.nn")
        if self._arguments["feed"] is not None or len(plan.steps.outputs) > 1 or not (are_class_labels or are_dense):
            return
        label_layout = y.layout[:1] if target_shape == () else (*y.layout[:1], *y.layout[2:])
        target_layout = y.layout if are_dense else label_layout
        shapes = [(y.shape, y.dtype), (shape_of(target_layout), y.dtype if are_dense else torch.int64)]
        mesh = Mesh.from_grid(plan.grid, len(plan.input_shape) - 1)
        with self._attribute_errors_to_model("loss: "), compute_in_precision(self.precision, self.module):
            check_criterion(self.cost.criterion, shapes, mesh, [y.layout, target_layout])

    def fit_plan_to_memory(self, plan: ModulePlan) -> ModulePlan:
        """Return the plan of a training step that fits in `memory`.

        Raises
        ------
        UserError
            The step does not fit, even block by block.
        """
        if self.memory is None:
            return plan
        return self._create_plan(plan.input_shape, plan.grid, plan.batch_size, self.memory)

    def set_image_extent(self, input_shape: Sequence[int]) -> None:
        """Set the spatial extents in `shape`, if it was given; plans are not changed."""
        if self.shape is not None:
            self.shape = [self.shape[0], *input_shape[:-1]]

    def trace_for_blocks(self, input_shape: Sequence[int], remedy: str) -> TracedImageModule:
        """Return an object that computes any box of the output from the cells on which the box depends.

        Raises
        ------
        UnsupportedOperator
            The module's receptive field is unbounded; the message names the remedy.
        """
        shape = (1, *self._sample_shape(tuple(input_shape)))
        program = self._factory.capture_program(shape, False, self._input_dtype)
        return TracedImageModule(program, shape, self.gather_at, remedy)

    @property
    def module(self) -> nn.Module:
        """The module, created by the factory on first access."""
        return self._factory.module

    def run_block(self, blocks: ModuleBlocks, number: int, x: Any) -> np.ndarray:
        """Return a block of the output, channels last, given the cells of the image on which it depends."""
        module = self.module
        tensors = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
        with torch.no_grad(), self._attribute_errors_to_model(), compute_in_precision(self.precision, module):
            features, _ = self._apply_feed(x, None, 1)
            return channels_last(blocks.run(number, features, *map(dict, tensors)))

    def build(
        self, input_shape: Sequence[int], batch_size: int, grid: ProcessGrid | None = None, plan: Any = None
    ) -> None:
        """Distribute the module over the grid (default: all ranks). Collective.

        Parameters
        ----------
        input_shape : (*spatial, C), global
        batch_size : int
            Global batch size, over all replicas.
        """
        self.grid, self.input_shape, self.batch_size = grid or ProcessGrid(), tuple(input_shape), batch_size
        self.compiled = plan or self.plan(self.input_shape, self.grid.shape, batch_size)
        self.output_shape = self.compiled.output_shape
        self.loss_scaler = self.precision.new_scaler()
        self.input = GlobalArray(self.grid, (batch_size, *self.input_shape), dtype=str(self.dtype))
        if self.compiled.overlapping_tiles is not None:
            self.input.repartition(self.compiled.overlapping_tiles, self.compiled.overlapping_tiles)
        self._model_by_batch_size: dict[int, DistributedModule] = {}
        self._captured_sizes_and_modes: set[tuple[int, bool]] = set()
        model = self._module_for(batch_size)
        if self.weights is not None:
            with self._attribute_errors_to_model("weights: "):
                load_weights(model, self.weights)
        if self.grid.rank == 0 and (rounded := self._factory.rounded_parameter_names):
            count_text = counted(len(rounded), "float64 parameter")
            remedy = "set dtype: float64 to keep all digits"
            say(f"warning: {count_text}, first '{rounded[0]}', rounded to {self.dtype}; {remedy}", sys.stderr)
        if self.parameters is not None:
            self.parameters.close()
        parameter_plan = self.compiled.parameters
        tensors = dict(self.module.named_parameters())
        updated_parameters = {name: tensors[name] for name in self.compiled.updated_parameter_names}
        sync_options = parameter_plan.shares, parameter_plan.gradient_compressors, sparse_embedding_weights(self.module)
        self.parameters = ModuleParameters(updated_parameters, self.grid, self.sync_class, *sync_options)
        self.sync = self.parameters.sync
        self.torch_optimizer = self.parameters.partition_optimizer(self.optimizer.create(updated_parameters.values()))
        self._base_learning_rates: list[Any] = [group.get("lr") for group in self.torch_optimizer.param_groups]
        partitioned_axes = axes_of(self.compiled.output.layout)
        owns_output = all(part == 0 for axis, part in enumerate(model.comm.place) if axis not in partitioned_axes)
        self.output: Any = OwnedOutputTotals(self.grid, owns_output)

    def train_batch(self, x: Any, targets: Any, batch_size: int | None = None) -> float:
        """Run one training step and return the loss of the whole batch, NaN if the step was skipped. Collective."""
        with self._attribute_errors_to_model():
            return ModuleStep(self).run(x, targets, batch_size or self.batch_size)

    def compute_loss(
        self, x: Any, targets: Any, batch_size: int, training: bool = True
    ) -> tuple[tuple[Any, Any], torch.Tensor]:
        """Return this rank's outputs and labels, and the loss of the whole batch. Collective."""
        model = self._module_for(batch_size, training)
        features, labels = self._apply_feed(x, targets, batch_size)
        model.step = self.step
        with self._seed_generators(), compute_in_precision(self.precision, self.module):
            output = model(features)
            try:
                loss = model.loss(self.cost.criterion, output, labels)
            except (IndexError, RuntimeError, UserError):
                self.cost.check_labels(output, labels)
                raise
        return (output, labels), loss if loss.dtype == TORCH_DTYPES[str(self.dtype)] else loss.float()

    def evaluate_batch(self, x: Any, targets: Any, batch_size: int) -> tuple[Any, Any, float]:
        """Return this rank's outputs and labels, channels last, and the loss times `batch_size` (0 on ranks > 0)."""
        with self.grid.observers.observe("cost"), torch.no_grad(), self._attribute_errors_to_model():
            (output, labels), loss = self.compute_loss(x, targets, batch_size, training=False)
        y = channels_last(output)
        return y, metric_targets(y, labels, self.cost.ignore_index), loss.item() * batch_size * (self.grid.rank == 0)

    def per_cell_cost(self) -> CellLoss:
        """Return the loss as a sum over cells, to be added over boxes; ConfigError unless it is a mean over cells."""
        if self._arguments["feed"] is not None:
            raise ConfigError(
                "feed: its labels cannot be computed block by block; leave out the block size, and allow enough memory"
                " for whole images"
            )
        return CellLoss(self.cost)

    @property
    def built_parameters(self) -> ModuleParameters:
        """The parameters; ConfigError before `build`."""
        if self.parameters is None:
            raise ConfigError("TorchModel is not built yet; call model.build(input_shape, batch_size) first")
        return self.parameters

    @property
    def schemes(self) -> dict[str, ExchangePolicy]:
        """Border schemes by module path."""
        return parse_schemes(self.scheme, dict(self.module.named_modules()))

    def enable_debug_checks(self, seed: int) -> None:
        """Check the user's rules and border schemes in subsequent steps."""
        self._guard_seed = seed
        for model in self._model_by_batch_size.values():
            model.guard(seed)

    def fprop(self, x: Any, training: bool = False, batch_size: int | None = None) -> Any:
        """Return this rank's tile of the first output, channels last. Collective."""
        batch_size = batch_size or self.batch_size
        model = self._module_for(batch_size, training)
        with (
            torch.no_grad(),
            self._attribute_errors_to_model(),
            self._seed_generators(),
            compute_in_precision(self.precision, self.module),
        ):
            return channels_last(model(self._apply_feed(x, None, batch_size)[0]))

    def checkpoint_arrays(self, slots: Collection[str] = ()) -> dict[str, list[tuple[ParameterShard, Any]]]:
        """Return the contents of a checkpoint: the states of the module and of the optimiser."""
        slot_names = [name.removeprefix(f"{MODULE_KEY}/") for name in slots]
        create_optimizer_state(self.built_parameters.optimizer_parameters, self.torch_optimizer, slot_names)
        weights = whole_arrays(state_tensors(self.module), self.grid)
        return {"model": weights, "optimizer": self.built_parameters.optimizer_slots(self.torch_optimizer)}

    def export(self, folder: Path) -> None:
        """Write the weights as a state_dict, weights.safetensors. Collective."""
        save_weights(self._module_for(self.batch_size), folder / WEIGHTS)

    @property
    def bytes_sent(self) -> int:
        """Bytes of halo messages that this rank has sent since `build`."""
        return self._count_bytes(is_halo=True)

    @property
    def bytes_summed(self) -> int:
        """Bytes that this rank has contributed to reductions, or sent in redistributions and rings, since `build`."""
        bytes_reduced = self.sync.reductions.bytes_reduced + self.output.reductions.bytes_reduced
        return self._count_bytes(is_halo=False) + bytes_reduced

    def ledger(self) -> Ledger:
        """Return all messages and sums since `build`."""
        reductions = [(GRADIENTS, self.sync.reductions), (LOSS, self.output.reductions)]
        total = collect_message_counts([], reductions, self.grid.replica * self.grid.shape.tiles)
        for model in self._model_by_batch_size.values():
            total += model.comm.ledger
        return total

    def _count_bytes(self, is_halo: bool) -> int:
        ledgers = (model.comm.ledger for model in self._model_by_batch_size.values())
        return sum(
            n * sent.nbytes for counts in ledgers for sent, n in counts.items() if (sent.kind == "halo") == is_halo
        )

    @property
    def _input_dtype(self) -> torch.dtype:
        return torch.int64 if self.has_integer_inputs else TORCH_DTYPES[str(self.dtype)]

    @cached_property
    def _factory(self) -> ModuleFactory:
        dtype = TORCH_DTYPES[str(self.dtype)]
        if isinstance(self.cost.criterion, nn.Module):
            self.cost.criterion.to(dtype)
        return ModuleFactory(self._arguments["factory"], self._arguments["arguments"] or {}, self.seed, dtype)

    def _create_plan(
        self, input_shape: tuple[int, ...], grid: GridShape, batch_size: int, memory_limit: int | None = None
    ) -> ModulePlan:
        module, shape = self.module, (batch_size, *self._sample_shape(input_shape))
        bytes_per_rank = (
            None if memory_limit is None else model_bytes_per_rank(memory_limit, count_local_ranks(grid.size))
        )
        execution = ExecutionOptions.from_arguments(
            module, self.gather_at, self.recompute, self.scheme, self.strips, bytes_per_rank
        )
        program = self._factory.capture_program(shape, True, self._input_dtype)
        plan = ModulePlan.create(
            module, program, execution, shape, input_shape, grid,
            self.optimizer, self.dtype, self.strategy, memory_limit, self.precision,
        )  # fmt: skip
        if plan.parameters.splits_parameters and not self.optimizer.elementwise:
            raise ConfigError(
                f"strategy: {self.optimizer.constructor.__name__} updates only whole parameters, not parts of them;"
                " choose a strategy without partitions, such as PSLoadBalancing"
            )
        return plan

    def _sample_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        shape = tuple(self.shape or (input_shape[-1], *input_shape[:-1]))
        if shape[1:] != input_shape[:-1]:
            raise ShapeError(
                f"shape: {list(shape)} does not have the spatial extents of the data set's images,"
                f" {list(input_shape[:-1])}; change only the number of channels"
            )
        return shape

    def _module_for(self, batch_size: int, training: bool = True) -> DistributedModule:
        """Return the module, distributed for a batch size and set to a mode. Collective if either is new."""
        if batch_size not in self._model_by_batch_size:
            shape = batch_size, *self._sample_shape(self.input_shape)
            model = distribute(
                self.module, shape, self.grid,
                gather_at=self.gather_at, dtype=self._input_dtype, recompute=self.recompute, scheme=self.scheme,
                strips=self.strips, memory=self.compiled.memory_limit,
            )  # fmt: skip
            if self._guard_seed is not None:
                model.guard(self._guard_seed)
            model.defer_gradients(self.module.get_parameter(name) for name in self.compiled.updated_parameter_names)
            self._model_by_batch_size[batch_size] = model
        model = self._model_by_batch_size[batch_size].train(training)
        if (batch_size, training) not in self._captured_sizes_and_modes:
            _ = model.plan  # before `_seed_generators`: tracing changes the random state
            self._captured_sizes_and_modes.add((batch_size, training))
        return model

    def _apply_feed(self, x: Any, targets: Any, batch_size: int) -> tuple[torch.Tensor, Any]:
        """Return the features and labels of `feed`; an error on one rank is raised on all."""
        lo, hi = self.grid.sample_range(batch_size)
        shape = hi - lo, self._sample_shape(self.input_shape)[0], *x.shape[1:-1]
        with all_or_none(self.grid.world) if self.grid.size > 1 else nullcontext():
            feed = self._feed or partial(channels_first, dtype=self.dtype)
            return apply_feed(feed, x, targets, shape, self._input_dtype, self.input)

    def apply_scheduled_rates(self) -> None:
        """Set the optimiser's learning rate and momentum for the next step."""
        if self.optimizer.schedule is not None or self.learning_rate_scale != 1:
            for group, rate in zip(self.torch_optimizer.param_groups, self._base_learning_rates, strict=True):
                if rate is not None:
                    group["lr"] = rate * self.learning_rate_scale
                if self.scheduled_momentum is not None and "betas" in group:
                    group["betas"] = (self.scheduled_momentum, *group["betas"][1:])
                elif self.scheduled_momentum is not None and "momentum" in group:
                    group["momentum"] = self.scheduled_momentum

    @contextmanager
    def _seed_generators(self) -> Iterator[None]:
        """Seed the global generators with the seed and the step; afterwards, restore the CPU's generator."""
        if self.grid.rank and self.grid.world.shares_process:
            yield
            return
        with torch.random.fork_rng(devices=[]):
            seed = key(self.seed, "step", self.step) >> 1
            torch.default_generator.manual_seed(seed)
            if torch.cuda.is_initialized():  # torch.manual_seed takes 0.8 ms if no device is in use
                torch.cuda.manual_seed_all(seed)
            yield

    @contextmanager
    def _attribute_errors_to_model(self, prefix: str = "") -> Iterator[None]:
        """Mark errors in the block as errors of this model, so that messages give its position in a file."""
        try:
            yield
        except UserError as error:
            error.args, error.subject = (f"{prefix}{error}",), self
            raise
        except RuntimeError as error:
            if not self.has_integer_inputs or not DTYPE_ERROR_PATTERN.search(str(error)):
                raise
            raise ConfigError(f"feed: {error}; if the model needs floating-point features, return float32") from error
