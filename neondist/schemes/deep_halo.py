"""One wide exchange for several layers."""

from __future__ import annotations

from ..arrays import Way
from ..registry.ranges import Count
from .base import Scheme


class DeepHalo(Scheme):
    """The first of a run of layers fetches what all of them will see, and gradients travel home once.

    Border cells are computed by every tile that needs them.

    A run is made of consecutive layers of a chain that have this scheme, with what comes between that sees no
    neighbours. Normalisations count every cell once.

    Parameters
    ----------
    layers : int
        Layers with a window in a run.
    """

    exact = True
    formula = "each way n c (2 R (h + w) + 4 R²) numbers once for all layers of a run; R is their radius together"

    def __init__(self, layers: Count = 2) -> None:
        self.run = layers

    def forward(self, way: Way) -> None:
        """Exchange the cells, in the first layer of a run; the others have theirs."""
        way.exchange()

    backward = forward
