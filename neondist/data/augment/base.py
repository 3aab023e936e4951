"""Base class of augmentations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, Literal, TypeAlias

import numpy as np

from ...arrays import rng
from ...errors import ConfigError
from ...geometry import Box, Range
from ...registry import Registered
from ...registry.ranges import between

Axis: TypeAlias = Literal["depth", "height", "width"]
Probability: TypeAlias = Annotated[float, between(0, 1)]
AXIS_NAMES = ("depth", "height", "width")
RANDOM_NUMBERS_PER_SAMPLE = 4  # random numbers of a transform per sample: whether it applies, and one for each axis


@dataclass(frozen=True)
class RandomDraw:
    """Random draws of one transform for one sample in one epoch; they depend only on these and the seed.

    Attributes
    ----------
    shape : (*spatial, C) of the whole image
    random_numbers : `RANDOM_NUMBERS_PER_SAMPLE` numbers in [0, 1)
    stream : key of further random numbers, selected by `stream_indices`
    sample : index of the sample
    """

    shape: tuple[int, ...]
    random_numbers: Sequence[float]
    stream: int
    sample: int

    @property
    def extent(self) -> tuple[int, ...]:
        """Spatial extents of the whole image."""
        return self.shape[:-1]

    def stream_indices(self, shape: tuple[int, ...], cells: Sequence[slice]) -> np.ndarray:
        """Return the uint64 indices in `stream` of some cells of an array of global `shape` for this sample."""
        return rng.row_major_indices(shape, cells) + np.uint64(self.sample * prod(shape) % (1 << 64))


class Transform(Registered, ABC):
    """Base class of augmentations, defined on whole images; a tile of the result is computed from a box of the input.

    Input and output have the same shape, (*spatial, C). `transform_image` takes and returns normalised
    cells, and may overwrite its input. A transform with `moves_cells` is also applied to label maps.
    """

    moves_cells = False
    rate: float = 1.0

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise ConfigError if images (*spatial, C) cannot be transformed."""

    def applies_to(self, draw: RandomDraw) -> bool:
        """Return whether this sample is transformed in this epoch; the probability is `rate`."""
        return draw.random_numbers[0] < self.rate

    def max_source_box(self, box: Box, extent: Sequence[int]) -> Box:
        """Return a box that contains `source_box(box, draw)` for every random draw."""
        return box

    def source_box(self, box: Box, draw: RandomDraw) -> Box:
        """Return the box of input cells from which a box of the output is computed; neither box is empty."""
        return box

    @abstractmethod
    def transform_image(self, cells: np.ndarray, source: Box, box: Box, draw: RandomDraw) -> np.ndarray:
        """Return the cells of `box` (*box.shape, C) from those of `source`."""

    def transform_labels(self, cells: np.ndarray, source: Box, box: Box, draw: RandomDraw) -> np.ndarray:
        """Return the labels (*box.shape, ...) of `box`, each taken from the labels of `source`."""
        return cells


def axis_indices(transform: Transform, axes: Sequence[str], shape: Sequence[int]) -> list[int]:
    """Return the indices of axes by name; ConfigError if images (*spatial, C) have no such axis."""
    names = AXIS_NAMES[-(len(shape) - 1) :]
    for name in axes:
        if name not in names:
            raise ConfigError(
                f"{type(transform).__name__}: axes: images of shape {tuple(shape)} have no {name}; choose from"
                f" {', '.join(names)}"
            )
    return [names.index(name) for name in axes]


def map_axis_ranges(box: Box, extent: Sequence[int], map_range: Callable[[int, int, int], Range]) -> Box:
    """Return the box with the range map_range(lo, hi, n) on each axis: `box` has the range [lo, hi), images n cells."""
    return Box.from_ranges([map_range(lo, hi, n) for (lo, hi), n in zip(box.axes(), extent, strict=True)])
