"""Views, models and errors over real MPI, at whatever rank count mpirun gives."""

import numpy as np
import pytest
from invariance import train
from mpi4py import MPI
from of_one import of_one
from present import KERNELS
from support import check_collectives, check_messages, check_redistribution, check_views, grids, slides, worst

import neondist as nd
from neondist.comm import DebugTransport, agree, mpi
from neondist.errors import DataError, GridError

world = MPI.COMM_WORLD


def random_windows(count):
    """The same windows on every rank, drawn without hypothesis' own randomness."""
    rng, found = np.random.default_rng(11), []
    while len(found) < count:
        ndim = int(rng.integers(1, 4))
        extent = tuple(int(n) for n in rng.integers(1, 12, ndim))
        window = nd.Window(
            kernel=tuple(rng.integers(1, 6, ndim)),
            stride=tuple(rng.integers(1, 4, ndim)),
            padding=tuple((int(a), int(b)) for a, b in rng.integers(0, 5, (ndim, 2))),
            dilation=tuple(rng.integers(1, 3, ndim)),
            mode=str(rng.choice(["zeros", "reflect", "replicate", "wrap"])),
            ndim=ndim,
        )
        if slides(extent, window):
            found.append((extent, window))
    return found


def test_collectives_of_arrays():
    check_collectives(mpi.world())
    for part in mpi.world().cut(1 if world.size % 2 else world.size // 2):
        check_collectives(part)


@pytest.mark.parametrize("most", [2, 3, 2**30])
def test_collectives_larger_than_a_count_go_in_parts(most):
    comm = mpi.world(most=most)
    for part in (comm, *comm.cut(1 if world.size % 2 else world.size // 2)):
        assert part.most == most
        check_collectives(part)
        check_messages(part)


def test_redistribution():
    grid, size = nd.ProcessGrid(world), world.size
    cuts = [(size, 1), (1, size), (1, 1), "whole", "first", *((s.rows, s.cols) for s in grids(size)[1:-1])]
    for shape, lead in (((7, 5), (3,)), ((2, 4), ()), ((0, 3), (2,))):
        for source in cuts:
            for target in cuts:
                check_redistribution(grid, shape, source, target, lead)


def test_views_and_dot_test():
    made = [nd.ProcessGrid(world, rows=shape.rows, cols=shape.cols) for shape in grids(world.size)]
    for extent, window in random_windows(20 if world.size < 6 else 8):  # on four shapes of grids
        for grid in made:
            check_views(grid, extent, window)


@pytest.mark.parametrize("kind", ["everything", "unshared", "segmentation", "series", "normalised volume"])
def test_invariance(kind):
    expected = of_one(lambda: train(kind))
    most = world.size if world.size <= 3 else 2  # virtual ranks go through all of them, and through all kinds
    for replicas in (r for r in range(1, most + 1) if world.size % r == 0):
        shapes = grids(world.size // replicas)
        for shape in shapes if world.size <= 3 else shapes[len(shapes) // 2 :]:
            grid = nd.ProcessGrid(world, replicas=replicas, rows=shape.rows, cols=shape.cols)
            assert worst(train(kind, grid), expected) < 1e-10, grid


def test_watched_messages_give_the_same_bits():
    plain, debug = (train("fully convolutional", nd.ProcessGrid(t)) for t in (world, DebugTransport(mpi.world())))
    for name, array in plain.items():
        np.testing.assert_array_equal(debug[name], array)


@pytest.mark.parametrize("backend", KERNELS[1:])
@pytest.mark.parametrize("kind", ["everything", "series", "segmentation"])
def test_other_backends(kind, backend):
    expected = of_one(lambda: train(kind))
    assert worst(train(kind, nd.ProcessGrid(), backend=backend), expected) < 1e-10


def test_every_rank_ends_with_the_same_weights():
    state = train("everything", nd.ProcessGrid())
    for name, array in state.items():
        for other in world.allgather(array):
            np.testing.assert_array_equal(array, other, err_msg=name)


def test_large_messages_in_float32():
    grid = nd.ProcessGrid()
    ga = nd.GlobalArray(grid, (2, 128, 130, 16), nd.Window(5, padding=2), reuse=True)
    whole = np.random.default_rng(0).normal(size=ga.global_shape).astype(np.float32)
    padded = np.pad(whole, [(0, 0), (2, 2), (2, 2), (0, 0)])
    for _ in range(3):
        view = ga.get_fprop_view(ga.scatter(whole))
        np.testing.assert_array_equal(view, padded[(slice(None), *ga.need.shift((2, 2)).slices)])


def test_errors_are_agreed_on():
    transport = mpi.world()
    failing = transport.size - 1
    with pytest.raises(DataError, match="broken file"):
        agree(transport, DataError("broken file") if transport.rank == failing else None)
    agree(transport, None)


def test_a_grid_that_does_not_fit_is_refused_on_every_rank():
    with pytest.raises(GridError, match="does not match"):
        nd.ProcessGrid(rows=world.size + 1)


def test_a_sub_communicator_serves_as_a_grid():
    half = world.Split(world.rank % 2, world.rank)
    grid = nd.ProcessGrid(half)
    assert grid.size == half.size
    assert worst(train("perceptron", grid), train("perceptron")) < 1e-10
