"""Generated networks over real MPI: exact ones against one process, the others against virtual ranks."""

import os

import pytest
from graphs.build import is_exact
from graphs.check import TOLERANCE, check_bytes, differs
from graphs.draw import draw_case
from graphs.play import first_part, first_state, joined, second_part
from mpi4py import MPI
from of_one import of_one

from neondist.comm import loopback, mpi
from neondist.geometry import factorisations

world = MPI.COMM_WORLD
SEED = int(os.environ["NEONDIST_SEED"])
CASES, AT_ONCE = 8, 4


def play(case, state, comm):
    first = first_part(case, state, comm)
    return first, second_part(case, first, comm)


@pytest.mark.parametrize("first", range(0, CASES, AT_ONCE))
def test_generated_networks(first):
    grids = factorisations(world.size, 4)
    for number in range(first, first + AT_ONCE):
        case = of_one(lambda number=number: draw_case(SEED, 10_000 * world.size + number, grids, grids))
        state, _ = of_one(lambda case=case: first_state(case))

        def expected(case=case, state=state):
            if is_exact(case):
                return joined(*play(case, state, None))
            return loopback.run(world.size, lambda comm: joined(*play(case, state, comm)))[0]

        parts = play(case, state, mpi.MPITransport(world))
        wrong = differs(joined(*parts), of_one(expected), TOLERANCE[case.dtype])
        assert wrong is None, f"NEONDIST_SEED={SEED}: {wrong}\n\n{case.program()}"
        for grid, part in zip((case.grid, case.other), parts, strict=True):
            check_bytes(case, grid, world.allgather(part))
