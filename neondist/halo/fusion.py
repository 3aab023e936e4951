"""Schemes for several layers together: they change who computes what, and leave the exchange exact.

The compiler asks them which layers to fuse; see plan/segments.py.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ..machine import Figures, Machine, read
from ..registry.ranges import Count, Positive
from .exchange import HaloExchange
from .policies.base import ExchangePolicy
from .policies.halo import Halo


class Fusion(Halo):
    """Consecutive layers compute cells of other tiles themselves, so that only the first one's input is exchanged.

    Attributes
    ----------
    layers : int
        How many layers with windows are fused at most.
    """

    layers: int
    #: whether tiles of the image are read with all that they depend on
    reads_wide = False
    #: how layers that normalise over the whole image add up among fused ones: None refuses them
    statistics: str | None = "global"

    @abstractmethod
    def __init__(self) -> None: ...

    def figures(self, ranks: int, samples: int | None = None) -> Figures | None:
        """Return the figures from which a planner chooses what to fuse; None: as many layers as `layers` says.

        Parameters
        ----------
        ranks : int
            Of the grid.
        samples : int, optional
            Of a replica in a step.
        """
        return None


def fusion_of(scheme: ExchangePolicy | None) -> Fusion | None:
    """Return the scheme, if it fuses layers."""
    return scheme if isinstance(scheme, Fusion) else None


class DeepHalo(Fusion):
    """The first of several layers gathers what all of them will see, and gradients return once.

    Ghost cells are computed by every tile that needs them.

    Fused are consecutive layers of a chain that have this scheme, with what comes between that sees no neighbours.
    Normalisations count every cell once.

    Parameters
    ----------
    layers : int
        Layers with a window that share an exchange.
    """

    formula = "each way n c (2 R (h + w) + 4 R²) numbers once for all layers of a segment; R is their radius together"

    def __init__(self, layers: Count = 2) -> None:
        self.layers = layers


class OverlapTile(Fusion):
    """Each tile of the image is read with all cells that its outputs depend on, and nothing is exchanged after that.

    For the first layers of a model, those before the first that has another scheme or is fully connected. Gradients of
    the weights are exact: only own outputs enter the cost.

    Parameters
    ----------
    statistics : {'global'}, optional
        Allows layers that normalise over the whole image: 'global' adds up their sums over all tiles, every cell
        counted once. Without it such layers are refused.
    """

    layers = 10**9
    reads_wide = True
    formula = "0; halos of the image are read from the data set"

    def __init__(self, statistics: Literal["global"] | None = None) -> None:
        self.statistics = statistics

    def forward(self, halo: HaloExchange) -> None:
        """Do nothing: the cells are there."""

    backward = forward

    def exchanges(self, direction: str) -> tuple[int, float, int]:
        """Return none."""
        return 0, 0, 0


class Auto(DeepHalo):
    """`deep_halo` of the layers that a planner chooses for the grid: where messages are dear they are many.

    The planner adds up what the exchanges of a tile in the middle take, and what it computes twice, and takes the
    cheapest cut of a chain into segments (dynamic programming). It is as good as the figures that it is given.

    Parameters
    ----------
    machine : str, optional
        A file that `neondist bench model calibrate` has written, or one like it: the figures are those of the link that
        the grid's ranks use. The figures below, where given, count instead of the machine's.
    latency : float, optional
        Seconds a message.
    bandwidth : float, optional
        Bytes a second.
    speed : float, optional
        Floating point operations a second of one rank.
    samples : int, optional
        Of a replica in a step; default: those of the experiment's batch.
    """

    formula = "that of deep_halo, for the segments that the planner chooses"

    def __init__(
        self,
        *,
        latency: Positive | None = None,
        bandwidth: Positive | None = None,
        speed: Positive | None = None,
        samples: Count | None = None,
        machine: str | None = None,
    ) -> None:
        given = {"latency": latency, "bandwidth": bandwidth, "speed": speed, "samples": samples}
        self.given: dict[str, Any] = {field: value for field, value in given.items() if value is not None}
        super().__init__(layers=10**9)
        self.machine: Machine | None = None if machine is None else read(Path(machine).expanduser())

    def figures(self, ranks: int, samples: int | None = None) -> Figures:
        """Return what is given, what the machine has, or a guess."""
        found = Figures() if self.machine is None else self.machine.figures(ranks)
        if samples is not None:
            found = replace(found, samples=samples)
        return replace(found, **self.given)
