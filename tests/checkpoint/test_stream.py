"""Whole arrays to rank 0 and back in blocks, over virtual ranks."""

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neondist.comm import ProcessGrid, loopback
from neondist.geometry import Box
from neondist.io.checkpoint import pieces
from neondist.io.checkpoint.pieces import Piece, blocks
from neondist.io.checkpoint.stream import collect, scatter
from neondist.layers import Replicate, Shard, Tiled


@given(st.lists(st.integers(0, 6), max_size=4), st.integers(1, 40))
def test_blocks_fill_an_array_once_in_order(shape, cells):
    whole = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    parts = [whole[block.slices] for block in blocks(shape, cells)]
    assert all(0 < part.size <= cells for part in parts)
    assert np.concatenate([part.ravel() for part in parts] or [[]]).tolist() == whole.ravel().tolist()


@st.composite
def layouts(draw):
    """Ranks as replicas x rows x cols, and a whole array with its layout; its first axis may be three that are flat."""
    grid = {"replicas": draw(st.integers(1, 2)), "rows": draw(st.integers(1, 3)), "cols": draw(st.integers(1, 2))}
    shape = (draw(st.integers(0, 7)), draw(st.integers(1, 5)), draw(st.integers(1, 3)))
    layout = draw(st.sampled_from([Replicate(), Tiled(2), Shard(shape), Shard((prod(shape),))]))
    if layout not in (Replicate(), Tiled(2)):
        shape = (prod(shape), draw(st.integers(1, 3)))
    return grid, shape, layout, draw(st.sampled_from(["float32", "float64"]))


def pieces_of(grid, whole, layout):
    """The array twice, once of one number, and an empty one: this rank's parts."""
    boxes = [layout.box(whole.shape, grid.shape, rank % grid.shape.tiles) for rank in range(grid.size)]
    unfolded = layout.unfolded(whole.shape)
    mine = whole.reshape(unfolded)[boxes[grid.rank].slices].copy()
    boxes = boxes if layout.cut else boxes[:1]
    return [
        Piece("a", whole.shape, mine, boxes, unfolded),
        Piece("number", (), np.full((), 3.0, whole.dtype), [Box((), ())]),
        Piece("none", (0, 2), np.empty((0, 2)), [Box.of((0, 2))]),
        Piece("b", whole.shape, 2 * mine, boxes, unfolded),
    ]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(pieces, "BLOCK", 48)


@settings(max_examples=50)
@given(layouts())
def test_parts_meet_on_rank_0_and_come_back(drawn):
    shape, extent, layout, dtype = drawn
    whole = np.random.default_rng(1).normal(size=extent).astype(dtype)
    ranks = shape["replicas"] * shape["rows"] * shape["cols"]

    def body(world):
        grid = ProcessGrid(world, **shape)
        mine = pieces_of(grid, whole, layout)
        found = {"a": np.zeros_like(whole), "b": np.zeros_like(whole), "number": np.zeros((), dtype)}
        count = {name: np.zeros(array.shape, int) for name, array in found.items()}
        for piece, place, values in collect(world, mine):
            found[piece.name][place] = values
            count[piece.name][place] += 1
        before = [piece.array.copy() for piece in mine]
        for piece in mine:
            piece.array[...] = -1
        scatter(world, mine, lambda piece, place: found[piece.name][place])
        for piece, array in zip(mine, before, strict=True):
            np.testing.assert_array_equal(piece.array, array)
        return found, count

    found, count = loopback.run(ranks, body)[0]
    np.testing.assert_array_equal(found["a"], whole)
    np.testing.assert_array_equal(found["b"], 2 * whole)
    assert all((each == 1).all() for each in count.values())


def test_a_reader_that_fails_keeps_nobody_waiting():
    def body(world):
        mine = pieces_of(ProcessGrid(world), np.ones((5, 4, 3)), Tiled(2))

        def read(piece, place):
            raise OSError("the disk is gone")

        try:
            scatter(world, mine, read)
        except OSError as error:
            return str(error)
        return None

    assert loopback.run(4, body) == ["the disk is gone", None, None, None]
