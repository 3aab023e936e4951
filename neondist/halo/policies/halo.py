"""Exact exchange (default)."""

from __future__ import annotations

from typing import Literal

from ...arrays.precision import ComputePrecision
from ..exchange import HaloExchange
from .base import ExchangePolicy


class Halo(ExchangePolicy):
    """Exact halo exchange: all cells are sent, and all their gradients are returned and added.

    Parameters
    ----------
    backward : {'scatter', 'gather', 'auto'}
        'scatter' sends the gradients of other tiles' input cells to their owners. 'gather' fetches the gradients of
        other tiles' output cells, and computes the gradients of all own input cells from them; it requires zero-padded
        convolutions. 'auto' chooses 'gather' where this sends fewer bytes.
    dtype : {'bfloat16', 'float16'}, optional
        Dtype to which cells and gradients are rounded for messages. Default: the dtype of the model.
    """

    exact = True
    formula = (
        "each way H = n c (2 O (h + w) + 4 O²) elements; with 'gather', the backward pass sends the same for the"
        " outputs"
    )
    dtype: ComputePrecision | None = None

    def __init__(
        self,
        backward: Literal["scatter", "gather", "auto"] = "scatter",
        *,
        dtype: Literal["bfloat16", "float16"] | None = None,
    ) -> None:
        self.gradients = backward
        if dtype is not None:
            self.dtype, self.exact = ComputePrecision(dtype), False

    def forward(self, halo: HaloExchange) -> None:
        """Exchange the cells."""
        if self.dtype is None:
            halo.exchange()
            return
        if "packed" not in halo.memory:
            halo.memory["packed"] = halo.packed(dtype="uint16")
        packed_exchange = halo.memory["packed"]
        packed_exchange.start([self.dtype.encode(cells) for cells in halo.outgoing()])
        halo.unpack([self.dtype.decode(codes) for codes in packed_exchange.wait()])

    backward = forward

    def message_bytes(self, num_elements: int, itemsize: int, direction: str) -> int:
        """Return the bytes of a message."""
        return num_elements * (itemsize if self.dtype is None else self.dtype.itemsize)
