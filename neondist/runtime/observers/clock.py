"""Breakdown of the time of a model's steps by layer and by kind of work."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

from ...observer import Observer

OUTPUT_GRADIENT_VALUE_NAME = "gradient of the output"
"""value observed before the backward pass of a PyTorch module's step"""
WORK_KINDS = ("forward", "backward", "exchange", "wait")
REST_ROW = "loss and everything else"
_ROW_OF_EVENT = {"step": REST_ROW, "cost": REST_ROW, "sync": "sum of gradients", "update": "update"}
_KIND_OF_EVENT = {"halo": "exchange", "wait": "wait"}


class Clock(Observer):
    """Observer that charges time to the innermost event in progress.

    Attributes
    ----------
    seconds : dict of (row, kind) to float
        Rows are layers' names, 'update', 'sum of gradients' and REST_ROW; kinds are WORK_KINDS. 'exchange' is the
        copying and adding of cells on this rank; 'wait' is time inside MPI, including waiting for late ranks.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._stack: list[tuple[str, str]] = []
        self._last_event_time = 0.0

    def on_begin(self, event: str, name: str, direction: str, subject: object) -> None:
        """Start charging time to an event's row."""
        self._charge_elapsed_time()
        row = _ROW_OF_EVENT.get(event) or name or (self._stack[-1][0] if self._stack else REST_ROW)
        self._stack.append((row, _KIND_OF_EVENT.get(event, direction or "forward")))

    def on_end(self, event: str, name: str, direction: str) -> None:
        """Resume charging time to the enclosing event."""
        self._charge_elapsed_time()
        self._stack.pop()

    def on_value(self, layer: Any, name: str, array: object) -> None:
        """Switch a module's step to backward when its output's gradient arrives, since autograd reports no events."""
        if name == OUTPUT_GRADIENT_VALUE_NAME and self._stack:
            self._charge_elapsed_time()
            self._stack[-1] = str(layer.name), "backward"

    def _charge_elapsed_time(self) -> None:
        now = time.perf_counter()
        if self._stack:
            self.seconds[self._stack[-1]] += now - self._last_event_time
        self._last_event_time = now
