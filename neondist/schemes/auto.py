"""Runs of layers chosen by a cost model."""

from __future__ import annotations

from ..errors import ConfigError
from .deep_halo import DeepHalo


class Auto(DeepHalo):
    """`deep_halo` with runs that a planner chooses for the grid: where messages are dear they are long.

    The planner adds up what the exchanges of a tile in the middle take, and what it computes twice, and takes the
    cheapest cut of a chain into runs (dynamic programming). It is as good as the figures that it is given.

    Parameters
    ----------
    latency : float
        Seconds a message.
    bandwidth : float
        Bytes a second.
    speed : float
        Floating point operations a second of one rank.
    samples : int
        Of a replica in a step.
    """

    formula = "that of deep_halo, for the runs that the planner chooses"

    def __init__(self, latency: float = 2e-5, bandwidth: float = 5e9, speed: float = 2e10, samples: int = 32) -> None:
        for field, value in {"latency": latency, "bandwidth": bandwidth, "speed": speed, "samples": samples}.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise ConfigError(f"{field} {value!r}: needs a number above 0")
        super().__init__(layers=10**9)
        self.figures = latency, bandwidth, speed, samples
