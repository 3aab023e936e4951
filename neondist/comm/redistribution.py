"""Redistribution of an array between partitions: one all-to-all, and its adjoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..arrays.namespace import namespace
from ..geometry import Box, Piece, RepartitionPlan


class Redistribution:
    """Redistribution of an array from the boxes that ranks own to the boxes that they need; planned once, run often.

    Boxes refer to an array's last axes; axes before them are not divided.

    Parameters
    ----------
    all_to_all : callable
        `Transport.all_to_all` of the participating ranks, or a wrapper that records the messages.
    rank : int
        This rank's number in the transport.
    source, target : sequence of Box, one for each rank
        Boxes that the ranks own and need. Boxes of `source` are disjoint or equal.
    """

    def __init__(
        self, all_to_all: Callable[..., list[Any]], rank: int, source: Sequence[Box], target: Sequence[Box]
    ) -> None:
        self.all_to_all, self.ranks = all_to_all, range(len(source))
        self.plan = RepartitionPlan.of(source, target, rank)

    def forward(self, array: Any) -> Any:
        """Return this rank's target box of the array, given its source box; cells without an owner are 0. Collective.

        Cells owned by several ranks are sent by one of them.
        """
        plan = self.plan
        target = namespace(array).zeros((*array.shape[: -plan.own.ndim], *plan.need.shape), array.dtype)
        for cells, part in self._exchange_pieces(array, plan.own, plan.sends, target, plan.need, plan.receives):
            cells[...] = part
        return target

    def adjoint(self, array: Any) -> Any:
        """Return this rank's source box, given its target box; cells needed by several ranks are summed. Collective."""
        plan = self.plan
        source = namespace(array).zeros((*array.shape[: -plan.own.ndim], *plan.own.shape), array.dtype)
        for cells, part in self._exchange_pieces(array, plan.need, plan.receives, source, plan.own, plan.sends):
            cells += part
        return source

    def _exchange_pieces(
        self, array: Any, box: Box, outgoing: Sequence[Piece], result: Any, target: Box, incoming: Sequence[Piece]
    ) -> Iterator[tuple[Any, Any]]:
        """Yield the cells of `result` received from each rank, in rank order, and the received values."""
        sends_by_peer = dict.fromkeys(self.ranks, namespace(array).empty(0, array.dtype))
        sends_by_peer |= {piece.peer: array[_index_in_box(piece, box)] for piece in outgoing}
        cells_by_peer = {piece.peer: result[_index_in_box(piece, target)] for piece in incoming}
        shapes = [cells_by_peer[peer].shape if peer in cells_by_peer else (0,) for peer in self.ranks]
        received_by_peer = dict(enumerate(self.all_to_all(list(sends_by_peer.values()), shapes)))
        for piece in self.plan.local:
            cells_by_peer[piece.peer] = result[_index_in_box(piece, target)]
            received_by_peer[piece.peer] = array[_index_in_box(piece, box)]
        for peer in sorted(cells_by_peer):
            yield cells_by_peer[peer], received_by_peer[peer]


def _index_in_box(piece: Piece, box: Box) -> tuple[Any, ...]:
    return (..., *piece.source.relative_to(box).slices)
