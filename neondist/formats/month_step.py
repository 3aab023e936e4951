"""Time steps of whole calendar months, whose length in seconds varies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .cf_time import month_containing, start_of_month

_DAY = 86400.0
_TOLERANCE = 3600.0  # seconds; float32 coordinates are inexact
_ORIGINS: dict[str, tuple[Callable[[float], float], tuple[float, float]]] = {
    "end": (lambda length: length, (-_DAY, 0)),
    "middle": (lambda length: length / 2, (0, 0)),
    "start": (lambda length: 0.0, (0, 31 * _DAY)),
    "middle day": (lambda length: length / 2 // _DAY * _DAY, (0, _DAY)),
}
"""For each place in a month, the most specific first: the origin for a month's length, and the offsets from it"""


@dataclass(frozen=True)
class MonthStep:
    """Constant number of calendar months between times at the same place in their months.

    Attributes
    ----------
    months : at least 1
    place : 'start', 'middle', 'middle day' (rounded down to days) or 'end', from which times have a constant offset
    """

    months: int
    place: str

    def __post_init__(self) -> None:
        if self.months < 1 or self.place not in _ORIGINS:
            places = ", ".join(sorted(_ORIGINS))
            raise ValueError(
                f"{self.months} months, place '{self.place}': months must be at least 1, place one of {places}"
            )

    def matches(self, times: np.ndarray, calendar: str) -> bool:
        """Return whether times in seconds have this step."""
        origin, (least, greatest) = _ORIGINS[self.place]
        numbers, offsets = [], []
        for time in times.tolist():
            month = month_containing(time, calendar)
            numbers.append(month)
            offsets.append(time - start_of_month(month, calendar) - origin(_length(month, calendar)))
        return (
            bool((np.diff(numbers) == self.months).all())
            and max(offsets) - min(offsets) <= _TOLERANCE
            and min(offsets) >= least - _TOLERANCE
            and max(offsets) <= greatest + _TOLERANCE
        )

    def advance(self, time: float, steps: int, calendar: str) -> float:
        """Return the time some steps after another, in seconds; the last day of a month that is too short."""
        origin, _ = _ORIGINS[self.place]
        month = month_containing(time, calendar)
        later = month + steps * self.months
        length = _length(later, calendar)
        offset = time - start_of_month(month, calendar) - origin(_length(month, calendar)) + origin(length)
        if self.place == "start" and offset >= length:
            offset = length - _DAY + offset % _DAY
        return start_of_month(later, calendar) + offset


def infer_month_step(times: np.ndarray, calendar: str) -> MonthStep | None:
    """Return the step of times in seconds in calendar months; None for a single time, or another step."""
    if len(times) < 2 or np.diff(times).min() < 28 * _DAY - _TOLERANCE:
        return None
    first, second = (month_containing(time, calendar) for time in times[:2].tolist())
    steps = (MonthStep(second - first, place) for place in _ORIGINS) if second > first else ()
    return next((step for step in steps if step.matches(times, calendar)), None)


def _length(month: int, calendar: str) -> float:
    return start_of_month(month + 1, calendar) - start_of_month(month, calendar)
