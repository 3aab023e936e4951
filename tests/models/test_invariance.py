"""The same numbers on every grid of virtual ranks."""

from functools import lru_cache

import numpy as np
import pytest
from invariance import KINDS, model_of, train
from present import KERNELS
from support import worst
from turns import some

import neondist as nd
from neondist.comm import loopback

WIDEST = "everything", "segmentation"
GRIDS = [(p, 1, r) for p in (1, 2, 3, 4, 6, 9) for r in range(1, p + 1) if p % r == 0]
GRIDS += [(2, 2, 1), (4, 2, 2), (6, 3, 1), (8, 2, 2), (12, 2, 3), (6, 6, 1)]
OTHERS = [(1, 1, 1), (4, 2, 2), (9, 1, 3)]
# every sixth grid for the networks that have nearly everything, every twelfth for each of the others; on other backends
# one grid for each
CASES = [
    (kind, *case)
    for at, kind in enumerate(KINDS)
    for case in [
        *((grid, "numpy") for grid in (GRIDS[2 * WIDEST.index(kind) :: 6] if kind in WIDEST else GRIDS[at % 12 :: 12])),
        *((OTHERS[at % 3], name) for name in KERNELS[-1:] if name != "numpy"),
    ]
]


@pytest.fixture(scope="module")
def serial():
    return lru_cache(train)


@pytest.mark.parametrize(("kind", "grid", "backend"), some(CASES), ids=str)
@pytest.mark.long
def test_every_grid_computes_what_one_process_does(serial, kind, grid, backend):
    """The one process with NumPy: all backends agree too."""
    expected = serial(kind)
    ranks, replicas, rows = grid

    def job(comm):
        return train(kind, nd.ProcessGrid(comm, replicas=replicas, rows=rows), backend=backend)

    for found in loopback.run(ranks, job):
        assert worst(found, expected) < 1e-10


def test_the_runs_learn():
    """A run that changes nothing would be invariant too."""
    loss = train("everything", steps=20)["loss"]
    assert loss[-2] < 0.7 * loss[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.long
def test_distribute_keeps_the_weights(kind):
    shape, model = KINDS[kind][0], model_of(kind, dist=False)
    model.build(shape, batch_size=2)
    x = np.random.default_rng(0).normal(size=(2, *shape))
    model.load_state({name: array + 0.5 for name, array in model.state().items()})
    expected = model.fprop(x)

    def run(comm):
        twin = nd.distribute(model)
        twin.build(shape, 2, nd.ProcessGrid(comm))
        return twin.gather(twin.fprop(twin.scatter(x)))

    for found in loopback.run(4, run):
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)
