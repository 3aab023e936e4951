"""Where the ranks' parts of parameters lie."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neondist.geometry import Box, GridShape
from neondist.layers import Shard


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=4))
def test_the_runs_of_a_box_are_its_cells_in_order_and_as_long_as_they_can_be(axes):
    extent = [n for n, _, _ in axes]
    box = Box(tuple(min(a, n) for n, a, _ in axes), tuple(min(max(a, b), n) for n, a, b in axes))
    runs = list(box.runs(extent))
    cells = [cell for first, count in runs for cell in range(first, first + count)]
    assert cells == np.arange(np.prod(extent)).reshape(extent)[box.slices].ravel().tolist()
    assert all(a + n < b for (a, n), (b, _) in pairwise(runs))


@pytest.mark.parametrize("image", [(7, 5, 2), (2, 3, 4), (11, 3), (3, 4, 5, 2), (6,), (2,)], ids=str)
def test_each_row_of_a_shard_belongs_to_the_tile_of_its_input(image):
    grid = GridShape(1, 3, 2)
    whole = np.arange(np.prod(image) * 2).reshape(-1, 2)
    seen = []
    for tile in range(grid.tiles):
        rows = [whole[there] for _, there in Shard(image).strips(whole.shape, grid, tile)]
        mine = np.concatenate(rows) if rows else np.empty((0, 2), int)
        assert mine.shape == Shard(image).shape_on(whole.shape, grid, tile)
        if image[1:]:
            cells = grid.partition(image[:-1]).box(tile).slices
            assert mine.tolist() == whole.reshape(*image, 2)[cells].reshape(-1, 2).tolist()
        seen += mine[:, 0].tolist()
    assert sorted(seen) == whole[:, 0].tolist()
