"""Cells in fewer bits."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from ..arrays import Way
from ..errors import ConfigError
from .base import Scheme


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
            way.memory["rest"] = [g - self._unpack(self._pack(g), g.dtype).reshape(g.shape) for g in gradients]
        way.place(self._carry(way, gradients))

    def forward_bytes(self, messages: Sequence[int], itemsize: int) -> float:
        """Return the bytes of integers and scales."""
        return sum(self._bytes(numbers) for numbers in messages)

    def _carry(self, way: Way, messages: Sequence[Any]) -> list[Any]:
        if "courier" not in way.memory:
            way.memory["courier"] = way.courier(lambda shape: (self._bytes(prod(shape)),), np.uint8)
        way.memory["courier"].start([self._pack(cells) for cells in messages])
        return [self._unpack(message, way.frame.dtype) for message in way.memory["courier"].finish()]

    def _bytes(self, numbers: int) -> int:
        return numbers * self.bits // 8 + 4 if numbers else 0

    def _pack(self, cells: Any) -> Any:
        """Return bytes: the scale, and each number over it."""
        scale = np.abs(cells).max(initial=0).astype(np.float32).reshape(1) / np.iinfo(self.kind).max
        numbers = np.rint(cells.ravel() / np.where(scale > 0, scale, 1)).astype(self.kind)
        return np.concatenate([scale.view(np.uint8), numbers.view(np.uint8)])[: self._bytes(cells.size)]

    def _unpack(self, message: Any, dtype: Any) -> Any:
        return (message[4:].view(self.kind) * message[:4].view(np.float32)).astype(dtype) if len(message) else message
