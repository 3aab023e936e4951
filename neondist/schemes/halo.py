"""The exact exchange, and the default."""

from __future__ import annotations

from typing import Literal

from ..arrays import Way
from .base import Scheme


class Halo(Scheme):
    """Every cell travels, every gradient of it returns and is added: the numbers of one process.

    Parameters
    ----------
    backward : {'scatter', 'gather', 'auto'}
        'scatter' sends the gradients of other tiles' input cells home. 'gather' fetches the gradients of other tiles'
        output cells and computes those of all own input cells from them, which convolutions padded with zeros can.
        'auto' gathers where that is fewer bytes.
    """

    exact = True
    formula = "each way H = n c (2 O (h + w) + 4 O²) numbers; gathering, backward the same of the outputs"

    def __init__(self, backward: Literal["scatter", "gather", "auto"] = "scatter") -> None:
        self.way_back = backward

    def forward(self, way: Way) -> None:
        """Exchange the cells."""
        way.exchange()

    def backward(self, way: Way) -> None:
        """Exchange their gradients."""
        way.exchange()
