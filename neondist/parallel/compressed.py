"""The part of the flat gradients that is sent compressed, or as the non-zero rows of sparse gradients."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from math import prod
from typing import Any

import numpy as np

from ..arrays.namespace import namespace, to_host
from ..comm import Reductions
from .compressors import Compressor, Shape, SyncState, create_compressor
from .rows import ROWS_COMPRESSOR, RowExchange, SparseParameterLayout
from .sync import are_all_finite


class CompressedAllReduce:
    """Gradients that are summed over all ranks: by compressors, or as non-zero rows for sparse parameters.

    Parameters
    ----------
    parameters : iterable of (str, tuple, str)
        Name, shape and compressor of each parameter, in order; parameters with the same compressor are contiguous.

    Attributes
    ----------
    compressors_with_start : list of (int, Compressor)
        Each compressor, with the start of its gradients.
    """

    def __init__(self, reductions: Reductions, gradients: Any, parameters: Iterable[tuple[str, Shape, str]]) -> None:
        self.reductions, self.gradients = reductions, gradients
        self.compressors_with_start: list[tuple[int, Compressor]] = []
        sparse_layouts, start, num_ranks = [], 0, reductions.grid.size
        for specification, group in groupby(parameters, lambda parameter: parameter[2]):
            shapes = {name: shape for name, shape, _ in group}
            if specification != ROWS_COMPRESSOR:
                compressor = create_compressor(specification, shapes, np.dtype(gradients.dtype))
                self.compressors_with_start.append((start, compressor))
            for shape in shapes.values():
                if specification == ROWS_COMPRESSOR:
                    sparse_layouts.append(SparseParameterLayout(start, prod(shape[1:]), [(0, prod(shape))] * num_ranks))
                start += prod(shape)
        self.row_exchange = RowExchange(reductions, sparse_layouts if num_ranks > 1 else [])

    def sum_over_ranks(self) -> None:
        """Replace the gradients by their sums, and keep the residuals for the next step. Collective.

        On one rank, no residual remains. If a sum is not finite, the compressor's state does not change.
        """
        self.row_exchange.reduce_rows(self.gradients)
        for start, compressor in self.compressors_with_start:
            gradient_part = self.gradients[start : start + compressor.residual.size]
            send = to_host(gradient_part) + compressor.residual
            alone = self.reductions.grid.size == 1
            total, residual = (send, np.zeros_like(send)) if alone else compressor.sum_over_ranks(self.reductions, send)
            gradient_part[...] = namespace(gradient_part).asarray(total)
            if are_all_finite(total):
                compressor.residual[...] = residual
                if not alone:
                    compressor.store_state_for_next_step()

    def sync_states(self) -> list[SyncState]:
        """Return the state kept from step to step, as views."""
        return [state for _, compressor in self.compressors_with_start for state in compressor.sync_states()]
