"""Asynchronous exchange with cells of an earlier step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from ...registry.ranges import Count
from ..exchange import HaloExchange
from .base import ExchangePolicy


class Stale(ExchangePolicy):
    """Asynchronous halo exchange: uses the cells sent `steps` training steps ago, so no rank waits.

    The received cells are those of an earlier batch, so this scheme is useful only if successive batches are similar.
    The first steps and evaluation exchange synchronously.

    Parameters
    ----------
    steps : int
        Age of the received cells in training steps.
    """

    def __init__(self, steps: Count = 1) -> None:
        self.steps = steps

    def forward(self, halo: HaloExchange) -> None:
        """Send this step's cells, and use those of an earlier step."""
        if not halo.training:
            halo.exchange()
            return
        exchanges_in_flight: deque = halo.memory.setdefault("in_flight", deque())
        if len(exchanges_in_flight) == self.steps:
            packed_exchange = exchanges_in_flight.popleft()
            halo.unpack(packed_exchange.wait())
        else:
            packed_exchange = halo.packed()
            halo.exchange()
        packed_exchange.start(halo.outgoing())  # receiving has not changed the outgoing cells
        exchanges_in_flight.append(packed_exchange)

    backward = forward

    def get_state(self, halo: HaloExchange) -> list[Any]:
        """Return the cells in flight, earliest step first."""
        return [packed.outgoing for packed in halo.memory.get("in_flight", ())]

    def set_state(self, halo: HaloExchange, arrays: Sequence[Any]) -> None:
        """Send the cells in flight again."""
        pending_exchanges = [*halo.memory.get("in_flight", ())][: len(arrays)]
        halo.memory["in_flight"] = deque(pending_exchanges + [halo.packed() for _ in arrays[len(pending_exchanges) :]])
        for packed, cells in zip(halo.memory["in_flight"], arrays, strict=True):
            packed.outgoing[...] = cells
            packed.start()

    def exchanges_per_call(self, direction: str) -> tuple[int, float, int]:
        """Return one exchange per step, or two in the first steps."""
        return 1, 1, 2
