"""Parts of parameters that ranks own: gradients are reduced to the owners, which send the updated values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from math import prod
from typing import Any, NamedTuple

from ..arrays.namespace import namespace
from ..comm import Reductions
from ..strategies.shares import OwnerBoxes
from .rows import RowExchange, SparseParameterLayout

CHUNK_ELEMENTS = 1 << 20
"""Approximate number of elements of each owner in one message; packed copies take several times as much memory."""


class _OwnedPart(NamedTuple):
    """One rank's part of one parameter: the parameter's span in the flat arrays, and the part's slices within it."""

    parameter_start: int
    parameter_stop: int
    parameter_shape: tuple[int, ...]
    part_slices: tuple[slice, ...]
    part_size: int

    def view(self, flat: Any) -> Any:
        return flat[self.parameter_start : self.parameter_stop].reshape(self.parameter_shape)[self.part_slices]


class OwnedParts:
    """The parts that each rank owns of the parameters in a flat array.

    Parameters
    ----------
    shares : sequence of OwnerBoxes
        Owners' boxes of the parameters, which are contiguous in the flat arrays.
    sparse_row_lengths : sequence of int, optional
        Row length of each parameter; 0 if it is dense. For sparse parameters whose parts are all contiguous, only
        non-zero rows of gradients and changed rows of values are sent.

    Attributes
    ----------
    own_spans : list of (start, stop)
        Range of this rank's part of each parameter, in an array of only the rank's own parts.
    """

    def __init__(
        self, reductions: Reductions, shares: Sequence[OwnerBoxes], sparse_row_lengths: Sequence[int] = ()
    ) -> None:
        self.reductions, self.rank = reductions, reductions.grid.rank
        parameter_ends = list(accumulate((prod(share.shape) for share in shares), initial=0))
        self._parts = [
            [
                _OwnedPart(
                    start, start + prod(share.shape), share.shape, share.boxes[rank].slices, share.boxes[rank].size
                )
                for start, share in zip(parameter_ends, shares, strict=False)
            ]
            for rank in range(reductions.grid.size)
        ]
        own_ends = list(accumulate((part.part_size for part in self._parts[self.rank]), initial=0))
        self.own_spans, self.num_own_elements = list(pairwise(own_ends)), own_ends[-1]
        self._row_exchange = RowExchange(
            reductions,
            [
                SparseParameterLayout(start, row_length, flat_ranges)
                for start, row_length, share in zip(parameter_ends, sparse_row_lengths, shares, strict=False)
                if row_length and (flat_ranges := share.flat_ranges) is not None
            ],
        )
        sparse = {layout.start for layout in self._row_exchange.layouts}
        self._chunks = [
            _group_into_chunks([part for part in parts if part.parameter_start not in sparse]) for parts in self._parts
        ]

    def copy_own_part(self, flat: Any) -> Any:
        """Return a new flat array of this rank's parts."""
        return _concatenate_parts(flat, self._parts[self.rank])

    def store_own_part(self, own_values: Any, flat: Any) -> None:
        """Copy this rank's parts to their places in a flat array."""
        _copy_into_parts(own_values, flat, self._parts[self.rank])

    def reduce_to_owners(self, gradients: Any) -> None:
        """Replace this rank's parts of the gradients by their sums over all ranks, in rank order. Collective.

        The other parts keep this rank's own gradients.
        """
        self._row_exchange.reduce_rows(gradients)
        for chunks in self._parts_by_round():
            own_parts = chunks[self.rank]
            sends = [_concatenate_parts(gradients, parts) for parts in chunks]
            received_parts = self.reductions.all_to_all("world", sends, [(sends[self.rank].size,)] * len(sends))
            own_sum = received_parts[0]
            for share in received_parts[1:]:
                own_sum += share
            _copy_into_parts(own_sum, gradients, own_parts)

    def copy_own_sparse_parts(self, values: Any) -> list[Any]:
        """Return copies of this rank's parts of sparse parameters."""
        return self._row_exchange.copy_own_ranges(values)

    def broadcast_from_owners(self, values: Any, previous_sparse_parts: Sequence[Any] | None = None) -> None:
        """Send this rank's parts of a flat array to all ranks, and receive the parts of the others. Collective.

        Parameters
        ----------
        previous_sparse_parts : sequence of array, optional
            Result of `copy_own_sparse_parts` for the values that all ranks had before the update. Default: all rows
            are sent.
        """
        self._row_exchange.broadcast_rows(values, previous_sparse_parts)
        for chunks in self._parts_by_round():
            own_values = _concatenate_parts(values, chunks[self.rank])
            shapes = [(sum(part.part_size for part in parts),) for parts in chunks]
            messages = self.reductions.all_to_all("world", [own_values] * len(chunks), shapes)
            for rank, (part, parts) in enumerate(zip(messages, chunks, strict=True)):
                if rank != self.rank:
                    _copy_into_parts(part, values, parts)

    def _parts_by_round(self) -> Iterator[list[list[_OwnedPart]]]:
        """Yield, for each round of messages, the parts of each rank that are sent in it."""
        for at in range(max(map(len, self._chunks))):
            yield [chunks[at] if at < len(chunks) else [] for chunks in self._chunks]


def _group_into_chunks(parts: Sequence[_OwnedPart]) -> list[list[_OwnedPart]]:
    """Return the parts of a rank in groups of about CHUNK_ELEMENTS elements."""
    non_empty = [part for part in parts if part.part_size]
    start_offsets = accumulate((part.part_size for part in non_empty), initial=0)
    numbered = zip(start_offsets, non_empty, strict=False)
    return [[part for _, part in group] for _, group in groupby(numbered, lambda pair: pair[0] // CHUNK_ELEMENTS)]


def _concatenate_parts(flat: Any, parts: Sequence[_OwnedPart]) -> Any:
    arrays = [part.view(flat).reshape(-1) for part in parts if part.part_size]
    return namespace(flat).concatenate(arrays) if arrays else flat[:0].copy()


def _copy_into_parts(own_values: Any, flat: Any, parts: Sequence[_OwnedPart]) -> None:
    start = 0
    for part in parts:
        if part.part_size:
            part_view = part.view(flat)
            part_view[...] = own_values[start : start + part.part_size].reshape(part_view.shape)
            start += part.part_size
