"""Towers: tiles without communication."""

from __future__ import annotations

from ..exchange import HaloExchange
from .base import ExchangePolicy, Fill


class Tower(ExchangePolicy):
    """No exchange: halo cells are filled from the tile itself, and gradients are exact for this filling.

    Tiles are processed independently (as towers) up to the fully connected layers, or to a layer with `merge: true`.

    Parameters
    ----------
    fill : {'zeros', 'reflect', 'replicate'}
        Filling of cells of other tiles; 'zeros' stands for the padding value of the layer.
    merge : bool
        Whether to merge the towers in this layer by an exact exchange.
    """

    formula = "0; H each way where merge is true"

    def __init__(self, *, fill: Fill = "zeros", merge: bool = False) -> None:
        self.fill, self.merge, self.exact = fill, merge, merge

    def forward(self, halo: HaloExchange) -> None:
        """Fill the cells, or run the adjoint; exchange if towers are merged."""
        if self.merge:
            halo.exchange()
        else:
            halo.fill(self.fill)

    backward = forward

    def exchanges_per_call(self, direction: str) -> tuple[int, float, int]:
        """Return zero, or one exchange if towers are merged."""
        return (1, 1, 1) if self.merge else (0, 0, 0)
