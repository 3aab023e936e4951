"""Steps of calendar months and years against dates of xarray and cftime."""

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


def period_middles(first, months, whole_days=False, minutes=0):
    """Return a function that returns the middles of periods, such as means over them have, in a calendar."""

    def middles_of_periods(calendar):
        starts = cftime.date2num(dates(first, f"{months}MS", calendar, 41), UNITS, calendar).astype("f8")
        values = (starts[1:] + starts[:-1]) / 2 + minutes / 1440
        return cftime.num2date(np.floor(values) if whole_days else values, UNITS, calendar)

    return middles_of_periods


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
    "2 July": lambda calendar: dates("2003-07-01", "YS-JUL", calendar) + np.timedelta64(1, "D").astype(object),
    "middles of years": period_middles("2003-01-01", 12),
    "middles of years of hourly times": period_middles("2003-01-01", 12, minutes=-30),
    "middle days of years": period_middles("2003-01-01", 12, whole_days=True),
    "middles of hydrological years": period_middles("2003-10-01", 12),
    "middles of half years": period_middles("2003-01-01", 6),
    "middles of seasons": period_middles("2003-12-01", 3),
    "middles of decades": period_middles("1851-01-01", 120),
}


@pytest.mark.parametrize("calendar", CALENDARS)
@pytest.mark.parametrize("name", SERIES)
def test_steps_match_xarray(name, calendar):
    times = to_seconds(SERIES[name](calendar), calendar)
    step = infer_month_step(times[:14], calendar)
    later = [step.advance(times[13], n, calendar) for n in range(27)]
    np.testing.assert_allclose(later, times[13:40], rtol=0, atol=1e-3)
    assert step.matches_times(times, calendar)
    assert not step.matches_times(np.delete(times, 5), calendar)  # a gap


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
    assert not found.matches_times(gap, calendar)
    assert infer_month_step(gap, calendar) is None
    shifted = known.copy()
    shifted[1 + missing] += 86400 * 5
    assert not found.matches_times(shifted, calendar)
    assert infer_month_step(shifted, calendar) is None


@given(
    st.sampled_from(CALENDARS),
    st.tuples(*[st.tuples(st.integers(1, 3), st.sampled_from([0, 6, 11.5, 12]))] * 2),
    st.integers(1850, 2100),
    st.integers(9, 30),
    st.integers(0, 6),
)
def test_stamps_near_the_middle_of_years(calendar, of_years, first, known, missing):
    """Days of July and hours of common and leap years differ."""
    leap = [cftime.is_leap_year(year, calendar) for year in range(first, first + 40)]
    parts = [(first + n, 7, of_years[is_leap][0]) for n, is_leap in enumerate(leap)]
    hours = np.array([of_years[is_leap][1] for is_leap in leap])
    times = to_seconds([cftime.datetime(*part, calendar=calendar) for part in parts], calendar) + 3600 * hours
    found = infer_month_step(times[:known], calendar)
    assert found.months == 12
    later = [found.advance(times[known - 1], n, calendar) for n in range(10)]
    np.testing.assert_allclose(later, times[known - 1 : known + 9], rtol=0, atol=1e-3)
    gap = np.delete(times[:known], 1 + missing)
    assert not found.matches_times(gap, calendar)
    assert infer_month_step(gap, calendar) is None


@pytest.mark.parametrize("calendar", ["standard", "julian", "noleap"])
@pytest.mark.parametrize("days", [365, 365.25, 366])
def test_years_of_constant_length_are_not_calendar_years(calendar, days):
    (start,) = to_seconds([cftime.datetime(2001, 7, 2, calendar=calendar)], calendar)
    step = infer_month_step(start + 86400 * days * np.arange(30), calendar)
    assert (step is None) == (calendar != "noleap" or days != 365)


@given(st.sampled_from(["standard", "noleap", "all_leap"]), st.integers(13, 18), st.integers(0, 11), st.integers(3, 40))
def test_steps_of_thirty_days_are_not_months(calendar, day, first, count):
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
def test_stamps_of_other_months_follow_months_of_similar_length(calendar, january, february, march, april):
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
        with pytest.raises(ValueError, match="expected a calendar month, its days, and seconds in it"):
            MonthStep(1, "near middle", (stamp,))
    with pytest.raises(ValueError, match="expected a calendar month, its days, and seconds in it"):
        MonthStep(12, "near middle", ((1, 373, 0.0),), 12)
    with pytest.raises(ValueError, match="3 months, period 12, place 'middle'"):
        MonthStep(3, "middle", (), 12)
