"""Base class of augmentations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np

from ...arrays import rng
from ...errors import ConfigError
from ...geometry import Box, Range
from ...registry import Registered
from ...registry.ranges import between

Axis: TypeAlias = Literal["depth", "height", "width"]
Probability: TypeAlias = Annotated[float, between(0, 1)]
AXES = ("depth", "height", "width")
NUMBERS = 4  # random numbers of a transform per sample: whether it applies, and one for each axis


@dataclass(frozen=True)
class Draw:
    """Random draws of one transform for a sample and an epoch; a function of these and the seed only.

    Attributes
    ----------
    shape : (*spatial, C) of the whole image
    numbers : `NUMBERS` numbers in [0, 1)
    stream : key of further numbers, one per cell of arrays up to the image's size
    sample : number of the sample
    """

    shape: tuple[int, ...]
    numbers: Sequence[float]
    stream: int
    sample: int

    @property
    def extent(self) -> tuple[int, ...]:
        """The spatial axes of the whole image."""
        return self.shape[:-1]

    def index(self, shape: tuple[int, ...], cells: Sequence[slice]) -> Any:
        """Return the uint64 indices in `stream` of some cells of this sample's whole array of `shape`."""
        return rng.box_index(shape, cells) + np.uint64(self.sample * prod(shape) % (1 << 64))


class Transform(Registered, ABC):
    """Base class of augmentations, defined on whole images; a tile of the result is computed from a box of the input.

    Input and output have the same shape, (*spatial, C). `image` maps normalised cells to normalised cells, and may
    overwrite its input. A transform with `moves` is applied to label maps, too.
    """

    moves = False
    rate: float = 1.0

    def check(self, shape: Sequence[int]) -> None:
        """Raise ConfigError if images (*spatial, C) cannot be transformed."""

    def applies(self, draw: Draw) -> bool:
        """Whether this sample is transformed in this epoch, which has probability `rate`."""
        return draw.numbers[0] < self.rate

    def reach(self, box: Box, extent: Sequence[int]) -> Box:
        """Return a box that contains `source` of a box for any random draw."""
        return box

    def source(self, box: Box, draw: Draw) -> Box:
        """Return the input cells from which a box of the output is computed; neither is empty."""
        return box

    @abstractmethod
    def image(self, cells: np.ndarray, source: Box, box: Box, draw: Draw) -> np.ndarray:
        """Return the cells of `box` (*box.shape, C) from those of `source`."""

    def labels(self, cells: np.ndarray, source: Box, box: Box, draw: Draw) -> np.ndarray:
        """Return the labels (*box.shape, ...) of `box`, each one of the labels of `source`."""
        return cells


def axis_numbers(transform: Transform, axes: Sequence[str], shape: Sequence[int]) -> list[int]:
    """Return the indices of axes by name; ConfigError if images (*spatial, C) have no such axis."""
    names = AXES[-(len(shape) - 1) :]
    for name in axes:
        if name not in names:
            raise ConfigError(
                f"{type(transform).__name__}: axes: images of shape {tuple(shape)} have no {name}; choose from"
                f" {', '.join(names)}"
            )
    return [names.index(name) for name in axes]


def along_axes(box: Box, extent: Sequence[int], change: Callable[[int, int, int], Range]) -> Box:
    """Return the box of change(lo, hi, n) for each axis of a box in an image of `extent`."""
    return Box.from_ranges([change(lo, hi, n) for (lo, hi), n in zip(box.axes(), extent, strict=True)])
