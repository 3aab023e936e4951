"""The same values, cut differently: one all-to-all, and its adjoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..arrays.namespace import namespace
from ..geometry import Box, Piece, RepartitionPlan


class Redistribution:
    """Moves an array from the boxes that ranks hold to those that they need; planned once, run many times.

    The boxes are those of an array's last axes; all axes in front of them go along whole.

    Parameters
    ----------
    all_to_all : callable
        That of the transport of the ranks that take part, or of what records it.
    rank : int
        This one, among them.
    source, target : sequence of Box, one for each of these ranks
        What each holds, and what each needs. Boxes of `source` are disjoint or equal.
    """

    def __init__(
        self, all_to_all: Callable[..., list[Any]], rank: int, source: Sequence[Box], target: Sequence[Box]
    ) -> None:
        self.all_to_all, self.ranks = all_to_all, range(len(source))
        self.plan = RepartitionPlan.of(source, target, rank)

    def forward(self, array: Any) -> Any:
        """Return this rank's target box of the array, given its source box; cells without an owner are 0; collective.

        What several ranks hold comes from one of them.
        """
        plan = self.plan
        found = namespace(array).zeros((*array.shape[: -plan.own.ndim], *plan.need.shape), array.dtype)
        for cells, part in self._exchanged(array, plan.own, plan.sends, found, plan.need, plan.receives):
            cells[...] = part
        return found

    def adjoint(self, array: Any) -> Any:
        """Return this rank's source box, given its target box: what several ranks needed is added; collective."""
        plan = self.plan
        found = namespace(array).zeros((*array.shape[: -plan.own.ndim], *plan.own.shape), array.dtype)
        for cells, part in self._exchanged(array, plan.need, plan.receives, found, plan.own, plan.sends):
            cells += part
        return found

    def _exchanged(
        self, array: Any, here: Box, out: Sequence[Piece], found: Any, there: Box, back: Sequence[Piece]
    ) -> Iterator[tuple[Any, Any]]:
        """Yield the cells of `found` that come from each rank, in their order, and what comes."""
        sends = dict.fromkeys(self.ranks, namespace(array).empty(0, array.dtype))
        sends |= {piece.peer: array[_at(piece, here)] for piece in out}
        coming = {piece.peer: found[_at(piece, there)] for piece in back}
        shapes = [coming[peer].shape if peer in coming else (0,) for peer in self.ranks]
        parts = dict(enumerate(self.all_to_all(list(sends.values()), shapes)))
        for piece in self.plan.local:
            coming[piece.peer], parts[piece.peer] = found[_at(piece, there)], array[_at(piece, here)]
        for peer in sorted(coming):
            yield coming[peer], parts[peer]


def _at(piece: Piece, box: Box) -> tuple[Any, ...]:
    return (..., *piece.source.relative_to(box).slices)
