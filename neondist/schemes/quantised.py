"""Cells in fewer bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from ..arrays import Way
from .base import Scheme


class Quantised(Scheme):
    """Cells and gradients travel as integers of few bits, with one scale for each message: its largest number.

    Parameters
    ----------
    bits : {16, 8}
    feedback : bool
        What rounding took from a gradient is added to the next one (Seide et al. 2014).
    """

    remembers = ("rest",)
    formula = "each way H bits / 8 bytes and 4 for each message, H = n c (2 O (h + w) + 4 O²) numbers"

    def __init__(self, bits: Literal[16, 8] = 16, feedback: bool = False) -> None:
        self.bits, self.feedback, self.kind = bits, feedback, np.dtype(f"int{bits}")

    def forward(self, way: Way) -> None:
        """Send rounded cells or gradients, and keep what rounding took from gradients."""
        numbers, memory = way.joined(way.outgoing()), way.memory
        if "courier" not in memory:
            memory["courier"] = way.courier(lambda shape: (self._bytes(int(np.prod(shape))),), np.uint8)
        numbers += memory.get("rest", 0) if way.training else 0
        messages = [self._pack(cells.ravel()) for cells in way.parted(numbers, way.sends)]
        if self.feedback and way.training and way.direction == "backward":
            memory["rest"] = numbers - way.joined([self._unpack(message, numbers.dtype) for message in messages])
        memory["courier"].start(messages)
        way.place([self._unpack(message, way.frame.dtype) for message in memory["courier"].finish()])

    backward = forward

    def forward_bytes(self, messages: Sequence[int], itemsize: int) -> float:
        """Return the bytes of integers and scales."""
        return sum(self._bytes(numbers) for numbers in messages)

    def _bytes(self, numbers: int) -> int:
        return numbers * self.bits // 8 + 4 if numbers else 0

    def _pack(self, numbers: Any) -> Any:
        scale = np.maximum(np.abs(numbers).max(initial=0) / np.iinfo(self.kind).max, np.finfo("f4").tiny)
        parts = np.array([scale], "f4"), np.rint(numbers / np.float32(scale)).astype(self.kind)
        return np.concatenate([part.view(np.uint8) for part in parts])[: self._bytes(numbers.size)]

    def _unpack(self, message: Any, dtype: Any) -> Any:
        return (message[4:].view(self.kind) * message[:4].view("f4")).astype(dtype) if len(message) else message
