"""A small model, and many grids, for tests of what grids leave behind."""

import numpy as np

import neondist as nd
from neondist.geometry import factorisations

SHAPE, BATCH = (6, 5, 2), 4


def small_model(grid):
    """A model with halos and sums, built."""
    model = nd.ConvnetDist([nd.ConvLayerDist(2, 3, padding=1), nd.FCLayerDist(3)], seed=0, backend="numpy")
    model.build(SHAPE, BATCH, grid)
    return model


def use_grids(comm, count, closed):
    """Make so many grids of all shapes, train a model on each, and close them or leave that."""
    shapes = [shape for shape in factorisations(comm.size, 3) if shape[0] <= BATCH]
    for n in range(count):
        grid = nd.ProcessGrid(comm, *shapes[n % len(shapes)])
        model = small_model(grid)
        tile = model.scatter(np.ones((BATCH, *SHAPE), np.float32))
        model.train_batch(tile, np.zeros(BATCH, int)[slice(*grid.sample_range(BATCH))])
        if closed:
            grid.close()
