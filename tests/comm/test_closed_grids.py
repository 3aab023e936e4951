"""Grids that are closed: nothing communicates through them, nothing of them stays."""

import gc

import numpy as np
import pytest
from many_grids import BATCH, SHAPE, small_model, use_grids

import neondist as nd
from neondist.comm import DebugTransport, loopback
from neondist.comm.loopback import _Group
from neondist.comm.single import SingleTransport
from neondist.errors import DataError, GridError, RemoteError


@pytest.mark.parametrize("watched", [False, True])
def test_what_was_built_on_a_closed_grid_says_so(watched):
    def body(comm):
        grid = nd.ProcessGrid(DebugTransport(comm) if watched else comm, replicas=2)
        array = nd.GlobalArray(grid, (BATCH, 6, 5, 1), nd.Window(3, padding=1))
        model, images = small_model(grid), np.ones((BATCH, *SHAPE), np.float32)
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
            lambda: small_model(grid),
            lambda: grid.world.allgather(0),
            lambda: grid.tile_comm.size,
            lambda: grid.group("replicas").allgather(0),
        ):
            with pytest.raises(GridError, match=r"this process grid is closed: create another with nd.ProcessGrid\(\)"):
                use()
        return comm.allgather(comm.rank)  # it is the caller's

    assert loopback.run(4, body) == [[0, 1, 2, 3]] * 4


def test_a_closed_grid_of_one_process():
    with nd.ProcessGrid.serial() as grid:
        model = small_model(grid)
        tile = model.scatter(np.ones((BATCH, *SHAPE), np.float32))
    with pytest.raises(GridError, match="closed"):
        model.train_batch(tile, np.zeros(BATCH, int))
    mine = SingleTransport()
    nd.ProcessGrid(mine).close()
    assert not mine.closed


@pytest.mark.parametrize(("error", "closes"), [(DataError("all have it"), True), (OSError("one has it"), False)])
def test_an_error_closes_the_grid_if_all_ranks_have_it(error, closes):
    """Who closes alone waits for the others; and an exception that nothing catches has to end the job."""

    def body(comm):
        with pytest.raises((DataError, OSError, RemoteError)), nd.ProcessGrid(comm) as grid:
            nd.comm.agree(comm, error if comm.rank == 0 else None)
        return grid.closed

    assert loopback.run(2, body)[0] == closes


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.long
def test_many_grids_leave_nothing(closed):
    def groups():
        gc.collect()
        return sum(isinstance(found, _Group) for found in gc.get_objects())

    before = groups()
    left = loopback.run(2, lambda comm: (use_grids(comm, 40, closed), comm.allgather(0), groups()))
    assert max(one for _, _, one in left) <= before + 8
    assert groups() == before
