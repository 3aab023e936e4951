"""Selection of long tests: each seed runs a part, and consecutive seeds run all."""

import pytest
from case_selection import LONG_TEST_PERIOD, list_deselected_cases
from hypothesis import given
from hypothesis import strategies as st


@given(st.text(max_size=5), st.integers(1, 20), st.integers(0, 99))
def test_consecutive_seeds_run_each_case_once(name, count, seed):
    cases = list(range(count))
    parts = [
        sorted(set(cases) - set(list_deselected_cases(name, cases, seed + offset)))
        for offset in range(LONG_TEST_PERIOD)
    ]
    assert sorted(case for part in parts for case in part) == cases
    assert {len(part) for part in parts} <= {count // LONG_TEST_PERIOD, -(-count // LONG_TEST_PERIOD)}


@pytest.mark.parametrize("width", [2, 3])
def test_cases_of_a_seed_cover_all_columns(width):
    cases = [(row, column) for row in range(16) for column in range(width)]
    selected = set(cases) - set(list_deselected_cases("test_table", cases, 20))
    assert {column for _, column in selected} == set(range(width))
