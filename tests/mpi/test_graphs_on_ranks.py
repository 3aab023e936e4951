"""Generated networks over MPI: exact ones against one process, others against virtual ranks."""

import pytest
from case_selection import ALL_CASES, SEED
from graphs.build import is_exact
from graphs.check import TOLERANCE, check_bytes, find_difference, is_ill_conditioned
from graphs.draw import draw_case
from graphs.execution import draw_state, merge_results, run_first_part, run_second_part
from mpi4py import MPI
from root_rank import compute_on_root

from neondist.comm import loopback, mpi
from neondist.geometry import factorisations

world = MPI.COMM_WORLD
CASES = 4 if ALL_CASES else 2


def run_both_grids(case, state, comm=None):
    """Return the results of one rank on both grids of a case, one after the other."""
    first = run_first_part(case, state, comm)
    return first, run_second_part(case, first, comm)


def compute_expected(case, state):
    """Return the expected results of all ranks, computed without MPI."""
    if is_exact(case):
        return merge_results(*run_both_grids(case, state))
    return loopback.run(world.size, lambda comm: merge_results(*run_both_grids(case, state, comm)))[0]


@pytest.mark.parametrize("number", range(CASES))
def test_generated_networks(number):
    grids = factorisations(world.size, 4)
    case = compute_on_root(lambda: draw_case(SEED, 10_000 * world.size + number, grids, grids))
    state, _ = compute_on_root(lambda: draw_state(case))
    parts, expected = (
        run_both_grids(case, state, mpi.MPITransport(world)),
        compute_on_root(lambda: compute_expected(case, state)),
    )
    actual = merge_results(*parts)
    difference = find_difference(actual, expected, TOLERANCE[case.dtype])
    if difference and is_ill_conditioned(
        case, lambda changed: compute_expected(changed, state), difference, actual, expected
    ):
        return
    assert difference is None, f"NEONDIST_SEED={SEED}: {difference}\n\n{case.program()}"
    for grid, part in zip((case.grid, case.second_grid), parts, strict=True):
        check_bytes(case, grid, world.allgather(part))
