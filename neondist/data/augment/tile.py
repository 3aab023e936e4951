"""A rank's tile of augmented images, computed from the cells that it depends on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from ...arrays import rng
from ...errors import ConfigError, set_error_subject
from ...geometry import Box
from .base import RANDOM_NUMBERS_PER_SAMPLE, RandomDraw, Transform

#: returns cells (n, *cells, ...) of samples by index; slices are relative to the first cell of `input_box`
CellReader: TypeAlias = Callable[[np.ndarray, tuple[slice, ...]], np.ndarray]


class AugmentedTile:
    """A box of each image after all transforms, computed from the cells that it depends on.

    Random draws are functions of the seed, epoch, sample and global cell, and transforms are defined on whole images,
    so the result does not depend on the grid, the batches or the order of reading.

    Parameters
    ----------
    transforms : sequence of Transform
        Transforms, in order of application.
    seed : int
    shape : (*spatial, C) of whole images
    box : cells of the result
    input_box : cells that can be read; None: all cells that any random draw may need
    """

    def __init__(
        self, transforms: Sequence[Transform], seed: int, shape: Sequence[int], box: Box, input_box: Box | None = None
    ) -> None:
        self.transforms, self.seed, self.shape, self.box = tuple(transforms), seed, tuple(shape), box
        if input_box is None:
            input_box = box
            for transform in () if box.empty else reversed(self.transforms):
                input_box = transform.max_source_box(input_box, self.shape[:-1])
        self.input_box = input_box

    def without_augmentation(self) -> AugmentedTile:
        """Return the same box without augmentation."""
        return AugmentedTile((), self.seed, self.shape, self.box, self.input_box)

    @property
    def moves_cells(self) -> bool:
        """Whether `box` differs from `input_box`, or a transform moves cells."""
        return self.input_box != self.box or any(transform.moves_cells for transform in self.transforms)

    def images(
        self, read: CellReader, indices: np.ndarray, epoch: int, cells: Sequence[slice] | None = None
    ) -> np.ndarray:
        """Return the box (n, *cells, C) of some samples, or the part `cells` of the box, relative to its first cell.

        Parameters
        ----------
        read : returns normalised cells, which this method may overwrite
        """
        box = self.box
        if cells is not None:
            box = Box(tuple(c.start for c in cells), tuple(c.stop for c in cells)).shift(self.box.lo)
        return self._compute_cells(read, indices, epoch, box, False)

    def label_maps(self, read: CellReader, indices: np.ndarray, epoch: int) -> np.ndarray:
        """Return the box (n, *cells, ...) of the label maps of some samples."""
        return self._compute_cells(read, indices, epoch, self.box, True)

    def _compute_cells(self, read: CellReader, indices: np.ndarray, epoch: int, box: Box, is_label: bool) -> np.ndarray:
        index = indices[:, None] * RANDOM_NUMBERS_PER_SAMPLE + np.arange(RANDOM_NUMBERS_PER_SAMPLE)
        draws = []
        for order, transform in enumerate(self.transforms):
            if transform.moves_cells or not is_label:
                stream = rng.key(self.seed, "augment", order, type(transform).__name__, epoch)
                draws.append((transform, rng.uniform(stream, index).tolist(), rng.key(stream, "cells")))
        if not draws or box.empty or not len(indices):
            return read(indices, box.relative_to(self.input_box).slices)
        samples_by_source = defaultdict[Box, list[tuple[int, list[Any]]]](list)
        for position, number in enumerate(indices.tolist()):
            transform_calls, source = [], box
            for transform, uniform, stream in reversed(draws):
                draw = RandomDraw(self.shape, uniform[position], stream, number)
                if transform.applies_to(draw):
                    target, source = source, transform.source_box(source, draw)
                    method = transform.transform_labels if is_label else transform.transform_image
                    transform_calls.append((method, source, target, draw))
            if not source.empty and source.intersect(self.input_box) != source:
                raise ConfigError(
                    f"augment: {', '.join(type(t).__name__ for t, *_ in draws)}: source_box {source} is not inside"
                    f" {self.input_box}, the cells of max_source_box; extend max_source_box, or correct source_box"
                )
            samples_by_source[source].append((position, transform_calls))
        out: np.ndarray | None = None
        for source, samples in samples_by_source.items():
            cells = read(indices[[position for position, _ in samples]], source.relative_to(self.input_box).slices)
            for sample, (position, transform_calls) in zip(cells, samples, strict=True):
                for method, *arguments in reversed(transform_calls):
                    sample = _apply(method, sample, *arguments)
                if out is None:
                    out = np.empty((len(indices), *sample.shape), sample.dtype)
                out[position] = sample
        assert out is not None
        return out


def _apply(method: Callable[..., Any], cells: np.ndarray, source: Box, target: Box, draw: RandomDraw) -> np.ndarray:
    """Return the transformed cells; raise ConfigError if their shape is not that of the target."""
    expected_shape = (*target.shape, *cells.shape[target.ndim :])
    result: np.ndarray = method(cells, source, target, draw)
    if getattr(result, "shape", None) != expected_shape:
        transform = method.__self__  # type: ignore[attr-defined]
        with set_error_subject(transform):
            result_shape = getattr(result, "shape", type(result).__name__)
            raise ConfigError(
                f"augment: {type(transform).__name__} returns {result_shape} for {target}; expected an array"
                f" of shape {expected_shape}"
            )
    return result
