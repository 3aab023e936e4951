"""Layouts of sharded parameters."""

import numpy as np
import pytest

from neondist.geometry import GridShape
from neondist.layers import Shard


@pytest.mark.parametrize("image", [(7, 5, 2), (2, 3, 4), (11, 3), (3, 4, 5, 2), (6,), (2,)], ids=str)
def test_shard_rows_follow_input_tiles(image):
    grid = GridShape(1, 3, 2)
    rows = np.arange(np.prod(image) * 2).reshape(-1, 2)
    assigned = []
    for tile in range(grid.tiles):
        layout = Shard(image)
        part = rows.reshape(layout.unflattened_shape(rows.shape))[layout.box(rows.shape, grid, tile).slices]
        local_rows = part.reshape(layout.shape_on(rows.shape, grid, tile))
        if image[1:]:
            cells = grid.partition(image[:-1]).box(tile).slices
            assert local_rows.tolist() == rows.reshape(*image, 2)[cells].reshape(-1, 2).tolist()
        assigned += local_rows[:, 0].tolist()
    assert sorted(assigned) == rows[:, 0].tolist()
