"""Time steps of whole calendar months, whose length in seconds varies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from .cf_time import month_containing, start_of_month

_DAY_SECONDS = 86400.0
_TOLERANCE_SECONDS = 3600.0  # float32 coordinates are inexact
_PLACE_RULES: dict[str, tuple[Callable[[float], float], tuple[float, float], float]] = {
    "end": (lambda length: length, (-_DAY_SECONDS, 0), _TOLERANCE_SECONDS),
    "middle": (lambda length: length / 2, (0, 0), _TOLERANCE_SECONDS),
    "start": (lambda length: 0.0, (0, 31 * _DAY_SECONDS), _TOLERANCE_SECONDS),
    "middle day": (lambda length: length / 2 // _DAY_SECONDS * _DAY_SECONDS, (0, _DAY_SECONDS), _TOLERANCE_SECONDS),
    "near middle": (lambda length: length / 2, (-2 * _DAY_SECONDS, 2 * _DAY_SECONDS), inf),
}
"""By place in a period, most specific first: origin as a function of the period's length, allowed offsets of times from
the origin, and largest difference between these offsets"""
_SHORTEST_STEP = 25 * _DAY_SECONDS  # from two days after the middle of February to two days before the middle of March


@dataclass(frozen=True)
class MonthStep:
    """Time step of a constant number of calendar months; times have the same place in their months or longer periods.

    Attributes
    ----------
    months : number of months, at least 1
    place : 'start', 'middle', 'middle day' (the middle rounded down to days) or 'end', from which times have a constant
        offset; or 'near middle': times vary by up to two days around the middle
    stamps : for irregular times, the first calendar month (1 to 12) of the period, its length in days, and the seconds
        since its start
    period : months in a period: 1, or `months` for means over longer periods; a time belongs to the period
        whose middle is closest
    """

    months: int
    place: str
    stamps: tuple[tuple[int, int, float], ...] = ()
    period: int = 1

    def __post_init__(self) -> None:
        if self.months < 1 or self.period not in (1, self.months) or self.place not in _PLACE_RULES:
            places = ", ".join(sorted(_PLACE_RULES))
            raise ValueError(
                f"{self.months} months, period {self.period}, place '{self.place}': months must be at least 1,"
                f" period must be 1 or equal to months, and place must be one of {places}"
            )
        min_days, max_days = 28 * self.period, 31 * self.period
        for month, days, seconds in self.stamps:
            if not (1 <= month <= 12 and min_days <= days <= max_days and 0 <= seconds <= days * _DAY_SECONDS):
                raise ValueError(f"{month}, {days}, {seconds}: expected a calendar month, its days, and seconds in it")

    def matches_times(self, times: np.ndarray, calendar: str) -> bool:
        """Return whether times in seconds have this step."""
        origin, (min_offset, max_offset), max_difference = _PLACE_RULES[self.place]
        months, offsets = [], []
        for time in times.tolist():
            month = self._first_month_of_period(time, calendar)
            months.append(month)
            offsets.append(time - start_of_month(month, calendar) - origin(self._period_seconds(month, calendar)))
        return (
            bool((np.diff(months) == self.months).all())
            and max(offsets) - min(offsets) <= max_difference
            and min(offsets) >= min_offset - _TOLERANCE_SECONDS
            and max(offsets) <= max_offset + _TOLERANCE_SECONDS
        )

    def with_stamps(self, times: np.ndarray, calendar: str) -> MonthStep:
        """Return the step with the stamps of irregular times, which replace existing stamps of the same periods."""
        if self.place != "near middle":
            return self
        stamps = {(month, days): seconds for month, days, seconds in self.stamps}
        for time in times.tolist():
            month = self._first_month_of_period(time, calendar)
            key = month % 12 + 1, round(self._period_seconds(month, calendar) / _DAY_SECONDS)
            stamps.pop(key, None)  # the latest stamp comes last
            stamps[key] = time - start_of_month(month, calendar)
        return replace(self, stamps=tuple((*key, seconds) for key, seconds in stamps.items()))

    def advance(self, time: float, steps: int, calendar: str) -> float:
        """Return the time `steps` steps later, in seconds, moved to the last day if the month is too short.

        An irregular time takes the stamp of the same period of the year with the most similar length, or else the
        latest stamp of any period with the most similar length.
        """
        origin, *_ = _PLACE_RULES[self.place]
        month = self._first_month_of_period(time, calendar)
        later_month = month + steps * self.months
        length = self._period_seconds(later_month, calendar)
        if self.stamps:
            calendar_month, days = later_month % 12 + 1, length / _DAY_SECONDS
            nearest_stamp = min(reversed(self.stamps), key=lambda s: (s[0] != calendar_month, abs(s[1] - days), -s[1]))
            return start_of_month(later_month, calendar) + nearest_stamp[2]
        offset = time - start_of_month(month, calendar) - origin(self._period_seconds(month, calendar)) + origin(length)
        if self.place == "start" and offset >= length:
            offset = length - _DAY_SECONDS + offset % _DAY_SECONDS
        return start_of_month(later_month, calendar) + offset

    def _first_month_of_period(self, time: float, calendar: str) -> int:
        """Return the first month of the period to which a time belongs."""
        month = month_containing(time, calendar)
        if self.period == 1:
            return month

        def distance(first: int) -> float:
            return abs(time - start_of_month(first, calendar) - self._period_seconds(first, calendar) / 2)

        return min(range(month - self.period // 2 - 1, month - self.period // 2 + 2), key=distance)

    def _period_seconds(self, first_month: int, calendar: str) -> float:
        return start_of_month(first_month + self.period, calendar) - start_of_month(first_month, calendar)


def infer_month_step(times: np.ndarray, calendar: str) -> MonthStep | None:
    """Return the constant step of times in seconds, in calendar months; None if there is none, or too few times."""
    if len(times) < 2 or np.diff(times).min() < _SHORTEST_STEP - _TOLERANCE_SECONDS:
        return None
    first, second = (month_containing(time, calendar) for time in times[:2].tolist())
    months = second - first
    # times at a constant distance may be near the middle of some months by chance
    places = [place for place in _PLACE_RULES if place != "near middle" or np.ptp(np.diff(times)) > _TOLERANCE_SECONDS]
    periods = {place: {1, months} if "middle" in place else {1} for place in places if months > 0}
    candidates = [MonthStep(months, place, period=n) for place in periods for n in sorted(periods[place])]
    step = next((step for step in candidates if step.matches_times(times, calendar)), None)
    return None if step is None else step.with_stamps(times, calendar)
