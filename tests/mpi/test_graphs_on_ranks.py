"""Generated networks over real MPI: exact ones against one process, the others against virtual ranks."""

import pytest
from graphs.build import is_exact
from graphs.check import TOLERANCE, check_bytes, differs, ill_conditioned
from graphs.draw import draw_case
from graphs.play import first_part, first_state, joined, second_part
from mpi4py import MPI
from of_one import of_one
from turns import EVERY, SEED

from neondist.comm import loopback, mpi
from neondist.geometry import factorisations

world = MPI.COMM_WORLD
CASES = 4 if EVERY else 2


def both(case, state, comm=None):
    """What one rank finds on the case's two grids, one after the other."""
    first = first_part(case, state, comm)
    return first, second_part(case, first, comm)


def expected(case, state):
    """What all ranks should find, without MPI."""
    if is_exact(case):
        return joined(*both(case, state))
    return loopback.run(world.size, lambda comm: joined(*both(case, state, comm)))[0]


@pytest.mark.parametrize("number", range(CASES))
def test_generated_networks(number):
    grids = factorisations(world.size, 4)
    case = of_one(lambda: draw_case(SEED, 10_000 * world.size + number, grids, grids))
    state, _ = of_one(lambda: first_state(case))
    parts, wanted = both(case, state, mpi.MPITransport(world)), of_one(lambda: expected(case, state))
    found = joined(*parts)
    wrong = differs(found, wanted, TOLERANCE[case.dtype])
    if wrong and ill_conditioned(case, lambda other: expected(other, state), wrong, found, wanted):
        return
    assert wrong is None, f"NEONDIST_SEED={SEED}: {wrong}\n\n{case.program()}"
    for grid, part in zip((case.grid, case.other), parts, strict=True):
        check_bytes(case, grid, world.allgather(part))
