"""Tiles of one grid become tiles of another."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import neondist as nd
from neondist.comm import loopback
from neondist.geometry.regions import Overlapping


def grids_of(ranks):
    """What a grid of so many ranks may be."""
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
    grids = st.sampled_from(grids_of(ranks))
    return ranks, shape, draw(grids), draw(grids), draw(st.integers(1, shape[0]))


@settings(max_examples=60, deadline=None)
@given(cases())
def test_tiles_go_to_any_other_grid_and_back(drawn):
    ranks, shape, before, after, samples = drawn
    whole = np.random.default_rng(3).normal(size=(samples, *shape[1:]))

    def body(comm):
        first, second = (
            nd.GlobalArray(nd.ProcessGrid(comm, **grid), shape, dtype="float64") for grid in (before, after)
        )
        tile = first.scatter(whole)
        there = first.redistribute(tile, second)
        np.testing.assert_array_equal(there, second.scatter(whole))
        np.testing.assert_array_equal(second.redistribute(there, first), tile)
        np.testing.assert_array_equal(second.gather(there), whole)
        there[...] = 0  # nobody else's
        np.testing.assert_array_equal(tile, first.scatter(whole))

    loopback.run(ranks, body)


def test_a_window_of_another_grid_sees_what_one_process_does():
    whole = np.random.default_rng(3).normal(size=(2, 7, 6, 1))
    window = nd.Window(kernel=3, padding=1)

    def body(comm):
        rows, cols = nd.ProcessGrid(comm, rows=4), nd.ProcessGrid(comm, cols=4)
        first, second = nd.GlobalArray(rows, whole.shape), nd.GlobalArray(cols, whole.shape, window, dtype="float64")
        view = second.get_fprop_view(first.redistribute(first.scatter(whole), second))
        np.testing.assert_allclose(view, second.get_fprop_view(second.scatter(whole)), rtol=1e-6)
        assert view.dtype == np.float64

    loopback.run(4, body)


def test_tiles_that_overlap():
    whole = np.random.default_rng(3).normal(size=(2, 8, 5, 2)).astype("float32")

    def body(comm):
        grid = nd.ProcessGrid(comm, rows=2)
        plain, wide = nd.GlobalArray(grid, whole.shape), nd.GlobalArray(grid, whole.shape)
        tiles = Overlapping((8, 5), (2, 1), 2, (((0, 6), (3, 8)), ((0, 5),)))
        wide.cut(tiles, tiles)
        there = plain.redistribute(plain.scatter(whole), wide)
        np.testing.assert_array_equal(there, wide.scatter(whole))
        np.testing.assert_array_equal(wide.redistribute(there, plain), plain.scatter(whole))
        np.testing.assert_array_equal(wide.gather(there), whole)

    loopback.run(2, body)


def test_other_shapes_and_other_ranks_are_refused():
    def body(comm):
        grid = nd.ProcessGrid(comm)
        one, other = nd.GlobalArray(grid, (2, 4, 4, 1)), nd.GlobalArray(grid, (2, 4, 4, 2))
        tile = np.zeros(one.local_shape)
        with pytest.raises(nd.errors.ShapeError, match=r"\(4, 4, 1\) and \(4, 4, 2\)"):
            one.redistribute(tile, other)
        with pytest.raises(nd.errors.GridError, match="2 and 1 ranks"):
            one.redistribute(tile, nd.PaddedArray((2, 4, 4, 1)))

    loopback.run(2, body)
