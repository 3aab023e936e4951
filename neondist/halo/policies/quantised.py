"""Exchange of quantised cells."""

from __future__ import annotations

from itertools import accumulate
from math import prod
from typing import Any, Literal

import numpy as np

from ...arrays.namespace import namespace
from ..exchange import HaloExchange
from .base import ExchangePolicy


class Quantised(ExchangePolicy):
    """Halo exchange of quantised cells and gradients: integers of a few bits, scaled by the maximum of each message.

    Parameters
    ----------
    bits : {16, 8}
    feedback : bool
        Error feedback: the rounding errors of gradients are added to the next step's gradients (Seide et al. 2014).
    """

    formula = "each way H bits / 8 bytes and 4 for each message, H = n c (2 O (h + w) + 4 O²) elements"

    def __init__(self, bits: Literal[16, 8] = 16, *, feedback: bool = False) -> None:
        self.bits, self.feedback, self.code_dtype = bits, feedback, np.dtype(f"int{bits}")
        self.state_names = ("rest",) if feedback else ()

    def forward(self, halo: HaloExchange) -> None:
        """Send quantised cells or gradients; with `feedback`, keep the rounding errors of gradients."""
        flat_cells, memory = [cells.ravel() for cells in halo.outgoing()], halo.memory
        xp = namespace(halo.array)
        if halo.training and "rest" in memory:
            residuals = xp.split(memory["rest"], list(accumulate(cells.size for cells in flat_cells))[:-1])
            flat_cells = [cells + residual for cells, residual in zip(flat_cells, residuals, strict=False)]
        messages = [self._pack(cells, xp) if len(cells) else cells for cells in flat_cells]
        if self.feedback and halo.training and halo.direction == "backward":
            residuals = [cells - self._unpack(message) for cells, message in zip(flat_cells, messages, strict=True)]
            memory["rest"] = xp.concatenate([xp.empty(0, halo.array.dtype), *residuals])
        if "packed" not in memory:
            memory["packed"] = halo.packed(lambda shape: (self.message_bytes(prod(shape), 1, ""),), "u1")
        memory["packed"].start(messages)
        halo.unpack([self._unpack(message) for message in memory["packed"].wait()])

    backward = forward

    def message_bytes(self, num_elements: int, itemsize: int, direction: str) -> int:
        """Return the bytes of the integers and their scale."""
        return num_elements * self.bits // 8 + 4 if num_elements else 0

    def _pack(self, elements: Any, xp: Any) -> Any:
        max_magnitude = abs(elements).max(keepdims=True)
        scale = xp.maximum(max_magnitude / np.iinfo(self.code_dtype).max, np.finfo("f4").tiny).astype("f4")
        return xp.concatenate([scale.view("u1"), xp.rint(elements / scale).astype(self.code_dtype).view("u1")])

    def _unpack(self, message: Any) -> Any:
        return message[4:].view(self.code_dtype) * message[:4].view("f4") if len(message) else message
