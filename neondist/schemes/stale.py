"""Cells of an earlier step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from ..arrays import Way
from ..registry.ranges import Count
from .base import Scheme


class Stale(Scheme):
    """Uses the cells that left `steps` training steps ago; this step's travel meanwhile, so that nobody waits.

    What arrives belongs to an earlier batch, which only helps where batches resemble each other. The first steps, and
    evaluation, exchange and wait.

    Parameters
    ----------
    steps : int
    """

    def __init__(self, steps: Count = 1) -> None:
        self.steps = steps

    def forward(self, way: Way) -> None:
        """Send this step's cells, and place those of an earlier one."""
        if not way.training:
            way.exchange()
            return
        travelling: deque = way.memory.setdefault("travelling", deque())
        waiting = len(travelling) == self.steps
        courier = travelling.popleft() if waiting else way.courier()
        outgoing = [cells.copy() for cells in way.outgoing()]
        way.place(courier.finish()) if waiting else way.exchange()
        courier.start(outgoing)
        travelling.append(courier)

    backward = forward

    def remembered(self, way: Way) -> list[Any]:
        """Return the cells under way, of the earliest step first."""
        return [way.joined(courier.leaving) for courier in way.memory.get("travelling", ())]

    def remember(self, way: Way, arrays: Sequence[Any]) -> None:
        """Send them once more."""
        couriers = [*way.memory.get("travelling", ())][: len(arrays)]
        way.memory["travelling"] = deque(couriers + [way.courier() for _ in arrays[len(couriers) :]])
        for courier, cells in zip(way.memory["travelling"], arrays, strict=True):
            courier.start(way.parted(cells, way.sends))

    def forward_bytes(self, messages: Sequence[int], itemsize: int) -> float:
        """Return the bytes of every message; the first steps send twice."""
        return sum(messages) * itemsize
