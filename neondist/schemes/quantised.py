"""Cells in fewer bits."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from ..arrays import Way
from ..errors import ConfigError
from .base import Scheme

SCALE = 4
"""bytes of a message's scale"""


class Quantised(Scheme):
    """Cells and gradients travel as integers of few bits, with one scale for each message.

    Parameters
    ----------
    bits : {16, 8}
    feedback : bool
        What rounding took from a gradient is added to the next one (Seide et al. 2014).
    """

    formula = "each way H bits / 8 bytes and 4 for each message, H = n c (2 O (h + w) + 4 O²) numbers"

    def __init__(self, bits: int = 16, feedback: bool = False) -> None:
        if isinstance(bits, bool) or bits not in (16, 8):
            raise ConfigError(f"bits {bits!r}: choose from 16, 8")
        self.bits, self.feedback, self.kind = bits, feedback, np.dtype(f"int{bits}")

    def forward(self, way: Way) -> None:
        """Send rounded cells."""
        way.place(self._carry(way, way.outgoing()))

    def backward(self, way: Way) -> None:
        """Send rounded gradients, and keep what rounding took."""
        gradients = way.outgoing()
        if self.feedback and way.training:
            rest = way.memory.get("rest", [0] * len(gradients))
            gradients = [cells + left for cells, left in zip(gradients, rest, strict=True)]
            way.memory["rest"] = [cells - self._unpack(self._pack(cells), cells) for cells in gradients]
        way.place(self._carry(way, gradients))

    def forward_bytes(self, messages: Sequence[int], itemsize: int) -> float:
        """Return the bytes of integers and scales."""
        return sum(self._bytes(numbers) for numbers in messages if numbers)

    def _carry(self, way: Way, messages: Sequence[Any]) -> list[Any]:
        if "courier" not in way.memory:
            way.memory["courier"] = way.courier(lambda shape: (self._bytes(prod(shape)),), np.uint8)
        way.memory["courier"].start([self._pack(cells) for cells in messages])
        return [self._unpack(message, way.frame.buffer) for message in way.memory["courier"].finish()]

    def _bytes(self, numbers: int) -> int:
        return numbers * self.bits // 8 + SCALE if numbers else 0

    def _pack(self, cells: Any) -> Any:
        """Return bytes: the scale, and each number over it."""
        if not cells.size:
            return np.zeros(0, np.uint8)
        scale = np.abs(cells).max(keepdims=True).reshape(1).astype(np.float32) / np.iinfo(self.kind).max
        numbers = np.rint(cells.ravel() / np.where(scale > 0, scale, 1)).astype(self.kind)
        return np.concatenate([scale.view(np.uint8), numbers.view(np.uint8)])

    def _unpack(self, message: Any, like: Any) -> Any:
        """Return the numbers again, of the type of `like`, and of its shape if it has as many."""
        numbers = message[SCALE:].view(self.kind) * message[:SCALE].view(np.float32)
        return numbers.astype(like.dtype).reshape(like.shape if numbers.size == like.size else -1)
