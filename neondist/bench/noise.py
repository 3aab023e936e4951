"""Variation between timings of the same work, and the warning about it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

NOISE_LIMIT = 0.25


def relative_noise(seconds: Sequence[float]) -> float:
    """Return the excess of the median over the fastest time of the same work, relative to the latter."""
    return median(seconds) / min(seconds) - 1


def noise_warnings(noise: float) -> list[str]:
    """Return a warning if times of the same work differed much."""
    warning = f"turns of the same work differed by {noise:.0%}: other programs are running; results are unreliable"
    return [warning] if noise > NOISE_LIMIT else []
