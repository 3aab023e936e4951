"""Towers: tiles without communication."""

from __future__ import annotations

from ..exchange import HaloExchange
from .base import ExchangePolicy, Fill


class Tower(ExchangePolicy):
    """No exchange: halo cells are filled from the tile itself, and gradients are exact for this filling.

    Towers are merged in the fully connected layers, or in a layer whose scheme has `merge: true`.

    Parameters
    ----------
    fill : {'zeros', 'reflect', 'replicate'}
        How cells of other tiles are filled; 'zeros' stands for the padding value of the layer.
    merge : bool
        Merge the towers in this layer with an exact exchange.
    """

    formula = "0; H each way where merge is true"

    def __init__(self, *, fill: Fill = "zeros", merge: bool = False) -> None:
        self.fill, self.merge, self.exact = fill, merge, merge

    def forward(self, halo: HaloExchange) -> None:
        """Fill the cells, or run the adjoint of filling; exchange if towers are merged."""
        if self.merge:
            halo.exchange()
        else:
            halo.fill(self.fill)

    backward = forward

    def exchanges_per_call(self, direction: str) -> tuple[int, float, int]:
        """Return zero, or one exchange if towers are merged."""
        return (1, 1, 1) if self.merge else (0, 0, 0)
