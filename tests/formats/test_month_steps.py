"""Steps of calendar months against dates of xarray and cftime."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def stamps_at(calendar, days_and_hours, first, step, count):
    """Return a stamp in each month of a series, from the (day, hour) of each of the 12 calendar months."""
    numbers = [first + step * number for number in range(count)]
    parts = [(2001 + n // 12, n % 12 + 1, *days_and_hours[n % 12]) for n in numbers]
    return to_seconds([cftime.datetime(*part, calendar=calendar) for part in parts], calendar)


MID_MONTH_STAMPS = st.tuples(
    *(
        st.tuples(st.sampled_from([14, 15] if month == 2 else [15, 16]), st.sampled_from([0, 6]))
        for month in range(1, 13)
    )
)


@given(st.sampled_from(CALENDARS), MID_MONTH_STAMPS, st.integers(0, 11), st.sampled_from([1, 3]), st.integers(0, 20))
def test_stamps_near_the_middle_of_months(calendar, days_and_hours, first, step, missing):
    times = stamps_at(calendar, days_and_hours, first, step, 60)
    known = times[:30]
    found = infer_month_step(known, calendar)
    assert found.months == step
    later = [found.advance(known[-1], n, calendar) for n in range(31)]
    np.testing.assert_allclose(later, times[29:], rtol=0, atol=1e-3)
    gap = np.delete(known, 1 + missing)
    assert not found.matches(gap, calendar)
    assert infer_month_step(gap, calendar) is None
    shifted = known.copy()
    shifted[1 + missing] += 86400 * 5
    assert not found.matches(shifted, calendar)
    assert infer_month_step(shifted, calendar) is None


@given(st.sampled_from(["standard", "noleap", "all_leap"]), st.integers(13, 18), st.integers(0, 11), st.integers(3, 40))
def test_steps_of_thirty_days_are_no_months(calendar, day, first, count):
    (start,) = stamps_at(calendar, [(day, 0)] * 12, first, 1, 1)
    step = infer_month_step(start + 30 * 86400 * np.arange(count), calendar)
    assert step is None or step.place == "middle day"  # three times, with February


@pytest.mark.parametrize("calendar", ["standard", "noleap"])
@pytest.mark.parametrize(
    ("january", "february", "march", "april"),
    [
        ((15, 0), (14, 0), (15, 0), (15, 0)),
        ((16, 6), (15, 0), (16, 6), (16, 6)),
        ((15, 0), (15, 12), (16, 0), None),
    ],
)
def test_stamps_of_other_months_are_those_of_similar_length(calendar, january, february, march, april):
    stamps = january, february, march, april or march
    times = stamps_at(calendar, stamps, 0, 1, 4)
    step = infer_month_step(times[:3], calendar)
    assert step.place == "near middle"
    assert step.advance(times[2], 1, calendar) == times[3]
    single = step.with_stamps(times[3:] + 3600, calendar)
    assert single.advance(times[3] + 3600, 12, calendar) == stamps_at(calendar, stamps * 3, 15, 12, 1)[0] + 3600
    assert single.advance(times[3], 9, calendar) == stamps_at(calendar, [january], 12, 1, 1)[0]


def test_invalid_stamps():
    for stamp in ((0, 31, 0.0), (1, 32, 0.0), (1, 31, 3e6), (1, 31, float("nan"))):
        with pytest.raises(ValueError, match="not a calendar month, its days, and seconds in it"):
            MonthStep(1, "near middle", (stamp,))
