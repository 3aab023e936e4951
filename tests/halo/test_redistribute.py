"""Redistribution of tiles from one grid to another."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import neondist as nd
from neondist.comm import loopback
from neondist.geometry.regions import OverlappingPartition


def factor_grids(ranks):
    """Return all grids of a number of ranks."""
    return [
        {"replicas": replicas, "rows": rows, "cols": ranks // replicas // rows}
        for replicas in range(1, ranks + 1)
        for rows in range(1, ranks // replicas + 1)
        if ranks % replicas == 0 and ranks // replicas % rows == 0
    ]


@st.composite
def cases(draw):
    ranks = draw(st.integers(1, 6))
    extent = tuple(draw(st.integers(0, 7)) for _ in range(draw(st.sampled_from([0, 2]))))
    shape = (draw(st.integers(1, 8)), *extent, draw(st.integers(1, 3)))
    grids = st.sampled_from(factor_grids(ranks))
    return ranks, shape, draw(grids), draw(grids), draw(st.integers(1, shape[0]))


@settings(max_examples=60, deadline=None)
@given(cases())
def test_redistribution_round_trip(case):
    ranks, shape, before, after, samples = case
    full = np.random.default_rng(3).normal(size=(samples, *shape[1:]))

    def body(comm):
        first, second = (
            nd.GlobalArray(nd.ProcessGrid(comm, **grid), shape, dtype="float64") for grid in (before, after)
        )
        tile = first.scatter(full)
        moved = first.redistribute(tile, second)
        np.testing.assert_array_equal(moved, second.scatter(full))
        np.testing.assert_array_equal(second.redistribute(moved, first), tile)
        np.testing.assert_array_equal(second.gather(moved), full)
        moved[...] = 0  # shares no memory with its source
        np.testing.assert_array_equal(tile, first.scatter(full))

    loopback.run(ranks, body)


def test_views_of_redistributed_tiles():
    full = np.random.default_rng(3).normal(size=(2, 7, 6, 1))
    window = nd.Window(kernel=3, padding=1)

    def body(comm):
        rows, cols = nd.ProcessGrid(comm, rows=4), nd.ProcessGrid(comm, cols=4)
        first, second = nd.GlobalArray(rows, full.shape), nd.GlobalArray(cols, full.shape, window, dtype="float64")
        view = second.get_fprop_view(first.redistribute(first.scatter(full), second))
        np.testing.assert_allclose(view, second.get_fprop_view(second.scatter(full)), rtol=1e-6)
        assert view.dtype == np.float64

    loopback.run(4, body)


def test_overlapping_tiles():
    full = np.random.default_rng(3).normal(size=(2, 8, 5, 2)).astype("float32")

    def body(comm):
        grid = nd.ProcessGrid(comm, rows=2)
        plain, wide = nd.GlobalArray(grid, full.shape), nd.GlobalArray(grid, full.shape)
        tiles = OverlappingPartition((8, 5), (2, 1), 2, (((0, 6), (3, 8)), ((0, 5),)))
        wide.repartition(tiles, tiles)
        moved = plain.redistribute(plain.scatter(full), wide)
        np.testing.assert_array_equal(moved, wide.scatter(full))
        np.testing.assert_array_equal(wide.redistribute(moved, plain), plain.scatter(full))
        np.testing.assert_array_equal(wide.gather(moved), full)

    loopback.run(2, body)


def test_mismatched_shapes_and_ranks_are_rejected():
    def body(comm):
        grid = nd.ProcessGrid(comm)
        source, target = nd.GlobalArray(grid, (2, 4, 4, 1)), nd.GlobalArray(grid, (2, 4, 4, 2))
        tile = np.zeros(source.local_shape)
        with pytest.raises(nd.errors.ShapeError, match=r"\(4, 4, 1\) and \(4, 4, 2\)"):
            source.redistribute(tile, target)
        with pytest.raises(nd.errors.GridError, match="2 and 1 ranks"):
            source.redistribute(tile, nd.SerialArray((2, 4, 4, 1)))

    loopback.run(2, body)
