"""The figures of a machine that decide between sending cells and computing them twice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SPEED = 2e10
"""floating point operations per second of a rank, where nobody says"""
SAMPLES = 32
"""of a replica in a step, where nobody says"""


@dataclass(frozen=True)
class Figures:
    """What a planner of runs of layers needs to know.

    Attributes
    ----------
    latency, bandwidth : seconds a message, bytes a second
    speed : floating point operations a second of one rank
    samples : of a replica in a step
    itemsize : bytes of a number
    cell_seconds : by layer's name
        What a training step was measured to take for one output cell of one sample; `speed` counts for the others.
    """

    latency: float = 2e-5
    bandwidth: float = 5e9
    speed: float = SPEED
    samples: int = SAMPLES
    itemsize: int = 4
    cell_seconds: Mapping[str, float] = field(default_factory=dict)

    def sent(self, messages: float, numbers: float) -> float:
        """Return the seconds of messages with so many numbers of each sample together."""
        return messages * self.latency + numbers * self.samples * self.itemsize / self.bandwidth
