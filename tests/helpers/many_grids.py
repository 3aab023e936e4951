"""Training on many grids, for tests of the resources that grids release."""

import numpy as np

import neondist as nd
from neondist.geometry import factorisations

SHAPE, BATCH = (6, 5, 2), 4


def build_small_model(grid):
    """Return a built model with halos and reductions."""
    model = nd.ConvnetDist([nd.ConvLayerDist(2, 3, padding=1), nd.FCLayerDist(3)], seed=0, backend="numpy")
    model.build(SHAPE, BATCH, grid)
    return model


def train_on_grids(comm, count, close):
    """Train a model on each of `count` grids of all shapes, which are closed explicitly if `close`."""
    shapes = [shape for shape in factorisations(comm.size, 3) if shape[0] <= BATCH]
    for n in range(count):
        grid = nd.ProcessGrid(comm, *shapes[n % len(shapes)])
        model = build_small_model(grid)
        tile = model.scatter(np.ones((BATCH, *SHAPE), np.float32))
        model.train_batch(tile, np.zeros(BATCH, int)[slice(*grid.sample_range(BATCH))])
        if close:
            grid.close()
