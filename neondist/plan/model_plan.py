"""What runs, checks and benchmarks ask of the plan of a model of either kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from ..geometry import GridShape, Partition
from .parameters import ParameterPlan

Shape = tuple[int, ...]


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
        """That of the model, (*spatial, C), global and without the batch."""

    @property
    def output_shape(self) -> Shape:
        """That of the model, channels last, global and without the batch."""

    @property
    def parameters(self) -> ParameterPlan:
        """The trained parameters."""

    @property
    def wide_tiles(self) -> Partition | None:
        """The tiles of the image that the model reads, if they overlap."""

    @property
    def thinnest(self) -> int:
        """The fewest cells along an axis of what is cut into tiles; 1 if nothing is."""

    @property
    def label_cells(self) -> Shape:
        """The extent of the maps of labels that the model wants; () if labels are as the data set has them."""

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
