"""Generated networks over real MPI: exact ones against one process, the others against virtual ranks."""

import os

import pytest
from graphs.build import is_exact
from graphs.check import TOLERANCE, check_bytes, differs, ill_conditioned
from graphs.draw import draw_case
from graphs.play import first_part, first_state, joined, second_part
from mpi4py import MPI
from of_one import of_one

from neondist.comm import loopback, mpi
from neondist.geometry import factorisations

world = MPI.COMM_WORLD
SEED = int(os.environ["NEONDIST_SEED"])
CASES, AT_ONCE = 4, 2


def both(case, state, comm=None):
    """What one rank finds on the case's two grids, one after the other."""
    first = first_part(case, state, comm)
    return first, second_part(case, first, comm)


def expected(case, state):
    """What all ranks should find, without MPI."""
    if is_exact(case):
        return joined(*both(case, state))
    return loopback.run(world.size, lambda comm: joined(*both(case, state, comm)))[0]


@pytest.mark.parametrize("first", range(0, CASES, AT_ONCE))
def test_generated_networks(first):
    grids = factorisations(world.size, 4)
    for number in range(first, first + AT_ONCE):
        case = of_one(lambda number=number: draw_case(SEED, 10_000 * world.size + number, grids, grids))
        state, _ = of_one(lambda case=case: first_state(case))
        parts, wanted = (
            both(case, state, mpi.MPITransport(world)),
            of_one(lambda case=case, state=state: expected(case, state)),
        )
        found = joined(*parts)
        wrong = differs(found, wanted, TOLERANCE[case.dtype])
        if wrong and ill_conditioned(case, lambda other, state=state: expected(other, state), wrong, found, wanted):
            continue
        assert wrong is None, f"NEONDIST_SEED={SEED}: {wrong}\n\n{case.program()}"
        for grid, part in zip((case.grid, case.other), parts, strict=True):
            check_bytes(case, grid, world.allgather(part))
