"""An exchange now and then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from ..arrays import Way
from ..registry.ranges import Count
from .base import Fill, Scheme


class Every(Scheme):
    """Exchanges in each j-th training step; between, cells are those of the last exchange, or filled.

    In evaluation it always exchanges. Cells that are reused belong to another batch.

    Parameters
    ----------
    j : int
    between : {'reuse', 'zeros', 'reflect', 'replicate'}
    """

    formula = "each way H / j in the mean, H = n c (2 O (h + w) + 4 O²) numbers"

    def __init__(self, j: Count = 2, between: Literal["reuse"] | Fill = "reuse") -> None:
        self.j, self.between, self.exact = j, between, j == 1

    def forward(self, way: Way) -> None:
        """Exchange, reuse or fill."""
        due = not way.training or way.step % self.j == 0
        if not way.training or self.between != "reuse":
            way.exchange() if due else way.fill(self.between)
            return
        due |= "courier" not in way.memory
        courier = way.memory["courier"] = way.memory.get("courier") or way.courier()
        if due:
            courier.start(way.outgoing())
        way.place(courier.finish())

    backward = forward

    def remembered(self, way: Way) -> list[Any]:
        """Return the cells of the last exchange."""
        return [way.joined(way.memory["courier"].arriving)] if "courier" in way.memory else []

    def remember(self, way: Way, arrays: Sequence[Any]) -> None:
        """Let them be what has arrived last; without them nothing has."""
        courier = way.memory.pop("courier", None)
        for cells in arrays:
            way.memory["courier"] = courier or way.courier()
            for place, arrived in zip(way.memory["courier"].arriving, way.parted(cells, way.receives), strict=True):
                place[...] = arrived

    def forward_bytes(self, messages: Sequence[int], itemsize: int) -> float:
        """Return the mean of j steps."""
        return sum(messages) * itemsize / self.j
