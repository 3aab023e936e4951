"""Random modules against one process, in float64: those of NEONDIST_SEED; `make hunt` draws others.

`tools/random_modules.py` tries as many as one likes.
"""

import os

import pytest

pytest.importorskip("torch")

from module_steps import STEPS
from random_modules import Drawn, attempt, draw, shrink

SEED = int(os.environ["NEONDIST_SEED"])
CASES, AT_ONCE = 18, 6


@pytest.mark.parametrize("first", range(0, CASES, AT_ONCE))
@pytest.mark.long
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


def test_what_is_read_is_read_anew_and_windows_receive_what_they_need():
    """A change between passes, and strides that end before the next tile's cells."""
    setup = "self.m0 = nn.Conv2d(2, 2, (3, 1), (2, 3), (1, 0))", "self.m1 = {'a': [1]}"
    steps = "y0 = F.max_pool2d(x0.roll(self.m1['a'][0], 3), 2, 3)", "y1 = self.m0(x0) * self.m1['a'][0]"
    drawn = Drawn(((2, 2, 11, 8),), setup, steps, "y0, y1", changes=("self.m1['a'][0] = 3",))
    assert attempt(drawn, ((1, 1, 3, 2),)) == [((1, 1, 3, 2), "exact")]


def test_the_same_number_draws_the_same_module():
    assert draw(3, 5) == draw(3, 5)
    assert draw(3, 5).program() != draw(4, 5).program()


def test_many_kinds_of_steps():
    assert len(STEPS) > 40
