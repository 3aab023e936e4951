"""What a model is made of: single layers, and containers of them."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..backends import Backend
from ..comm import ProcessGrid
from ..registry import Registered, serial_class

if TYPE_CHECKING:
    from .base import Layer

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Context:
    """What all layers of a built model share."""

    grid: ProcessGrid
    backend: Backend
    dtype: np.dtype
    seed: int
    batch_size: int


class Node(Registered, ABC):
    """A piece of a network with one input and one output.

    Attributes
    ----------
    name : str
        Given, or made by the model from the class and a number.
    autoencodes : bool
        Whether GB trains it without targets: it has `filters`, and weights of that name.
    pools_squares : bool
        Whether its output is the root of the sum of squares over each window.
    """

    name: str | None
    autoencodes = False
    pools_squares = False

    @abstractmethod
    def output_shape_for(self, input_shape: Shape) -> Shape:
        """Return the global output shape, without the batch; raises ShapeError or ConfigError if there is none."""

    @abstractmethod
    def lower(self, graph: Any, value: int) -> int:
        """Append what this node does with a value to a `plan.Graph`; return the value that it gives."""

    @abstractmethod
    def chains(self, input_shape: Shape) -> Iterator[list[tuple[Node, Shape]]]:
        """Yield every chain inside: what is directly in it, with the shape of its input; outer chains first."""

    @abstractmethod
    def give_names(self, prefix: str, counts: dict[str, int]) -> None:
        """Name what has no name: prefix, the class as a word, and a number from `counts`."""

    @abstractmethod
    def twin(self) -> Node:
        """Return the distributed twin, under the same names."""

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
