"""Random modules against one process, in float64: those of NEONDIST_SEED; `make hunt` draws others.

`tools/random_modules.py` tries as many as one likes.
"""

import os

import pytest

pytest.importorskip("torch")

from module_steps import STEPS
from random_modules import attempt, draw, shrink

SEED = int(os.environ["NEONDIST_SEED"])
CASES, AT_ONCE = 18, 6


@pytest.mark.parametrize("first", range(0, CASES, AT_ONCE))
def test_random_modules_give_the_numbers_of_one_process(first):
    exact = 0
    for number in range(first, first + AT_ONCE):
        drawn = draw(SEED, number)
        for grid, outcome in attempt(drawn, drawn.grids()[:1]):
            if outcome.startswith("wrong"):
                small = shrink(drawn, grid)
                ((_, outcome),) = attempt(small, (grid,))
                pytest.fail(
                    f"NEONDIST_SEED={SEED}, module {number}, {grid}: {outcome}\n{small.shapes}\n{small.program()}"
                )
            exact += outcome == "exact"
    assert exact >= AT_ONCE // 2, "most are refused"


def test_the_same_number_draws_the_same_module():
    assert draw(3, 5) == draw(3, 5)
    assert draw(3, 5).program() != draw(4, 5).program()


def test_many_kinds_of_steps():
    assert len(STEPS) > 40
