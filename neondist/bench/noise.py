"""Variation between timings of the same work, and the warning about it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

NOISE_LIMIT = 0.25


def relative_noise(seconds: Sequence[float]) -> float:
    """Return the excess of the median time of the same work over the fastest time, relative to the fastest."""
    return median(seconds) / min(seconds) - 1


def noise_warnings(noise: float) -> list[str]:
    """Return a warning if times of the same work differed by more than NOISE_LIMIT."""
    warning = f"timings of the same work differed by {noise:.0%}; repeat the benchmark without other programs running"
    return [warning] if noise > NOISE_LIMIT else []
