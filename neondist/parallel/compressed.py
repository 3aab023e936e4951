"""The part of the flat gradients that does not travel as it is: compressed, or as rows."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from math import prod
from typing import Any

import numpy as np

from ..arrays.namespace import namespace, to_host
from ..comm import Reductions
from .compressors import Compressor, Shape, SyncState, compressor_of
from .rows import ROWS, RowExchange, Table
from .sync import finite


class CompressedGradients:
    """Gradients that are summed over all ranks by compressors, and as rows of sparse parameters.

    Parameters
    ----------
    reductions : Reductions
    gradients : flat array
        Those of these parameters.
    parameters : iterable of (str, tuple, str)
        Name, shape and compressor of each, in their order; those of one compressor lie side by side.

    Attributes
    ----------
    compressors : list of (int, Compressor)
        And where the gradients of each begin.
    """

    def __init__(self, reductions: Reductions, gradients: Any, parameters: Iterable[tuple[str, Shape, str]]) -> None:
        self.reductions, self.gradients = reductions, gradients
        self.compressors: list[tuple[int, Compressor]] = []
        tables, start, ranks = [], 0, reductions.grid.size
        for text, group in groupby(parameters, lambda one: one[2]):
            shapes = {name: shape for name, shape, _ in group}
            if text != ROWS:
                self.compressors.append((start, compressor_of(text, shapes, np.dtype(gradients.dtype))))
            for shape in shapes.values():
                if text == ROWS:
                    tables.append(Table(start, prod(shape[1:]), [(0, prod(shape))] * ranks))
                start += prod(shape)
        self.rows = RowExchange(reductions, tables if ranks > 1 else [])

    def finite(self) -> Any:
        """Return whether this rank's gradients are finite."""
        return finite(self.gradients)

    def sum(self) -> None:
        """Replace the gradients by their sums, and keep what was left out for the next step; collective.

        On one rank nothing is left out. If a sum is not finite, nothing else changes.
        """
        self.rows.reduce(self.gradients)
        for start, one in self.compressors:
            part = self.gradients[start : start + one.residual.size]
            given = to_host(part) + one.residual
            alone = self.reductions.grid.size == 1
            total, residual = (given, np.zeros_like(given)) if alone else one.sum(self.reductions, given)
            part[...] = namespace(part).asarray(total)
            if finite(total):
                one.residual[...] = residual
                if not alone:
                    one.commit()

    def state(self) -> list[SyncState]:
        """Return what is kept from step to step, as views."""
        return [state for _, one in self.compressors for state in one.state()]
