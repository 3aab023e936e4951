"""Closed grids: they reject communication, and release their resources."""

import gc

import numpy as np
import pytest
from many_grids import BATCH, SHAPE, build_small_model, train_on_grids

import neondist as nd
from neondist.comm import DebugTransport, loopback
from neondist.comm.loopback import _MailboxGroup
from neondist.comm.single import SingleTransport
from neondist.errors import DataError, GridError, RemoteError


@pytest.mark.parametrize("debug", [False, True])
def test_use_of_a_closed_grid_is_an_error(debug):
    def run_rank(comm):
        grid = nd.ProcessGrid(DebugTransport(comm) if debug else comm, replicas=2)
        array = nd.GlobalArray(grid, (BATCH, 6, 5, 1), nd.Window(3, padding=1))
        model, images = build_small_model(grid), np.ones((BATCH, *SHAPE), np.float32)
        tile, part = model.scatter(images), array.scatter(images[..., :1])
        assert not grid.closed
        grid.close()
        grid.close()
        assert grid.closed
        for use in (
            lambda: model.train_batch(tile, np.zeros(BATCH, int)),
            lambda: model.fprop(tile),
            lambda: array.get_fprop_view(part),
            lambda: array.gather(part),
            lambda: nd.GlobalArray(grid, (BATCH, 6, 5, 1), nd.Window(3, padding=1)),
            lambda: build_small_model(grid),
            lambda: grid.world.allgather(0),
            lambda: grid.tile_comm.size,
            lambda: grid.group("replicas").allgather(0),
        ):
            with pytest.raises(GridError, match=r"this process grid is closed: create another with nd.ProcessGrid\(\)"):
                use()
        return comm.allgather(comm.rank)  # the caller's transport stays open

    assert loopback.run(4, run_rank) == [[0, 1, 2, 3]] * 4


def test_closed_grid_of_one_process():
    with nd.ProcessGrid.serial() as grid:
        model = build_small_model(grid)
        tile = model.scatter(np.ones((BATCH, *SHAPE), np.float32))
    with pytest.raises(GridError, match="closed"):
        model.train_batch(tile, np.zeros(BATCH, int))
    grid = nd.ProcessGrid()  # over MPI.COMM_WORLD
    grid.close()
    grid.close()
    transport = SingleTransport()
    nd.ProcessGrid(transport).close()
    assert not transport.closed


@pytest.mark.parametrize(("error", "closes"), [(DataError("all have it"), True), (OSError("one has it"), False)])
def test_agreed_errors_close_the_grid(error, closes):
    """Keep the grid open after an error on one rank, whose job must end without waiting for the others."""

    def run_rank(comm):
        with pytest.raises((DataError, OSError, RemoteError)), nd.ProcessGrid(comm) as grid:
            nd.comm.raise_if_any_failed(comm, error if comm.rank == 0 else None)
        return grid.closed

    assert loopback.run(2, run_rank)[0] == closes


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.long
def test_many_grids_leave_no_groups(closed):
    def count_groups():
        gc.collect()
        return sum(isinstance(item, _MailboxGroup) for item in gc.get_objects())

    before = count_groups()
    results = loopback.run(2, lambda comm: (train_on_grids(comm, 40, closed), comm.allgather(0), count_groups()))
    assert max(count for _, _, count in results) <= before + 8
    assert count_groups() == before
