"""Runs of layers chosen by a cost model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ..machine import Figures, Machine, read
from ..registry.ranges import Count, Positive
from .deep_halo import DeepHalo


class Auto(DeepHalo):
    """`deep_halo` with runs that a planner chooses for the grid: where messages are dear they are long.

    The planner adds up what the exchanges of a tile in the middle take, and what it computes twice, and takes the
    cheapest cut of a chain into runs (dynamic programming). It is as good as the figures that it is given.

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

    formula = "that of deep_halo, for the runs that the planner chooses"

    def __init__(
        self,
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
