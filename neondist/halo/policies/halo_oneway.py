"""Exchange in fprop only."""

from __future__ import annotations

from ..exchange import HaloExchange
from .base import ExchangePolicy


class HaloOneway(ExchangePolicy):
    """Halo exchange in fprop only: outputs are exact; gradients of other tiles' cells are dropped."""

    formula = "forward H = n c (2 O (h + w) + 4 O²) elements, backward 0"

    def forward(self, halo: HaloExchange) -> None:
        """Exchange the cells."""
        halo.exchange()

    def backward(self, halo: HaloExchange) -> None:
        """Drop the gradients of halo cells."""
        halo.drop()

    def exchanges_per_call(self, direction: str) -> tuple[int, float, int]:
        """Return one exchange for the forward pass, none for the backward pass."""
        return (1, 1, 1) if direction == "forward" else (0, 0, 0)
