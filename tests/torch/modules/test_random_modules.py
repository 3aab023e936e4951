"""Random modules against a single process, in float64, drawn with NEONDIST_SEED; `make hunt` draws others.

`tools/random_modules.py` tries any number of them.
"""

import os

import pytest

pytest.importorskip("torch")

from module_steps import STEPS
from random_modules import RandomModule, draw_module, run_on_grids, shrink

SEED = int(os.environ["NEONDIST_SEED"])
NUMBER_OF_CASES, CASES_PER_TEST = 18, 6


@pytest.mark.parametrize("first", range(0, NUMBER_OF_CASES, CASES_PER_TEST))
@pytest.mark.long
def test_random_modules_match_single_process(first):
    exact = 0
    for number in range(first, first + CASES_PER_TEST):
        module = draw_module(SEED, number)
        for grid, outcome in run_on_grids(module, module.grids()[:1]):
            if outcome.startswith("wrong"):
                smallest = shrink(module, grid)
                ((_, outcome),) = run_on_grids(smallest, (grid,))
                pytest.fail(
                    f"NEONDIST_SEED={SEED}, module {number}, {grid}: {outcome}\n{smallest.shapes}\n{smallest.program()}"
                )
            exact += outcome == "exact"
    assert exact >= CASES_PER_TEST // 2, "most are rejected"


def test_changed_attributes_and_strided_windows():
    """Values that change between passes, and strided windows that end before the next tile's cells."""
    setup = "self.m0 = nn.Conv2d(2, 2, (3, 1), (2, 3), (1, 0))", "self.m1 = {'a': [1]}"
    steps = "y0 = F.max_pool2d(x0.roll(self.m1['a'][0], 3), 2, 3)", "y1 = self.m0(x0) * self.m1['a'][0]"
    module = RandomModule(((2, 2, 11, 8),), setup, steps, "y0, y1", changes=("self.m1['a'][0] = 3",))
    assert run_on_grids(module, ((1, 1, 3, 2),)) == [((1, 1, 3, 2), "exact")]


def test_drawing_is_deterministic():
    assert draw_module(3, 5) == draw_module(3, 5)
    assert draw_module(3, 5).program() != draw_module(4, 5).program()


def test_number_of_step_kinds():
    assert len(STEPS) > 40
