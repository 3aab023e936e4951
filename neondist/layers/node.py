"""What a model is made of: single layers, and containers of them."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..arrays import Phase
from ..backends import Backend
from ..comm import ProcessGrid
from ..registry import Registered, serial_class

if TYPE_CHECKING:
    from .base import Layer
    from .branches import Branches

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Context:
    """What all layers of a built model share."""

    grid: ProcessGrid
    backend: Backend
    dtype: np.dtype
    seed: int
    batch_size: int


class Taker(Protocol):
    """Who gets an output."""

    def input_place(self, samples: int) -> Any | None:
        """Return the array where it wants that, this rank's tile; None: it has no wish."""


class Node(Registered, ABC):
    """A piece of a network with one input and one output.

    Attributes
    ----------
    name : str
        Given, or made by the model from the class and a number.
    needs_input_gradient : bool
        False for what comes first: `bprop` may return None.
    autoencodes : bool
        Whether GB trains it without targets: it has `filters`, and weights of that name.
    pools_squares : bool
        Whether its output is the root of the sum of squares over each window.
    """

    name: str | None
    needs_input_gradient = True
    autoencodes = False
    pools_squares = False

    @abstractmethod
    def output_shape_for(self, input_shape: Shape) -> Shape:
        """Return the global output shape, without the batch; raises ShapeError or ConfigError if there is none."""

    @abstractmethod
    def build(self, input_shape: Shape, context: Context) -> None:
        """Fix shapes and make the input, for a global input shape without the batch."""

    @property
    def transparent(self) -> bool:
        """Whether it gives on, unchanged, what comes in."""
        return False

    @abstractmethod
    def connect(self, preceding: Node | None, following: Taker | None) -> None:
        """Learn whose output alone comes in, and who alone gets what goes out; None: a container, or nobody."""

    def input_place(self, samples: int) -> Any | None:
        """Return the array where this node wants its input, this rank's tile; None: it has no wish."""
        return None

    @abstractmethod
    def fprop(self, x: Any, phase: Phase) -> Any:
        """Return this rank's tile of the output for its tile of the input."""

    @abstractmethod
    def bprop(self, dy: Any) -> Any:
        """Return the gradient of this rank's tile of the input, given that of the output."""

    @abstractmethod
    def walk(self, input_shape: Shape) -> Iterator[tuple[Layer, Shape]]:
        """Yield every single layer inside, with the shape of its input."""

    @abstractmethod
    def chains(self, input_shape: Shape) -> Iterator[list[tuple[Node, Shape]]]:
        """Yield every chain inside: what is directly in it, with the shape of its input; outer chains first."""

    def joins(self, input_shape: Shape) -> Iterator[tuple[Branches, Shape]]:
        """Yield every container inside that writes outputs of its own, with the shape of its input; none in a layer."""
        yield from ()

    @property
    def writes_early(self) -> bool:
        """Whether it writes its output before the last layer inside has worked."""
        return False

    @abstractmethod
    def give_names(self, prefix: str, counts: dict[str, int]) -> None:
        """Name what has no name: prefix, the class as a word, and a number from `counts`."""

    @abstractmethod
    def twin(self) -> Node:
        """Return the distributed twin, under the same names."""

    @property
    @abstractmethod
    def first_leaves(self) -> list[Layer]:
        """Those that no other layer inside comes before: their inputs need a gradient only if this node's does."""

    @property
    @abstractmethod
    def leaves(self) -> list[Layer]:
        """All single layers inside, in order."""

    def _name_itself(self, prefix: str, counts: dict[str, int]) -> None:
        if self.name is None:
            word = self._word()
            counts[word] = counts.get(word, 0) + 1
            self.name = f"{prefix}{word}{counts[word]}"

    def _word(self) -> str:
        """Return the class as a word: 'max_pooling' for MaxPoolingLayerDist."""
        word = serial_class(type(self)).__name__.removesuffix("Layer")
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", word).lower()
