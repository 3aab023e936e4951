"""Grids that come and go over real MPI leave no communicator, and the process as it was."""

import gc
import sys

import pytest
from many_grids import use_grids
from mpi4py import MPI

import neondist as nd
from neondist.comm import DebugTransport, mpi
from neondist.errors import GridError
from neondist.geometry import factorisations

world = MPI.COMM_WORLD
SHAPES = len(factorisations(world.size, 2))


def handles():
    """How many communicators there are: MPI numbers them, and gives the number of one that is freed to the next."""
    gc.collect()  # messages of models keep theirs
    probe = world.Dup()
    number = probe.py2f()
    probe.Free()
    return number


@pytest.mark.skipif(world.size not in (1, 2, 6), reason="others have no shapes of grids that these lack")
@pytest.mark.parametrize("closed", [True, False])
def test_many_grids_and_models_leave_no_communicator(closed):
    """MPI has some thousands; a program may make a grid for each of its evaluations. A single one left is seen."""
    own = world.Dup()
    before = handles()
    use_grids(own, 40 if world.size <= 2 else 15, closed)
    assert handles() - before <= (0 if closed else 2 * SHAPES)
    own.Free()
    assert handles() <= before


def test_grids_of_one_shape_share_their_communicators_which_end_with_their_parent():
    whole = [nd.ProcessGrid(replicas=r) for r in (1, world.size) for _ in range(2)]
    one, two, three, four = (grid.tile_comm.comm for grid in whole)
    assert one == two
    assert three == four
    assert (one == three) == (world.size == 1)
    parts = []
    for _ in range(3):
        own = world.Dup()
        debug = nd.ProcessGrid(DebugTransport(mpi.MPITransport(own)))
        parts += [part.comm for part in (nd.ProcessGrid(own).tile_comm, debug.tile_comm.inner)]
        assert parts[-1].allreduce(1) == world.size
        own.Free()
    assert all(part == MPI.COMM_NULL for part in parts)


def test_a_closed_grid_leaves_others_of_its_shape_what_they_share():
    own = world.Dup()
    with nd.ProcessGrid(own) as grid:
        other = nd.ProcessGrid(own)
        shared = other.tile_comm.comm
    with pytest.raises(GridError, match="closed"):
        grid.tile_comm.allgather(0)
    assert other.tile_comm.allgather(world.rank) == list(range(world.size))
    other.close()
    assert shared == MPI.COMM_NULL
    assert nd.ProcessGrid(own).tile_comm.allgather(world.rank) == list(range(world.size))
    own.Free()


def test_the_last_grid_that_is_closed_takes_back_what_the_first_changed(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", plain := sys.__excepthook__)
    own = world.Dup()
    one, two = nd.ProcessGrid(own), nd.ProcessGrid(own)
    assert (sys.excepthook is plain) == (world.size == 1)
    one.close()
    assert (sys.excepthook is plain) == (world.size == 1)
    two.close()
    assert sys.excepthook is plain
    own.Free()
