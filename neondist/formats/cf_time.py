"""Conversion of CF times ('hours since 2000-01-01' in a calendar) to seconds that are comparable across files."""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import Any

import numpy as np

from ..errors import DataError

_UNIT_NAMES = {
    86400.0: ("days", "day", "d"),
    3600.0: ("hours", "hour", "hrs", "hr", "h"),
    60.0: ("minutes", "minute", "mins", "min"),
    1.0: ("seconds", "second", "secs", "sec", "s"),
    1e-3: ("milliseconds", "millisecond", "msecs", "msec", "ms"),
    1e-6: ("microseconds", "microsecond"),
    604800.0: ("weeks", "week"),
}
_SECONDS_PER_UNIT = {name: seconds for seconds, names in _UNIT_NAMES.items() for name in names}
_CALENDAR_KINDS = {
    "standard": "standard", "gregorian": "standard", "proleptic_gregorian": "gregorian", "julian": "julian",
    "noleap": "noleap", "365_day": "noleap", "all_leap": "all_leap", "366_day": "all_leap", "360_day": "360_day",
}  # fmt: skip
_TIME_UNITS_PATTERN = re.compile(
    r"(?P<unit>[a-z]+)\s+since\s+(?P<year>[+-]?\d{1,6})-(?P<month>\d{1,2})-(?P<day>\d{1,2})"
    r"(?:[t\s]\s*(?P<hour>\d{1,2})(?::(?P<minute>\d{1,2})(?::(?P<second>\d{1,2}(?:\.\d*)?))?)?)?"
    r"\s*(?:z|utc|gmt|(?P<zone>[+-]\d{1,2}(?::?\d{2})?))?",
    re.IGNORECASE,
)
_MONTHS = range(-12 * 10_000, 12 * 1_000_000)
_FIRST_GREGORIAN_DATE = 1582, 10, 15
_DAYS_BEFORE_MONTH = np.cumsum([0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30])
"""days before each month of a non-leap year"""


def seconds_of_cf_times(where: str, values: Any, units: str, calendar: str = "standard") -> np.ndarray:
    """Convert times to seconds since an epoch that depends only on the calendar.

    Parameters
    ----------
    where : str
        Name of the coordinate, for messages.
    values : array of numbers
    units : str
        Value of the attribute `units`, such as 'days since 1850-01-01'.
    calendar : str
        A CF calendar, including noleap, all_leap and 360_day.

    Raises
    ------
    DataError
        If the units are not a fixed length of time since a valid date, the calendar is unknown, or a time is missing.
    """
    kind = _calendar_kind(where, calendar)
    match = _TIME_UNITS_PATTERN.fullmatch(units.strip())
    unit_seconds = _SECONDS_PER_UNIT.get(match["unit"].lower()) if match else None
    if match is None or unit_seconds is None:
        raise DataError(
            f"{where}: units '{units}' are not supported; use days, hours, minutes or seconds since a date, such as"
            " 'hours since 2000-01-01 00:00:00'"
        )
    times = np.asarray(values, np.float64)
    if not np.isfinite(times).all():
        position = int(np.flatnonzero(~np.isfinite(np.ravel(times)))[0]) + 1
        raise DataError(f"{where}: value {position} is missing; give every time a value, or remove that time")
    year = int(match["year"])
    year += year < 0 and kind in ("standard", "julian")  # these calendars have no year 0
    date = year, int(match["month"]), int(match["day"])
    clock = int(match["hour"] or 0), int(match["minute"] or 0), float(match["second"] or 0)
    if not _is_valid_date(kind, *date, *clock):
        raise DataError(
            f"{where}: units '{units}' begin at a date that does not exist in the calendar '{calendar}'; correct"
            " its month, day or hour"
        )
    start_seconds = (
        86400.0 * _day_number(kind, *date) + 3600 * clock[0] + 60 * clock[1] + clock[2] - _zone_seconds(match["zone"])
    )
    return start_seconds + unit_seconds * times


def are_comparable_calendars(where: str, calendar: str, other_calendar: str) -> bool:
    """Return whether seconds since the epochs of two calendars are comparable; DataError for unknown calendars."""
    comparable_kinds = {"gregorian": "standard", "julian": "standard"}
    a, b = (_calendar_kind(where, name) for name in (calendar, other_calendar))
    return comparable_kinds.get(a, a) == comparable_kinds.get(b, b)


def month_containing(time: float, calendar: str) -> int:
    """Return the number of the month, 12 * year + month - 1, that contains a time from `seconds_of_cf_times`."""
    return _MONTHS[bisect_right(_MONTHS, time, key=lambda month: start_of_month(month, calendar)) - 1]


def start_of_month(month: int, calendar: str) -> float:
    """Return the time at which a month begins, in seconds, as `seconds_of_cf_times` does."""
    return 86400.0 * _day_number(_calendar_kind("time", calendar), month // 12, month % 12 + 1, 1)


def _calendar_kind(where: str, calendar: str) -> str:
    kind = _CALENDAR_KINDS.get(calendar.strip().lower())
    if kind is None:
        raise DataError(f"{where}: calendar '{calendar}' is unknown; choose from {', '.join(_CALENDAR_KINDS)}")
    return kind


def _zone_seconds(zone: str | None) -> float:
    if not zone:
        return 0.0
    hours, minutes = zone[1:].replace(":", "")[:2], zone[1:].replace(":", "")[2:]
    return (-1 if zone[0] == "-" else 1) * (3600.0 * int(hours) + 60.0 * int(minutes or 0))


def _is_valid_date(calendar_kind: str, year: int, month: int, day: int, hour: int, minute: int, second: float) -> bool:
    if not (1 <= month <= 12 and day >= 1 and hour < 24 and minute < 60 and second < 60):
        return False
    next_month = (year, month + 1, 1) if month < 12 else (year + 1, 1, 1)
    number = _day_number(calendar_kind, year, month, day)
    in_gap = calendar_kind == "standard" and (1582, 10, 5) <= (year, month, day) < _FIRST_GREGORIAN_DATE
    return _day_number(calendar_kind, year, month, 1) <= number < _day_number(calendar_kind, *next_month) and not in_gap


def _day_number(calendar_kind: str, year: int, month: int, day: int) -> int:
    if calendar_kind == "360_day":
        return 360 * year + 30 * (month - 1) + day
    if calendar_kind in ("noleap", "all_leap"):
        is_leap = calendar_kind == "all_leap"
        return (365 + is_leap) * year + int(_DAYS_BEFORE_MONTH[month - 1]) + (is_leap and month > 2) + day
    if calendar_kind == "standard":
        calendar_kind = "julian" if (year, month, day) < _FIRST_GREGORIAN_DATE else "gregorian"
    is_jan_or_feb = (14 - month) // 12  # standard formula of Julian day numbers
    y, m = year + 4800 - is_jan_or_feb, month + 12 * is_jan_or_feb - 3
    day_number = day + (153 * m + 2) // 5 + 365 * y + y // 4
    return day_number - 32083 if calendar_kind == "julian" else day_number - y // 100 + y // 400 - 32045
