"""Grids created and closed over MPI: they leave no communicator, and the process unchanged."""

import gc
import sys
import time

import pytest
from many_grids import train_on_grids
from mpi4py import MPI

import neondist as nd
from neondist.comm import DebugTransport, all_or_none, mpi
from neondist.errors import ConfigError, GridError
from neondist.geometry import factorisations

world = MPI.COMM_WORLD
SHAPES = len(factorisations(world.size, 2))


def create_handle():
    """Return the handle of a new communicator, which counts them: MPI reuses handles of freed ones."""
    gc.collect()  # messages of models hold communicators
    probe = world.Dup()
    number = probe.py2f()
    probe.Free()
    return number


@pytest.mark.skipif(world.size not in (1, 2, 6), reason="other numbers of ranks have no further shapes of grids")
@pytest.mark.parametrize("closed", [True, False])
def test_many_grids_and_models_leave_no_communicator(closed):
    """Detect any communicator that is left: MPI has few thousands, and programs may create a grid per evaluation."""
    comm = world.Dup()
    before = create_handle()
    train_on_grids(comm, 40 if world.size <= 2 else 15, closed)
    assert create_handle() - before <= (0 if closed else 2 * SHAPES)
    comm.Free()
    assert create_handle() <= before


@pytest.mark.parametrize("wrap", [lambda transport: transport, DebugTransport])
def test_ranks_sleep_while_only_the_root_works(wrap):
    transport = wrap(mpi.MPITransport(world))

    @all_or_none(transport, root_only=True)
    def fail_late():
        if world.rank == 0:
            time.sleep(0.5)
            raise ConfigError("from rank 0")

    before = time.process_time()
    with pytest.raises(ConfigError, match="from rank 0"):
        fail_late()
    assert time.process_time() - before < 0.25


def test_grids_of_one_shape_share_communicators():
    grids = [nd.ProcessGrid(replicas=r) for r in (1, world.size) for _ in range(2)]
    first, second, third, fourth = (grid.tile_comm.comm for grid in grids)
    assert first == second
    assert third == fourth
    assert (first == third) == (world.size == 1)
    parts = []
    for _ in range(3):
        parent = world.Dup()
        debug = nd.ProcessGrid(DebugTransport(mpi.MPITransport(parent)))
        parts += [part.comm for part in (nd.ProcessGrid(parent).tile_comm, debug.tile_comm.wrapped)]
        assert parts[-1].allreduce(1) == world.size
        parent.Free()
    assert all(part == MPI.COMM_NULL for part in parts)


def test_closed_grid_keeps_shared_communicators():
    comm = world.Dup()
    with nd.ProcessGrid(comm) as grid:
        second = nd.ProcessGrid(comm)
        shared = second.tile_comm.comm
    with pytest.raises(GridError, match="closed"):
        grid.tile_comm.allgather(0)
    assert second.tile_comm.allgather(world.rank) == list(range(world.size))
    second.close()
    assert shared == MPI.COMM_NULL
    assert nd.ProcessGrid(comm).tile_comm.allgather(world.rank) == list(range(world.size))
    comm.Free()


def test_last_closed_grid_restores_the_exception_hook(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", plain := sys.__excepthook__)
    comm = world.Dup()
    first, second = nd.ProcessGrid(comm), nd.ProcessGrid(comm)
    assert (sys.excepthook is plain) == (world.size == 1)
    first.close()
    assert (sys.excepthook is plain) == (world.size == 1)
    second.close()
    assert sys.excepthook is plain
    comm.Free()
