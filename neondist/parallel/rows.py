"""Sparse parameters: some rows of a parameter are sent with their ids, instead of the whole parameter.

A row of gradients is sent if it is not 0; a row of values, if it has changed or the old values are not given. Ranks
hold ranges of the flat parameter, whose ends may lie within a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arrays.namespace import namespace, to_host
from ..comm import Reductions

ROWS_COMPRESSOR = "rows"
"""Compressor text of sparse gradients, which are sent as ids and rows."""
FlatRange = tuple[int, int]
RowMessage = list[tuple[np.ndarray, np.ndarray]]
"""For each sparse parameter, the ids of rows and their values."""


class SparseParameterLayout(NamedTuple):
    """Position of a sparse parameter in a flat array, and its division among ranks.

    Attributes
    ----------
    ranges_by_rank : sequence of (start, stop)
        For each rank, the range of the parameter whose sums the rank receives.
    """

    start: int
    row_length: int
    ranges_by_rank: Sequence[FlatRange]

    def rank_view(self, flat: Any, rank: int) -> Any:
        """Return a rank's range of a flat array, as a view."""
        lo, hi = self.ranges_by_rank[rank]
        return flat[self.start + lo : self.start + hi]

    def nonzero_or_changed_rows(
        self, part: np.ndarray, rank: int, previous_part: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and values of the rows of a rank's range that differ from `previous_part` (None: from 0)."""
        lo, _ = self.ranges_by_rank[rank]
        row_ids = (np.flatnonzero(part if previous_part is None else part != previous_part) + lo) // self.row_length
        row_ids = row_ids[np.diff(row_ids, prepend=-1) > 0]
        return row_ids, part[self.element_indices(row_ids, rank)]

    def element_indices(self, row_ids: np.ndarray, rank: int) -> np.ndarray:
        """Return the indices, in a rank's range, of the elements of some rows."""
        lo, hi = self.ranges_by_rank[rank]
        indices = (row_ids[:, None] * self.row_length + np.arange(self.row_length)).reshape(-1) - lo
        return indices[(indices >= 0) & (indices < hi - lo)]


class RowExchange:
    """Exchange of non-zero gradient rows and changed value rows of sparse parameters between ranks."""

    def __init__(self, reductions: Reductions, layouts: Sequence[SparseParameterLayout]) -> None:
        self.reductions, self.layouts = reductions, list(layouts)
        self.rank, self.num_ranks = reductions.grid.rank, reductions.grid.size

    def reduce_rows(self, gradients: Any) -> None:
        """Replace this rank's ranges of the gradients by their sums over all ranks, in rank order. Collective."""
        rows_by_range: dict[Any, tuple[np.ndarray, np.ndarray]] = {}

        def rows_for_rank(index: int, layout: SparseParameterLayout, rank: int) -> tuple[np.ndarray, np.ndarray]:
            key = index, layout.ranges_by_rank[rank]  # ranks may have the same range
            if key not in rows_by_range:
                rows_by_range[key] = layout.nonzero_or_changed_rows(to_host(layout.rank_view(gradients, rank)), rank)
            return rows_by_range[key]

        layouts = list(enumerate(self.layouts))
        sends = [[rows_for_rank(at, layout, rank) for at, layout in layouts] for rank in range(self.num_ranks)]
        summed_parts = [to_host(layout.rank_view(gradients, self.rank)) for layout in self.layouts]
        for layout, total, (ids, _) in zip(self.layouts, summed_parts, sends[self.rank], strict=True):
            total[layout.element_indices(ids, self.rank)] = 0
        for message in self._exchange_messages(sends, gradients):
            for layout, total, (ids, row_values) in zip(self.layouts, summed_parts, message, strict=True):
                total[layout.element_indices(ids, self.rank)] += row_values
        for layout, total in zip(self.layouts, summed_parts, strict=True):
            rank_part = layout.rank_view(gradients, self.rank)
            if not isinstance(rank_part, np.ndarray):  # on a device
                rank_part[...] = namespace(rank_part).asarray(total)

    def copy_own_ranges(self, values: Any) -> list[np.ndarray]:
        """Return copies of this rank's ranges."""
        return [np.array(to_host(layout.rank_view(values, self.rank))) for layout in self.layouts]

    def broadcast_rows(self, values: Any, previous_own_ranges: Sequence[np.ndarray] | None) -> None:
        """Send the rows that differ from `previous_own_ranges` (None: all), and receive those of others. Collective."""
        if previous_own_ranges is None:
            previous_own_ranges = [np.full(1, np.nan)] * len(self.layouts)  # nothing equals NaN
        own_rows = [
            layout.nonzero_or_changed_rows(to_host(layout.rank_view(values, self.rank)), self.rank, old)
            for layout, old in zip(self.layouts, previous_own_ranges, strict=True)
        ]
        for rank, message in enumerate(self._exchange_messages([own_rows] * self.num_ranks, values)):
            for layout, (ids, row_values) in zip(self.layouts, message, strict=True):
                if rank != self.rank and ids.size:
                    part = layout.rank_view(values, rank)
                    indices = namespace(part).asarray(layout.element_indices(ids, rank))
                    part[indices] = namespace(part).asarray(row_values)

    def _exchange_messages(self, sends: Sequence[RowMessage], flat: Any) -> Iterator[RowMessage]:
        """Yield the message of each rank to this rank, in rank order, given this rank's message to each rank."""
        if not self.layouts:
            return
        dtype = np.dtype(flat.dtype)
        counts = [np.array([(ids.size, row_values.size) for ids, row_values in send]) for send in sends]
        counts_received = self.reductions.all_to_all("world", counts, [counts[0].shape] * self.num_ranks)
        packed_messages = [np.concatenate([array.view(np.uint8) for pair in send for array in pair]) for send in sends]
        message_bytes = [int(count.sum(axis=0) @ (8, dtype.itemsize)) for count in counts_received]
        messages = self.reductions.all_to_all("world", packed_messages, [(length,) for length in message_bytes])
        for count, message in zip(counts_received, messages, strict=True):
            rows_by_parameter, start = [], 0
            for num_rows, num_elements in count.tolist():
                ids_end, stop = start + 8 * num_rows, start + 8 * num_rows + dtype.itemsize * num_elements
                rows_by_parameter.append((message[start:ids_end].view(np.int64), message[ids_end:stop].view(dtype)))
                start = stop
            yield rows_by_parameter


def row_message_bytes(num_rows: int, row_length: int, itemsize: int) -> int:
    """Return the bytes of a message with some rows and their ids."""
    return num_rows * (8 + row_length * itemsize)
