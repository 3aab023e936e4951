"""Parts of parameters that ranks own: gradients are reduced to the owners, values come from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from math import prod
from typing import Any, NamedTuple

from ..arrays.namespace import namespace
from ..comm import Reductions
from ..strategies.shares import Share
from .rows import RowExchange, Table

CHUNK = 1 << 20
"""Numbers of each owner that travel together: what is packed beside the flat arrays is a few times as long."""


class _Part(NamedTuple):
    """One rank's part of one parameter: the parameter's span in the flat arrays, and the part in it."""

    start: int
    stop: int
    shape: tuple[int, ...]
    box: tuple[slice, ...]
    size: int

    def of(self, flat: Any) -> Any:
        """Return the part of a flat array, as a view."""
        return flat[self.start : self.stop].reshape(self.shape)[self.box]


class Owners:
    """The parts of all parameters of a flat array that ranks own.

    Parameters
    ----------
    reductions : Reductions
        Over the grid's ranks.
    shares : sequence of Share
        Of the parameters, which lie side by side in the flat arrays.
    widths : sequence of int, optional
        Numbers of a row of each parameter that is sparse, else 0. Rows travel where they are not 0, or have changed.

    Attributes
    ----------
    sizes : list of int
        Numbers that each rank owns.
    spans : list of (start, stop)
        Of this rank's part of each parameter, in an array of what it owns alone.
    """

    def __init__(self, reductions: Reductions, shares: Sequence[Share], widths: Sequence[int] = ()) -> None:
        self.reductions, self.rank = reductions, reductions.grid.rank
        ends = list(accumulate((prod(share.shape) for share in shares), initial=0))
        self._parts = [
            [
                _Part(start, start + prod(share.shape), share.shape, share.boxes[rank].slices, share.boxes[rank].size)
                for start, share in zip(ends, shares, strict=False)
            ]
            for rank in range(reductions.grid.size)
        ]
        self.sizes = [sum(part.size for part in parts) for parts in self._parts]
        own = list(accumulate((part.size for part in self._parts[self.rank]), initial=0))
        self.spans = list(pairwise(own))
        ranks = range(reductions.grid.size)
        tables = {at: (width, [_flat_range(shares[at], rank) for rank in ranks]) for at, width in enumerate(widths)}
        self._rows = RowExchange(
            reductions,
            [
                Table(ends[at], width, found)
                for at, (width, ranges) in tables.items()
                if width
                if len(found := [one for one in ranges if one is not None]) == len(ranges)
            ],
        )
        sparse = {table.start for table in self._rows.tables}
        self._chunks = [_chunks([part for part in parts if part.start not in sparse]) for parts in self._parts]

    @property
    def size(self) -> int:
        """Numbers that this rank owns."""
        return self.sizes[self.rank]

    def pack(self, flat: Any) -> Any:
        """Return a new flat array of what this rank owns."""
        return _packed(flat, self._parts[self.rank])

    def unpack(self, own: Any, flat: Any) -> None:
        """Put what this rank owns into its place in a flat array."""
        _unpacked(own, flat, self._parts[self.rank])

    def reduce(self, gradients: Any) -> None:
        """Replace this rank's parts of the gradients by their sums over all ranks, in the order of ranks; collective.

        The other parts stay this rank's shares.
        """
        self._rows.reduce(gradients)
        for chunks in self._rounds():
            mine = chunks[self.rank]
            sends = [_packed(gradients, parts) for parts in chunks]
            found = self.reductions.all_to_all("world", sends, [(sends[self.rank].size,)] * len(sends))
            total = found[0]
            for share in found[1:]:
                total += share
            _unpacked(total, gradients, mine)

    def rows(self, values: Any) -> list[Any]:
        """Return copies of what this rank owns of sparse parameters."""
        return self._rows.before(values)

    def broadcast(self, values: Any, before: Sequence[Any] | None = None) -> None:
        """Take over the parts of a flat array that other ranks own from them; collective.

        Parameters
        ----------
        before : sequence of array, optional
            What `rows` has returned of the values that all ranks had. Default: all rows travel.
        """
        self._rows.broadcast(values, before)
        for chunks in self._rounds():
            mine = _packed(values, chunks[self.rank])
            shapes = [(sum(part.size for part in parts),) for parts in chunks]
            found = self.reductions.all_to_all("world", [mine] * len(chunks), shapes)
            for rank, (part, parts) in enumerate(zip(found, chunks, strict=True)):
                if rank != self.rank:
                    _unpacked(part, values, parts)

    def _rounds(self) -> Iterator[list[list[_Part]]]:
        """Yield the parts of each rank that travel together."""
        for at in range(max(map(len, self._chunks))):
            yield [chunks[at] if at < len(chunks) else [] for chunks in self._chunks]


def _flat_range(share: Share, rank: int) -> tuple[int, int] | None:
    """Return the range of the flat parameter that a rank's part is; None: it is none."""
    box, rest = share.boxes[rank], share.shape[1:]
    if not box.size:
        return 0, 0
    if box.shape[1:] != rest:
        return None
    return box.lo[0] * prod(rest), box.hi[0] * prod(rest)


def _chunks(parts: Sequence[_Part]) -> list[list[_Part]]:
    """Return the parts of a rank in groups of about CHUNK numbers."""
    there = [part for part in parts if part.size]
    before = accumulate((part.size for part in there), initial=0)
    numbered = zip(before, there, strict=False)
    return [[part for _, part in group] for _, group in groupby(numbered, lambda pair: pair[0] // CHUNK)]


def _packed(flat: Any, parts: Sequence[_Part]) -> Any:
    found = [part.of(flat).reshape(-1) for part in parts if part.size]
    return namespace(flat).concatenate(found) if found else flat[:0].copy()


def _unpacked(own: Any, flat: Any, parts: Sequence[_Part]) -> None:
    start = 0
    for part in parts:
        if part.size:
            place = part.of(flat)
            place[...] = own[start : start + part.size].reshape(place.shape)
            start += part.size
