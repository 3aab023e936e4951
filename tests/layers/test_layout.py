"""Positions of the ranks' parts of parameters."""

import numpy as np
import pytest

from neondist.geometry import GridShape
from neondist.layers import Shard


@pytest.mark.parametrize("image", [(7, 5, 2), (2, 3, 4), (11, 3), (3, 4, 5, 2), (6,), (2,)], ids=str)
def test_each_row_of_a_shard_belongs_to_the_tile_of_its_input(image):
    grid = GridShape(1, 3, 2)
    whole = np.arange(np.prod(image) * 2).reshape(-1, 2)
    seen = []
    for tile in range(grid.tiles):
        layout = Shard(image)
        part = whole.reshape(layout.unfolded(whole.shape))[layout.box(whole.shape, grid, tile).slices]
        mine = part.reshape(layout.shape_on(whole.shape, grid, tile))
        if image[1:]:
            cells = grid.partition(image[:-1]).box(tile).slices
            assert mine.tolist() == whole.reshape(*image, 2)[cells].reshape(-1, 2).tolist()
        seen += mine[:, 0].tolist()
    assert sorted(seen) == whole[:, 0].tolist()
