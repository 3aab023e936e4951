"""Exchange in every j-th step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from ...registry.ranges import Count
from ..exchange import HaloExchange
from .base import ExchangePolicy, Fill


class Every(ExchangePolicy):
    """Halo exchange in every j-th training step; in between, halo cells are reused from the last exchange, or filled.

    Evaluation always exchanges. Reused cells are those of an earlier batch.

    Parameters
    ----------
    j : int
        Number of steps from one exchange to the next.
    between : {'reuse', 'zeros', 'reflect', 'replicate'}
    """

    formula = "each way H / j on average, H = n c (2 O (h + w) + 4 O²) elements"

    def __init__(self, j: Count = 2, *, between: Literal["reuse"] | Fill = "reuse") -> None:
        self.j, self.between, self.exact = j, between, j == 1

    @property
    def reuses_cells(self) -> bool:
        """Whether a training step uses cells of earlier steps."""
        return self.between == "reuse" and self.j > 1

    def forward(self, halo: HaloExchange) -> None:
        """Exchange, reuse or fill."""
        is_due = not halo.training or halo.step % self.j == 0 or (self.reuses_cells and "last" not in halo.memory)
        if not (halo.training and self.reuses_cells):
            return halo.exchange() if is_due else halo.fill(self.between)
        last_exchange = halo.memory["last"] = halo.memory.get("last") or halo.packed()
        if is_due:
            last_exchange.start(halo.outgoing())
        halo.unpack(last_exchange.wait())

    backward = forward

    def get_state(self, halo: HaloExchange) -> list[Any]:
        """Return the cells of the last exchange."""
        return [halo.memory["last"].incoming] if "last" in halo.memory else []

    def set_state(self, halo: HaloExchange, arrays: Sequence[Any]) -> None:
        """Restore the cells of the last exchange; `arrays` is empty if there was none."""
        last = halo.memory.pop("last", None)
        for cells in arrays:
            halo.memory["last"] = last or halo.packed()
            halo.memory["last"].incoming[...] = cells

    def exchanges_per_call(self, direction: str) -> tuple[int, float, int]:
        """Return at least 0 (1 if j = 1), on average 1 / j, and at most 1 exchange."""
        return int(self.j == 1), 1 / self.j, 1
