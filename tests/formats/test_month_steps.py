"""Steps of calendar months against dates of xarray and cftime."""

import numpy as np
import pytest

from neondist.formats.cf_time import seconds_of_cf_times
from neondist.formats.month_step import MonthStep, infer_month_step

xarray = pytest.importorskip("xarray", reason="the oracle")
cftime = pytest.importorskip("cftime", reason="the oracle")

CALENDARS = ["standard", "proleptic_gregorian", "julian", "noleap", "all_leap", "360_day"]
UNITS = "days since 1850-01-01"


def to_seconds(dates, calendar):
    return seconds_of_cf_times("t", cftime.date2num(dates, UNITS, calendar), UNITS, calendar)


def middles(calendar, whole_days):
    """Return the middle of each month: CMIP has them exact, CRU rounded down to days."""
    starts = dates("2003-05-01", "MS", calendar, 41)
    numbers = cftime.date2num(starts, UNITS, calendar).astype("f8")
    values = (numbers[1:] + numbers[:-1]) / 2
    return cftime.num2date(np.floor(values) if whole_days else values, UNITS, calendar)


def dates(start, freq, calendar, count=40):
    return xarray.date_range(start, periods=count, freq=freq, calendar=calendar, use_cftime=True).values


SERIES = {
    "first days": lambda calendar: dates("2003-05-01", "MS", calendar),
    "first days from July": lambda calendar: dates("2003-07-01", "MS", calendar),
    "mid-month days": lambda calendar: dates("2003-05-01", "MS", calendar) + np.timedelta64(14, "D").astype(object),
    "month ends": lambda calendar: dates("2003-05-31" if calendar != "360_day" else "2003-05-30", "ME", calendar),
    "middles": lambda calendar: middles(calendar, False),
    "middle days": lambda calendar: middles(calendar, True),
    "quarters": lambda calendar: dates("2003-03-01", "3MS", calendar),
    "years": lambda calendar: dates("2003-01-01", "YS", calendar),
    "year ends": lambda calendar: dates("2003-12-30", "YE", calendar),
}


@pytest.mark.parametrize("calendar", CALENDARS)
@pytest.mark.parametrize("name", SERIES)
def test_steps_match_xarray(name, calendar):
    times = to_seconds(SERIES[name](calendar), calendar)
    step = infer_month_step(times[:14], calendar)
    later = [step.advance(times[13], n, calendar) for n in range(27)]
    np.testing.assert_allclose(later, times[13:40], rtol=0, atol=1e-3)
    assert step.matches(times, calendar)
    assert not step.matches(np.delete(times, 5), calendar)  # a gap


@pytest.mark.parametrize("hours", [1, 24, 30 * 24, 365.25 * 24])
def test_steps_of_constant_length(hours):
    first = to_seconds(dates("2003-01-15", "D", "standard", 1), "standard")[0]
    assert infer_month_step(first + 3600 * hours * np.arange(40), "standard") is None


def test_single_time_and_short_months():
    (time,) = to_seconds([cftime.datetime(2003, 1, 31, 6, calendar="noleap")], "noleap")
    assert infer_month_step(np.array([time]), "noleap") is None
    for place, day in (("start", 28), ("end", 28)):
        later = MonthStep(1, place).advance(time, 1, "noleap")
        assert later == to_seconds([cftime.datetime(2003, 2, day, 6, calendar="noleap")], "noleap")[0]


def test_times_in_float32():
    times = to_seconds(dates("2003-05-01", "MS", "standard"), "standard")
    blurred = (times / 86400).astype("f4").astype("f8") * 86400
    assert infer_month_step(blurred + 600, "standard") == MonthStep(1, "start")
