"""Towers: tiles that do not talk to each other."""

from __future__ import annotations

from ..exchange import HaloExchange
from .base import ExchangePolicy, Fill


class Tower(ExchangePolicy):
    """Nothing is sent: cells of other tiles are filled from the own ones, and gradients are those of that network.

    Towers meet in the fully connected layers, or in the layer whose scheme says `merge: true`.

    Parameters
    ----------
    fill : {'zeros', 'reflect', 'replicate'}
        What stands for the cells of other tiles; 'zeros' means whatever the layer is padded with.
    merge : bool
        In this layer the towers meet: it exchanges, exactly.
    """

    formula = "0; H each way where merge is true"

    def __init__(self, *, fill: Fill = "zeros", merge: bool = False) -> None:
        self.fill, self.merge, self.exact = fill, merge, merge

    def forward(self, halo: HaloExchange) -> None:
        """Fill the cells, in bprop the adjoint; exchange where the towers meet."""
        if self.merge:
            halo.exchange()
        else:
            halo.fill(self.fill)

    backward = forward

    def exchanges(self, direction: str) -> tuple[int, float, int]:
        """Return none, or one where the towers meet."""
        return (1, 1, 1) if self.merge else (0, 0, 0)
