"""Turns of long tests: each seed runs a part of them, and all seeds together run all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from turns import SHARE, left_out


@given(st.text(max_size=5), st.integers(1, 20), st.integers(0, 99))
def test_seeds_in_a_row_run_each_case_once(name, count, seed):
    cases = list(range(count))
    run = [sorted(set(cases) - set(left_out(name, cases, seed + more))) for more in range(SHARE)]
    assert sorted(case for part in run for case in part) == cases
    assert {len(part) for part in run} <= {count // SHARE, -(-count // SHARE)}


@pytest.mark.parametrize("width", [2, 3])
def test_no_column_of_a_table_is_the_same_in_all_cases_of_a_seed(width):
    cases = [(row, column) for row in range(16) for column in range(width)]
    kept = set(cases) - set(left_out("test_table", cases, 20))
    assert {column for _, column in kept} == set(range(width))
