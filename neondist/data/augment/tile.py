"""A rank's tile of augmented images, made from the cells that it depends on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from ...arrays import rng
from ...geometry import Box
from .base import NUMBERS, Draw, Transform

#: returns cells (n, *cells, ...) of the samples of some numbers; slices count from the first cell of `held`
Read: TypeAlias = Callable[[np.ndarray, tuple[slice, ...]], np.ndarray]


class AugmentedTile:
    """The cells of a box of each image after all steps; which cells of the image these need, and how they are made.

    Every number is a function of the seed, the epoch, the sample and the global cell, and a step's results are of whole
    images, so all grids, batches and orders of reading have the same.

    Parameters
    ----------
    transforms : sequence of Transform
        The steps, in their order.
    seed : int
    shape : (*spatial, C) of whole images
    box : cells that are wanted
    held : cells that can be read, or None for all that can ever be needed
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
        """Return the same cells of the images as they are."""
        return AugmentedTile((), self.seed, self.shape, self.box, self.held)

    @property
    def moves(self) -> bool:
        """Whether other cells are wanted than those that are held, or in another order."""
        return self.held != self.box or any(transform.moves for transform in self.transforms)

    def images(self, read: Read, numbers: np.ndarray, epoch: int, cells: Sequence[slice] | None = None) -> np.ndarray:
        """Return the wanted cells (n, *cells, C) of some samples; or those of them at `cells`, counted from the first.

        Parameters
        ----------
        read : of cells as the network sees them, which may be written to
        """
        box = self.box
        if cells is not None:
            box = Box(tuple(c.start for c in cells), tuple(c.stop for c in cells)).shift(self.box.lo)
        return self._made(read, numbers, epoch, box, False)

    def labels(self, read: Read, numbers: np.ndarray, epoch: int) -> np.ndarray:
        """Return the wanted cells (n, *cells, ...) of the label maps of some samples."""
        return self._made(read, numbers, epoch, self.box, True)

    def _made(self, read: Read, numbers: np.ndarray, epoch: int, box: Box, labels: bool) -> np.ndarray:
        index = numbers[:, None] * NUMBERS + np.arange(NUMBERS)
        drawn = []
        for place, transform in enumerate(self.transforms):
            if transform.moves or not labels:
                stream = rng.key(self.seed, "augment", place, type(transform).__name__, epoch)
                drawn.append((transform, rng.uniform(stream, index).tolist(), rng.key(stream, "cells")))
        if not drawn or box.empty or not len(numbers):
            return read(numbers, box.relative_to(self.held).slices)
        made = defaultdict[Box, list[tuple[int, list[Any]]]](list)
        for at, number in enumerate(numbers.tolist()):
            steps, source = [], box
            for transform, uniform, stream in reversed(drawn):
                draw = Draw(self.shape, uniform[at], stream, number)
                if transform.applies(draw):
                    wanted, source = source, transform.source(source, draw)
                    steps.append((transform.labels if labels else transform.image, source, wanted, draw))
            made[source].append((at, steps))
        out: np.ndarray | None = None
        for source, samples in made.items():
            cells = read(numbers[[at for at, _ in samples]], source.relative_to(self.held).slices)
            for found, (at, steps) in zip(cells, samples, strict=True):
                for step, *where in reversed(steps):
                    found = step(found, *where)
                if out is None:
                    out = np.empty((len(numbers), *found.shape), found.dtype)
                out[at] = found
        assert out is not None
        return out
