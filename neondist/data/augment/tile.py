"""A rank's tile of augmented images, computed from the cells that it depends on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from ...arrays import rng
from ...geometry import Box
from .base import NUMBERS, Draw, Transform

#: returns cells (n, *cells, ...) of samples by number; slices count from the first cell of `held`
Read: TypeAlias = Callable[[np.ndarray, tuple[slice, ...]], np.ndarray]


class AugmentedTile:
    """A box of each image after all transforms, computed from the cells that it depends on.

    Random draws are functions of the seed, epoch, sample and global cell, and transforms are defined on whole images.
    So the result does not depend on the grid, the batches or the order of reading.

    Parameters
    ----------
    transforms : sequence of Transform
        Transforms, in order of application.
    seed : int
    shape : (*spatial, C) of whole images
    box : cells of the result
    held : cells that can be read; None: all cells that any random draw may need
    """

    def __init__(
        self, transforms: Sequence[Transform], seed: int, shape: Sequence[int], box: Box, held: Box | None = None
    ) -> None:
        self.transforms, self.seed, self.shape, self.box = tuple(transforms), seed, tuple(shape), box
        if held is None:
            held = box
            for transform in () if box.empty else reversed(self.transforms):
                held = transform.reach(held, self.shape[:-1])
        self.held = held

    def plain(self) -> AugmentedTile:
        """Return the same box without augmentation."""
        return AugmentedTile((), self.seed, self.shape, self.box, self.held)

    @property
    def moves(self) -> bool:
        """Whether `box` differs from `held`, or a transform moves cells."""
        return self.held != self.box or any(transform.moves for transform in self.transforms)

    def images(self, read: Read, numbers: np.ndarray, epoch: int, cells: Sequence[slice] | None = None) -> np.ndarray:
        """Return the box (n, *cells, C) of some samples; or a part of it, `cells`, counted from its first cell.

        Parameters
        ----------
        read : returns normalised cells, which may be overwritten
        """
        box = self.box
        if cells is not None:
            box = Box(tuple(c.start for c in cells), tuple(c.stop for c in cells)).shift(self.box.lo)
        return self._compute(read, numbers, epoch, box, False)

    def labels(self, read: Read, numbers: np.ndarray, epoch: int) -> np.ndarray:
        """Return the box (n, *cells, ...) of the label maps of some samples."""
        return self._compute(read, numbers, epoch, self.box, True)

    def _compute(self, read: Read, numbers: np.ndarray, epoch: int, box: Box, labels: bool) -> np.ndarray:
        index = numbers[:, None] * NUMBERS + np.arange(NUMBERS)
        draws = []
        for order, transform in enumerate(self.transforms):
            if transform.moves or not labels:
                stream = rng.key(self.seed, "augment", order, type(transform).__name__, epoch)
                draws.append((transform, rng.uniform(stream, index).tolist(), rng.key(stream, "cells")))
        if not draws or box.empty or not len(numbers):
            return read(numbers, box.relative_to(self.held).slices)
        by_source = defaultdict[Box, list[tuple[int, list[Any]]]](list)
        for position, number in enumerate(numbers.tolist()):
            steps, source = [], box
            for transform, uniform, stream in reversed(draws):
                draw = Draw(self.shape, uniform[position], stream, number)
                if transform.applies(draw):
                    target, source = source, transform.source(source, draw)
                    steps.append((transform.labels if labels else transform.image, source, target, draw))
            by_source[source].append((position, steps))
        out: np.ndarray | None = None
        for source, samples in by_source.items():
            cells = read(numbers[[position for position, _ in samples]], source.relative_to(self.held).slices)
            for sample, (position, steps) in zip(cells, samples, strict=True):
                for step, *arguments in reversed(steps):
                    sample = step(sample, *arguments)
                if out is None:
                    out = np.empty((len(numbers), *sample.shape), sample.dtype)
                out[position] = sample
        assert out is not None
        return out
