"""Gathering of arrays on rank 0 in blocks, and their distribution, over virtual ranks."""

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neondist.comm import ProcessGrid, loopback
from neondist.geometry import Box
from neondist.io.checkpoint import pieces
from neondist.io.checkpoint.pieces import ArrayPart, split_into_blocks
from neondist.io.checkpoint.stream import gather_to_root, scatter_from_root
from neondist.layers import Replicate, Shard, Tiled


@given(st.lists(st.integers(0, 6), max_size=4), st.integers(1, 40))
def test_blocks_cover_an_array_in_order(shape, cells):
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    parts = [array[block.slices] for block in split_into_blocks(shape, cells)]
    assert all(0 < part.size <= cells for part in parts)
    assert np.concatenate([part.ravel() for part in parts] or [[]]).tolist() == array.ravel().tolist()


@st.composite
def draw_layouts(draw):
    """Draw a grid, the shape, layout and dtype of an array; its first axis may be three flattened axes."""
    grid = {"replicas": draw(st.integers(1, 2)), "rows": draw(st.integers(1, 3)), "cols": draw(st.integers(1, 2))}
    shape = (draw(st.integers(0, 7)), draw(st.integers(1, 5)), draw(st.integers(1, 3)))
    layout = draw(st.sampled_from([Replicate(), Tiled(2), Shard(shape), Shard((prod(shape),))]))
    if layout not in (Replicate(), Tiled(2)):
        shape = (prod(shape), draw(st.integers(1, 3)))
    return grid, shape, layout, draw(st.sampled_from(["float32", "float64"]))


def make_pieces(grid, array, layout):
    """Return this rank's parts of the array, of a scalar, of an empty array, and of twice the array."""
    boxes = [layout.box(array.shape, grid.shape, rank % grid.shape.tiles) for rank in range(grid.size)]
    unfolded = layout.unflattened_shape(array.shape)
    part = array.reshape(unfolded)[boxes[grid.rank].slices].copy()
    boxes = boxes if layout.is_partitioned else boxes[:1]
    return [
        ArrayPart("a", array.shape, part, boxes, unfolded),
        ArrayPart("number", (), np.full((), 3.0, array.dtype), [Box((), ())]),
        ArrayPart("none", (0, 2), np.empty((0, 2)), [Box.of((0, 2))]),
        ArrayPart("b", array.shape, 2 * part, boxes, unfolded),
    ]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(pieces, "MAX_TRANSFER_BYTES", 48)


@settings(max_examples=50)
@given(draw_layouts())
def test_gather_and_scatter_round_trip(case):
    shape, extent, layout, dtype = case
    full_array = np.random.default_rng(1).normal(size=extent).astype(dtype)
    ranks = shape["replicas"] * shape["rows"] * shape["cols"]

    def body(world):
        grid = ProcessGrid(world, **shape)
        rank_pieces = make_pieces(grid, full_array, layout)
        gathered = {"a": np.zeros_like(full_array), "b": np.zeros_like(full_array), "number": np.zeros((), dtype)}
        count = {name: np.zeros(array.shape, int) for name, array in gathered.items()}
        for piece, place, values in gather_to_root(world, rank_pieces):
            gathered[piece.name][place] = values
            count[piece.name][place] += 1
        before = [piece.local_array.copy() for piece in rank_pieces]
        for piece in rank_pieces:
            piece.local_array[...] = -1
        scatter_from_root(world, rank_pieces, lambda piece, place: gathered[piece.name][place])
        for piece, array in zip(rank_pieces, before, strict=True):
            np.testing.assert_array_equal(piece.local_array, array)
        return gathered, count

    gathered, count = loopback.run(ranks, body)[0]
    np.testing.assert_array_equal(gathered["a"], full_array)
    np.testing.assert_array_equal(gathered["b"], 2 * full_array)
    assert all((visits == 1).all() for visits in count.values())


def test_failed_read_does_not_block_other_ranks():
    def body(world):
        rank_pieces = make_pieces(ProcessGrid(world), np.ones((5, 4, 3)), Tiled(2))

        def read(piece, place):
            raise OSError("the disk is gone")

        try:
            scatter_from_root(world, rank_pieces, read)
        except OSError as error:
            return str(error)
        return None

    assert loopback.run(4, body) == ["the disk is gone", None, None, None]
