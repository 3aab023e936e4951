"""Schemes that fuse several layers: tiles recompute cells of other tiles, and the exchange is exact.

The compiler fuses layers as these schemes request; see plan/segments.py.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ..registry.ranges import Count, Positive
from ..system.machine import Machine, MachineProfile, read_machine
from .exchange import HaloExchange
from .policies.base import ExchangePolicy
from .policies.halo import Halo


class FusionScheme(Halo):
    """Base class of schemes for layers that recompute cells of other tiles, so that only the first input is exchanged.

    Attributes
    ----------
    layers : int
        Maximum number of fused layers with windows.
    """

    layers: int
    #: whether tiles of the image are read with all cells on which their outputs depend
    reads_extended_tile = False
    #: reduction of fused layers that normalise over the whole image; None: such layers are rejected
    statistics: str | None = "global"

    @abstractmethod
    def __init__(self) -> None: ...

    def planner_profile(self, ranks: int, samples: int | None = None) -> MachineProfile | None:
        """Return the machine profile with which a planner chooses the layers to fuse; None: fuse up to `layers` layers.

        Parameters
        ----------
        ranks : int
            Number of ranks of the grid.
        samples : int, optional
            Number of samples of a replica per step.
        """
        return None


def fusion_scheme_or_none(scheme: ExchangePolicy | None) -> FusionScheme | None:
    """Return the scheme if it fuses layers, else None."""
    return scheme if isinstance(scheme, FusionScheme) else None


class DeepHalo(FusionScheme):
    """One wide halo exchange for several layers, and one return of gradients.

    Halo cells of the fused layers after the first are computed redundantly by every tile that needs them.

    Consecutive layers of a chain with this scheme are fused, together with the pointwise layers between them.
    Normalisation counts every cell once.

    Parameters
    ----------
    layers : int
        Maximum number of windowed layers that share an exchange.
    """

    formula = "each way n c (2 R (h + w) + 4 R²) elements once for all layers of a segment; R is the sum of their radii"

    def __init__(self, layers: Count = 2) -> None:
        self.layers = layers


class OverlapTile(FusionScheme):
    """Overlapping tiles: each tile is read with all cells on which its outputs depend, and nothing is exchanged.

    Applies to the first layers of a model, up to the first layer with another scheme or a fully connected layer.
    Gradients of the weights are exact: only outputs owned by the tile enter the cost.

    Parameters
    ----------
    statistics : {'global'}, optional
        Handling of layers that normalise over the whole image: 'global' reduces their sums over all tiles, counting
        every cell once. By default, such layers are rejected.
    """

    layers = 10**9
    reads_extended_tile = True
    formula = "0; halos of the image are read from the data set"

    def __init__(self, statistics: Literal["global"] | None = None) -> None:
        self.statistics = statistics

    def forward(self, halo: HaloExchange) -> None:
        """Do nothing: the tile already contains the halo cells."""

    backward = forward

    def exchanges_per_call(self, direction: str) -> tuple[int, float, int]:
        """Return zeros: nothing is exchanged."""
        return 0, 0, 0


class Auto(DeepHalo):
    """`deep_halo` with segments chosen by a planner for the grid: the higher the latency, the longer the segments.

    The planner finds the cheapest division of a chain into segments by dynamic programming, where the cost is that of
    an inner tile's exchanges plus that of the largest tile's redundant computation. The result is only as good as the
    machine profile.

    Parameters
    ----------
    machine : str, optional
        File in the format of `neondist bench model calibrate`; its values for the link between the grid's ranks are
        used. The parameters below override these values.
    latency : float, optional
        Seconds per message.
    bandwidth : float, optional
        Bytes per second.
    speed : float, optional
        Floating-point operations per second of one rank.
    samples : int, optional
        Number of samples of a replica per step. Default: as in the experiment.
    """

    formula = "as for deep_halo, with the segments chosen by the planner"

    def __init__(
        self,
        *,
        latency: Positive | None = None,
        bandwidth: Positive | None = None,
        speed: Positive | None = None,
        samples: Count | None = None,
        machine: str | None = None,
    ) -> None:
        fields = {"latency": latency, "bandwidth": bandwidth, "flops_per_second": speed, "samples_per_replica": samples}
        self.overrides: dict[str, Any] = {field: value for field, value in fields.items() if value is not None}
        super().__init__(layers=10**9)
        self.machine: Machine | None = None if machine is None else read_machine(Path(os.path.expanduser(machine)))

    def planner_profile(self, ranks: int, samples: int | None = None) -> MachineProfile:
        """Return the machine's profile, or the default profile, with the values given to the scheme."""
        profile = MachineProfile() if self.machine is None else self.machine.planner_profile(ranks)
        if samples is not None:
            profile = replace(profile, samples_per_replica=samples)
        return replace(profile, **self.overrides)
