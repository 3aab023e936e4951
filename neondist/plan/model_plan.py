"""Interface common to the plans of layer models and PyTorch modules, for runs, checks and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ..geometry import GridShape, Partition
from ..strategies import ParameterSpec
from .layer import LayerPlan
from .parameters import ParameterPlan

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Workload:
    """Workload of the busiest rank in a training step, without the synchronisation of gradients.

    Attributes
    ----------
    flops : float
        Floating-point operations of convolutions and matrix products.
    memory_traffic : float
        Bytes that layers read and write, excluding the parameter update.
    message_count, sent_bytes : float
        Number and bytes of messages, without reductions; for layer models, of halos only.
    reduction_count, reduction_bytes : float
        Number of reductions over ranks, and the bytes contributed to them.
    parameters : ParameterPlan
    """

    flops: float
    memory_traffic: float
    message_count: float
    sent_bytes: float
    reduction_count: float
    reduction_bytes: float
    parameters: ParameterPlan

    @property
    def untiled_specs(self) -> list[ParameterSpec]:
        """Parameters that are not partitioned over the tiles, to which strategies can assign owners."""
        return [spec for spec in self.parameters.specs if spec.name in self.parameters.untiled]


class ModelPlan(Protocol):
    """A training step of a model on every rank of a grid, computed without MPI."""

    @property
    def grid(self) -> GridShape:
        """The grid."""

    @property
    def batch_size(self) -> int:
        """Samples of a batch, global."""

    @property
    def is_streamed(self) -> bool:
        """Whether images are read strip by strip."""

    @property
    def input_shape(self) -> Shape:
        """Input shape of the model, (*spatial, C), global and without the batch."""

    @property
    def output_shape(self) -> Shape:
        """Output shape of the model, channels last, global and without the batch."""

    @property
    def has_vector_output(self) -> bool:
        """Whether the output is known to be a vector, which is compared with whole targets."""

    @property
    def parameters(self) -> ParameterPlan:
        """The trained parameters."""

    @property
    def overlapping_tiles(self) -> Partition | None:
        """The tiles of the image that the model reads, if they overlap."""

    @property
    def first_windowed_layer(self) -> LayerPlan | None:
        """The first layer with a window, if it sees the image at its full extent."""

    @property
    def min_extent(self) -> int:
        """Smallest extent of an axis that is cut into tiles; 1 if no axis is."""

    @property
    def workload(self) -> Workload:
        """Workload of the busiest rank in a training step."""

    @property
    def max_training_memory(self) -> int:
        """Maximum bytes of a rank in training, if all ranks hold the whole optimiser state."""

    @property
    def class_by_benchmark_row(self) -> Mapping[str, str]:
        """Class of each row of a benchmark's table, by the row's name."""

    def benchmark_row_of(self, name: str) -> str:
        """Return the table row of a layer or step; other names have their own rows."""

    def settings_equal_on_all_ranks(self) -> list[str]:
        """Return the settings, except the strategy, that all ranks must agree on, as one string each."""

    def bytes(self, rank: int) -> int:
        """Return the bytes of halos that a rank sends in a training step, averaged if steps differ."""

    def reduction_bytes(self, rank: int) -> dict[str, int]:
        """Return the bytes that a rank contributes to reductions in a training step, by layer or step."""

    def redistribution_bytes(self, rank: int) -> dict[str, int]:
        """Return the bytes that a rank sends for redistributions in a training step, by layer or step."""

    def memory(self, rank: int) -> int:
        """Return the bytes that a rank holds in a training step."""

    def memory_traffic(self, rank: int) -> int:
        """Return a lower bound on the bytes that a rank reads and writes in a training step."""

    def memory_by_layer(self) -> Iterator[tuple[str, int]]:
        """Yield the name of each layer or step and its maximum bytes on a rank."""

    def table(self) -> Any:
        """Return the plan for a rich console: a table, totals, and a legend."""

    def describe(self) -> str:
        """Return the table as plain text below a headline, as `neondist check` prints it."""
