"""Views, models and errors over MPI, on any number of ranks."""

import numpy as np
import pytest
from availability import KERNEL_VARIANTS
from common_checks import (
    check_collectives,
    check_messages,
    check_redistribution,
    check_views,
    list_grids,
    max_relative_difference,
    window_fits,
)
from invariance import train
from mpi4py import MPI
from root_rank import compute_on_root

import neondist as nd
from neondist.comm import DebugTransport, mpi, raise_if_any_failed
from neondist.errors import DataError, GridError

world = MPI.COMM_WORLD


def draw_windows(count):
    """Draw the same windows on every rank, without hypothesis."""
    rng, windows = np.random.default_rng(11), []
    while len(windows) < count:
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
        if window_fits(extent, window):
            windows.append((extent, window))
    return windows


def test_collectives_of_arrays():
    check_collectives(mpi.world_transport())
    for part in mpi.world_transport().split_tiles_and_replicas(1 if world.size % 2 else world.size // 2):
        check_collectives(part)


@pytest.mark.parametrize("max_count", [2, 3, 2**30])
def test_large_collectives_are_split(max_count):
    comm = mpi.world_transport(max_count=max_count)
    for part in (comm, *comm.split_tiles_and_replicas(1 if world.size % 2 else world.size // 2)):
        assert part.max_count == max_count
        check_collectives(part)
        check_messages(part)


def test_redistribution():
    grid, size = nd.ProcessGrid(world), world.size
    cuts = [(size, 1), (1, size), (1, 1), "whole", "first", *((s.rows, s.cols) for s in list_grids(size)[1:-1])]
    for shape, lead in (((7, 5), (3,)), ((2, 4), ()), ((0, 3), (2,))):
        for source in cuts:
            for target in cuts:
                check_redistribution(grid, shape, source, target, lead)


def test_views_and_dot_test():
    process_grids = [nd.ProcessGrid(world, rows=shape.rows, cols=shape.cols) for shape in list_grids(world.size)]
    for extent, window in draw_windows(20 if world.size < 6 else 8):  # on four shapes of grids
        for grid in process_grids:
            check_views(grid, extent, window)


@pytest.mark.parametrize("kind", ["everything", "unshared", "segmentation", "series", "normalised volume"])
def test_invariance(kind):
    expected = compute_on_root(lambda: train(kind))
    most_replicas = world.size if world.size <= 3 else 2  # tests on virtual ranks cover all replicas and kinds
    for replicas in (r for r in range(1, most_replicas + 1) if world.size % r == 0):
        shapes = list_grids(world.size // replicas)
        for shape in shapes if world.size <= 3 else shapes[len(shapes) // 2 :]:
            grid = nd.ProcessGrid(world, replicas=replicas, rows=shape.rows, cols=shape.cols)
            assert max_relative_difference(train(kind, grid), expected) < 1e-10, grid


def test_debug_transport_gives_the_same_bits():
    plain, debug = (
        train("fully convolutional", nd.ProcessGrid(t)) for t in (world, DebugTransport(mpi.world_transport()))
    )
    for name, array in plain.items():
        np.testing.assert_array_equal(debug[name], array)


@pytest.mark.parametrize("backend", KERNEL_VARIANTS[1:])
@pytest.mark.parametrize("kind", ["everything", "series", "segmentation"])
def test_other_backends(kind, backend):
    expected = compute_on_root(lambda: train(kind))
    assert max_relative_difference(train(kind, nd.ProcessGrid(), backend=backend), expected) < 1e-10


def test_every_rank_ends_with_the_same_weights():
    state = train("everything", nd.ProcessGrid())
    for name, array in state.items():
        for other in world.allgather(array):
            np.testing.assert_array_equal(array, other, err_msg=name)


def test_large_messages_in_float32():
    grid = nd.ProcessGrid()
    array = nd.GlobalArray(grid, (2, 128, 130, 16), nd.Window(5, padding=2), reuse=True)
    image = np.random.default_rng(0).normal(size=array.global_shape).astype(np.float32)
    padded = np.pad(image, [(0, 0), (2, 2), (2, 2), (0, 0)])
    for _ in range(3):
        view = array.get_fprop_view(array.scatter(image))
        np.testing.assert_array_equal(view, padded[(slice(None), *array.need.shift((2, 2)).slices)])


def test_errors_are_agreed_on():
    transport = mpi.world_transport()
    failing = transport.size - 1
    with pytest.raises(DataError, match="broken file"):
        raise_if_any_failed(transport, DataError("broken file") if transport.rank == failing else None)
    raise_if_any_failed(transport, None)


def test_invalid_grid_is_rejected_on_every_rank():
    with pytest.raises(GridError, match="does not match"):
        nd.ProcessGrid(rows=world.size + 1)


def test_grid_on_a_subcommunicator():
    half = world.Split(world.rank % 2, world.rank)
    grid = nd.ProcessGrid(half)
    assert grid.size == half.size
    assert max_relative_difference(train("perceptron", grid), train("perceptron")) < 1e-10
