"""Cells in fewer bits."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Literal

import numpy as np

from ..exchange import HaloExchange
from .base import ExchangePolicy


class Quantised(ExchangePolicy):
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

    def forward(self, halo: HaloExchange) -> None:
        """Send rounded cells or gradients, and keep what rounding took from gradients."""
        numbers, memory = [cells.ravel() for cells in halo.outgoing()], halo.memory
        if halo.training and "rest" in memory:
            rests = np.split(memory["rest"], np.cumsum([cells.size for cells in numbers])[:-1])
            numbers = [cells + rest for cells, rest in zip(numbers, rests, strict=False)]
        messages = [self._pack(cells) for cells in numbers]
        if self.feedback and halo.training and halo.direction == "backward":
            rests = [cells - self._unpack(message) for cells, message in zip(numbers, messages, strict=True)]
            memory["rest"] = np.concatenate([np.empty(0, halo.array.dtype), *rests])
        packed = memory["packed"] = memory.get("packed") or halo.packed(
            lambda shape: (self.forward_bytes([prod(shape)], 1),), np.uint8
        )
        packed.start(messages)
        halo.unpack([self._unpack(message) for message in packed.wait()])

    backward = forward

    def forward_bytes(self, messages: Sequence[int], itemsize: int) -> int:
        """Return the bytes of integers and scales."""
        return sum(numbers * self.bits // 8 + 4 for numbers in messages if numbers)

    def _pack(self, numbers: Any) -> Any:
        scale = np.maximum(np.abs(numbers).max(initial=0) / np.iinfo(self.kind).max, np.finfo("f4").tiny)
        parts = np.array([scale], "f4"), np.rint(numbers / np.float32(scale)).astype(self.kind)
        return np.concatenate([part.view(np.uint8) for part in parts])[: self.forward_bytes([numbers.size], 1)]

    def _unpack(self, message: Any) -> Any:
        return message[4:].view(self.kind) * message[:4].view("f4") if len(message) else message
