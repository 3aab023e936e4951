"""Plan of a module in an experiment, with the interface required by training, `neondist check` and benchmarks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from ...arrays.precision import FLOAT32, ComputePrecision
from ...errors import ConfigError
from ...geometry import GridShape, OverlappingPartition, Partition
from ...layers import Parameter
from ...plan import report
from ...plan.blocks import IMAGE_COPIES
from ...plan.layer import TrainingCosts
from ...plan.model_plan import Workload
from ...plan.parameters import ParameterPlan
from ...strategies import Strategy, StrategyBuilder
from ...terminal.console import counted
from ..execution.options import ExecutionOptions
from ..ir.graph import GRADIENTS, Value
from ..ir.layout import Mesh, NeededRanges, default_layout
from ..lowering.costs import PlanCosts, last_output_shape, module_paths
from ..lowering.plan import TorchPlan, Traffic
from ..lowering.traffic import BackwardSteps
from ..lowering.training_memory import TrainingMemory
from ..module.parameters import MODULE_KEY, parameters_by_name, sparse_embedding_weights
from .losses_and_optimizers import TorchOptimizer

MAX_TABLE_ROWS = 40
"""Maximum number of rows of the table; beyond it, nested modules are merged."""
TABLE_LEGEND = """\
module: nested modules are merged if there are many; output: global shape of the last
step's output; sent: message bytes per training step, forward and backward; maximum and
sum over ranks; summed: bytes that a rank contributes to reductions, maximum over ranks;
flops: multiplications and additions in products per rank, forward and backward;
memory: outputs, parameters, gradients and optimiser state on the rank using the most
memory; not all of it is live at the same time, see the peak below the table. The loss
and the checks before a pass, which reduce a few bytes, are not counted"""


@dataclass(frozen=True)
class ModulePlan:
    """Plan of a module, which has no neondist layers, with the interface of a layer model's plan.

    Attributes
    ----------
    steps : TorchPlan
        Steps of rank 0, whose tile is the largest.
    weights_bytes : int
        Bytes of parameters and buffers.
    trained : tuple of str
        Names of the parameters that require gradients, including aliases.
    parameters : ParameterPlan
        Trained parameters on which outputs depend, without aliases.
    memory_limit : int or None
        Memory limit of the ranks on a machine, if set.
    group_description : str
        Description of fused segments or blocks.
    overlapping_tiles : Partition or None
        Tiles of the image that ranks read, if these overlap.
    """

    grid: GridShape
    input_shape: tuple[int, ...]
    batch_size: int
    steps: TorchPlan
    weights_bytes: int
    trained: tuple[str, ...]
    parameters: ParameterPlan
    memory_limit: int | None
    group_description: str
    overlapping_tiles: Partition | None
    is_streamed = False
    has_vector_output = False  # unknown: outputs (N, L) may be signals without a channel axis

    @classmethod
    def create(
        cls,
        module: nn.Module,
        program: Any,
        execution: ExecutionOptions,
        shape: tuple[int, ...],
        input_shape: tuple[int, ...],
        grid: GridShape,
        optimizer: TorchOptimizer | None,
        dtype: np.dtype,
        strategy: StrategyBuilder | Strategy | None,
        memory_limit: int | None,
        precision: ComputePrecision = FLOAT32,
    ) -> ModulePlan:
        """Return the plan of a module under execution options, given its exported program for inputs of a shape.

        Raises
        ------
        UserError
            The module cannot be distributed, or returns no tensor.
        """
        mesh = Mesh.from_grid(grid, len(input_shape) - 1)
        steps, _, lowering = execution.lower(program, mesh, 0, [default_layout(shape, mesh)], module)
        if not any(isinstance(out, int) for out in steps.outputs):
            raise ConfigError("factory: the module returns no tensor; return at least one")
        weights_bytes = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
        trained = tuple(name for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad)
        slots_per_parameter = 0 if optimizer is None else optimizer.slots_per_parameter
        parameters = ParameterPlan(_updated_parameters(module, steps), grid, dtype, slots_per_parameter, strategy)
        if precision.has_16_bit_operands:  # autocast also copies the weights
            steps = steps.under_autocast(getattr(torch, precision.name))
            weights_bytes += weights_bytes // 2
        description = lowering.group_description if lowering else ""
        tiles = _tiles_with_overlap(lowering.widened_ranges if lowering else (), input_shape[:-1], mesh)
        return cls(
            grid, input_shape, shape[0], steps, weights_bytes, trained, parameters, memory_limit, description, tiles
        )

    @property
    def needed_bytes(self) -> int:
        """Bytes that a rank needs in a forward pass without gradients, including weights, images and outputs."""
        image_bytes = sum(self.steps.values[end].nbytes for end in (self.steps.inputs[0], self.output.id))
        return self.weights_bytes + self.steps.peak()[0] + IMAGE_COPIES * image_bytes

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Global shape of the first output, channels last, without the batch."""
        shape = self.output.shape[1:]
        return (*shape[1:], *shape[:1])

    @property
    def output(self) -> Value:
        """First output that is a tensor."""
        return self.steps.values[next(out for out in self.steps.outputs if isinstance(out, int))]

    @property
    def updated_parameter_names(self) -> list[str]:
        """Names of the parameters that a training step updates."""
        return [name.removeprefix(f"{MODULE_KEY}/") for name in self.parameters.parameters]

    @property
    def first_windowed_layer(self) -> None:
        """None, as a module has no neondist layers whose views could be drawn."""

    @property
    def min_extent(self) -> int:
        """Smallest extent along an axis of any tiled value; 1 if nothing is tiled."""
        atoms = [atom for value in self.steps.values for dim in value.layout_or_none or () for atom in dim]
        return min((atom.extent for atom in atoms if atom.axis), default=1)

    def settings_equal_on_all_ranks(self) -> list[str]:
        """Return the settings, one per line, that must be the same on all ranks, other than the strategy."""
        return [f"module: {self.steps.digest}"]

    def memory_by_layer(self) -> Iterator[tuple[str, int]]:
        """Yield the name of each step, and the bytes of its inputs and outputs on rank 0."""
        for step in self.steps.steps:
            yield step.name, sum(self.steps.values[value].nbytes for value in (*step.inputs, *step.outputs))

    def bytes(self, rank: int) -> int:
        """Return the bytes of halos, and of keys and values in rings, that a rank sends in a training step."""
        return sum(
            count for (kind, _, _), count in self._traffic_without_gradients(rank).items() if kind in ("halo", "ring")
        )

    def reduction_bytes(self, rank: int) -> dict[str, int]:
        """Return the bytes that a rank contributes to reductions in a training step, by step, and for 'gradients'.

        The reduction of the loss is not included.
        """
        return self._bytes_of_kind(rank, "sum", self.parameters.reduction_bytes(rank))

    def redistribution_bytes(self, rank: int) -> dict[str, int]:
        """Return the bytes that a rank sends in redistributions of a training step, by step, and for 'gradients'."""
        return self._bytes_of_kind(rank, "redistribution", self.parameters.redistribution_bytes(rank))

    def _bytes_of_kind(self, rank: int, kind: str, gradient_bytes: int) -> dict[str, int]:
        bytes_by_step = Counter({GRADIENTS: gradient_bytes})
        for (step_kind, name, _), count in self._traffic_without_gradients(rank).items():
            bytes_by_step[name] += count * (step_kind == kind)
        return {name: count for name, count in bytes_by_step.items() if count}

    def benchmark_row_of(self, name: str) -> str:
        """Return the name of a step's row in tables; names that are not steps are returned unchanged."""
        return self._row_by_step.get(name, name)

    @property
    def class_by_benchmark_row(self) -> dict[str, str]:
        """Rows of tables; the values, which name layer classes in other plans, are empty."""
        return dict.fromkeys(self._row_by_step.values(), "")

    def costs(self) -> dict[str, TrainingCosts]:
        """Return the costs of a training step, by row."""
        step_names_by_row: dict[str, list[str]] = {}
        for name in self.all_costs.step_names:
            step_names_by_row.setdefault(self.benchmark_row_of(name), []).append(name)
        return {row: self.all_costs.costs_of_steps(steps) for row, steps in step_names_by_row.items()}

    @cached_property
    def all_costs(self) -> PlanCosts:
        """The costs of all steps."""
        return PlanCosts(self.steps, self.trained, self.parameters.slots_per_parameter)

    def memory(self, rank: int = 0) -> int:
        """Return the bytes that a rank needs in training: values, gradients, parameters and the optimiser's arrays."""
        return self._training_memory.peak(rank) + self.parameters.memory(rank)

    @property
    def max_training_memory(self) -> int:
        """Bytes needed in training by the rank that needs the most."""
        return self.memory(self.all_costs.max_memory_rank)

    @cached_property
    def workload(self) -> Workload:
        """Workload of the busiest rank in a training step."""
        total = self.all_costs.total
        message_kinds = [kind for (kind, _, _), count in self.all_costs.traffic.items() if count.any()]
        num_sums = message_kinds.count("sum")
        memory_traffic = self.all_costs.memory_traffic()
        num_neighbours = min(8, self.grid.tiles - 1)  # estimate: the neighbours of a tile
        num_messages = (len(message_kinds) - num_sums) * num_neighbours
        return Workload(
            total.flops,
            memory_traffic,
            num_messages,
            total.max_sent_bytes,
            num_sums,
            total.max_summed_bytes,
            self.parameters,
        )

    def memory_traffic(self, rank: int = 0) -> int:
        """Return the minimum number of bytes that a rank reads and writes in a training step."""
        return self.all_costs.memory_traffic() + self.parameters.memory_traffic(rank)

    def table(self) -> Any:
        """Return a rich table of modules, with notes and a legend."""
        costs_by_row = self.costs()
        total, parameters = self.all_costs.total, self.parameters
        summed_bytes = parameters.reduction_bytes(0)
        sent_bytes = parameters.redistribution_bytes(0)
        rank = self.all_costs.max_memory_rank
        notes = [f"{counted(len(self.steps.steps), 'step')}; memory is that of rank {rank}, which needs the most"]
        peak_text = report.format_size(self.max_training_memory)
        array_names = "parameters, optimiser, values and gradients"
        notes.append(f"planned peak: {peak_text}, for {array_names}; --measure-memory measures the whole process")
        if summed_bytes:
            notes.append(f"gradient reduction: {report.format_size(summed_bytes)} per rank and step")
        if sent_bytes:
            notes.append(
                f"gradients to owners and values back: {report.format_size(sent_bytes)} sent per rank and step"
            )
        if self.all_costs.steps_without_flop_count:
            names = ", ".join(dict.fromkeys(self.all_costs.steps_without_flop_count))
            notes.append(f"flops exclude {names}, which could not be counted")
        rows = [(name, cost, self._output_shape_text(name)) for name, cost in costs_by_row.items()]
        return report.module_costs_table(rows, total, [*notes, *filter(None, [self.group_description])], TABLE_LEGEND)

    def describe(self) -> str:
        """Return the table as plain text, with the grid above."""
        headline = report.plan_headline(self.parameters.dtype, self.grid, self.input_shape, self.batch_size)
        return report.render_plain_text(headline, self.table())

    @cached_property
    def _training_memory(self) -> TrainingMemory:
        return TrainingMemory(self.steps, self.trained)

    def _traffic_without_gradients(self, rank: int) -> Traffic:
        """Return the traffic of a training step without the reductions of parameter gradients."""
        traffic = self.steps.traffic(rank, self.trained)
        return {account: count for account, count in traffic.items() if account[1] != GRADIENTS}

    @cached_property
    def _row_by_step(self) -> dict[str, str]:
        return module_paths(list(dict.fromkeys(step.name for step in self.steps.steps)), MAX_TABLE_ROWS)

    def _output_shape_text(self, row: str) -> str:
        step_names = {name for name, label in self._row_by_step.items() if label == row}
        shape = last_output_shape(self.steps, step_names)
        return "-" if shape is None else report.join_extents(shape) or "1"


def _tiles_with_overlap(
    widened_ranges: Sequence[NeededRanges], extent: tuple[int, ...], mesh: Mesh
) -> Partition | None:
    """Return the tiles of images that ranks read, if larger than the ranks' own tiles; else None."""
    if not widened_ranges or not widened_ranges[0]:
        return None
    ranges = (widened_ranges[0].get(dim, (0, [(0, n)]))[1] for dim, n in enumerate(extent, 2))
    return OverlappingPartition(extent, mesh.parts[1:], 1, tuple(map(tuple, ranges)))


def _updated_parameters(module: nn.Module, steps: TorchPlan) -> dict[str, Parameter]:
    """Return the parameters that a training step updates, under their first names."""
    names_by_parameter: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names_by_parameter.setdefault(parameter, []).append(name)
    trained_names = [name for aliases in names_by_parameter.values() for name in aliases]
    contributing_values = BackwardSteps(steps, trained_names).contributing_values
    return parameters_by_name(
        {
            aliases[0]: parameter
            for parameter, aliases in names_by_parameter.items()
            if any(steps.parameters.get(name) in contributing_values for name in aliases)
        },
        sparse_embedding_weights(module),
    )
