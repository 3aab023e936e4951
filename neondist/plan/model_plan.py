"""Interface of the plan of a model of either kind, for runs, checks and benchmarks."""

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
        Floating point operations of products.
    moved : float
        Bytes that layers read and write, those of the update left out.
    messages, sent : float
        Of halos and redistributions, and their bytes.
    sums, summed : float
        Sums over ranks, and the bytes that are given into them.
    parameters : ParameterPlan
    """

    flops: float
    moved: float
    messages: float
    sent: float
    sums: float
    summed: float
    parameters: ParameterPlan

    @property
    def shared(self) -> list[ParameterSpec]:
        """The parameters that are not cut over the tiles: those that strategies can give to owners."""
        return [spec for spec in self.parameters.specs if spec.name in self.parameters.whole]


class ModelPlan(Protocol):
    """A training step of a model on every rank of a grid, from arithmetic alone."""

    @property
    def grid(self) -> GridShape:
        """The grid."""

    @property
    def batch_size(self) -> int:
        """Samples of a batch, global."""

    @property
    def streams(self) -> bool:
        """Whether images are read strip by strip."""

    @property
    def input_shape(self) -> Shape:
        """Input shape of the model, (*spatial, C), global and without the batch."""

    @property
    def output_shape(self) -> Shape:
        """Output shape of the model, channels last, global and without the batch."""

    @property
    def parameters(self) -> ParameterPlan:
        """The trained parameters."""

    @property
    def wide_tiles(self) -> Partition | None:
        """The tiles of the image that the model reads, if they overlap."""

    @property
    def first_window(self) -> LayerPlan | None:
        """The first layer with a window, if it sees the image at its full extent."""

    @property
    def min_extent(self) -> int:
        """The fewest cells along an axis of what is cut into tiles; 1 if nothing is."""

    @property
    def label_cells(self) -> Shape:
        """The extent of the maps of labels that the model wants; () if labels are as the data set has them."""

    @property
    def workload(self) -> Workload:
        """Workload of the busiest rank in a training step."""

    @property
    def trained_in(self) -> int:
        """Bytes of the rank that needs most in training, if all ranks hold all of the optimiser's arrays."""

    @property
    def rows(self) -> Mapping[str, str]:
        """The rows of a benchmark's table, and the class of each."""

    def row_of(self, name: str) -> str:
        """Return in which row a layer or step is; that of what is neither is its own."""

    def outline(self) -> list[str]:
        """Return what all ranks must agree on, beside the strategy, a fact a line."""

    def bytes(self, rank: int) -> int:
        """Return the bytes of halos that a rank sends in a training step; where steps differ, in the mean."""

    def reduced(self, rank: int) -> dict[str, int]:
        """Return the bytes that a rank gives into sums in a training step, by layer or step, and of 'gradients'."""

    def redistributed(self, rank: int) -> dict[str, int]:
        """Return the bytes that a rank sends in redistributions of a training step, by layer or step."""

    def memory(self, rank: int) -> int:
        """Return the bytes that a rank holds in a training step."""

    def moved(self, rank: int) -> int:
        """Return the bytes that a rank reads and writes in a training step, at least."""

    def each_needs(self) -> Iterator[tuple[str, int]]:
        """Yield the name of each layer or step, and the bytes that it needs by itself on the fullest rank."""

    def table(self) -> Any:
        """Return the plan for a rich console to print: a table, what ranks do together, and a legend."""

    def describe(self) -> str:
        """Return the same as plain text, with the grid above: what `neondist check` prints."""
