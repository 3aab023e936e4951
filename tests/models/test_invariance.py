"""Invariance of results under the grid of virtual ranks."""

from functools import lru_cache

import numpy as np
import pytest
from availability import KERNEL_VARIANTS
from case_selection import select_cases
from common_checks import max_relative_difference
from invariance import KINDS, make_model, train

import neondist as nd
from neondist.comm import loopback

LARGEST_KINDS = "everything", "segmentation"
GRIDS = [(p, 1, r) for p in (1, 2, 3, 4, 6, 9) for r in range(1, p + 1) if p % r == 0]
GRIDS += [(2, 2, 1), (4, 2, 2), (6, 3, 1), (8, 2, 2), (12, 2, 3), (6, 6, 1)]
GRIDS_OF_OTHER_BACKENDS = [(1, 1, 1), (4, 2, 2), (9, 1, 3)]
# every sixth grid for the two largest networks, every twelfth for the others; one grid each on other backends
CASES = [
    (kind, *case)
    for index, kind in enumerate(KINDS)
    for case in [
        *(
            (grid, "numpy")
            for grid in (
                GRIDS[2 * LARGEST_KINDS.index(kind) :: 6] if kind in LARGEST_KINDS else GRIDS[index % 12 :: 12]
            )
        ),
        *((GRIDS_OF_OTHER_BACKENDS[index % 3], name) for name in KERNEL_VARIANTS[-1:] if name != "numpy"),
    ]
]


@pytest.fixture(scope="module")
def train_serially():
    return lru_cache(train)


@pytest.mark.parametrize(("kind", "grid", "backend"), select_cases(CASES), ids=str)
@pytest.mark.long
def test_every_grid_matches_one_process(train_serially, kind, grid, backend):
    """Compare with NumPy on one process, so that all backends agree too."""
    expected = train_serially(kind)
    ranks, replicas, rows = grid

    def job(comm):
        return train(kind, nd.ProcessGrid(comm, replicas=replicas, rows=rows), backend=backend)

    for actual in loopback.run(ranks, job):
        assert max_relative_difference(actual, expected) < 1e-10


def test_training_reduces_the_loss():
    """Exclude trivial invariance of a model that does not train."""
    loss = train("everything", steps=20)["loss"]
    assert loss[-2] < 0.7 * loss[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.long
def test_distribute_keeps_the_weights(kind):
    shape, model = KINDS[kind][0], make_model(kind, dist=False)
    model.build(shape, batch_size=2)
    x = np.random.default_rng(0).normal(size=(2, *shape))
    model.load_state({name: array + 0.5 for name, array in model.state().items()})
    expected = model.fprop(x)

    def run_distributed_twin(comm):
        twin = nd.distribute(model)
        twin.build(shape, 2, nd.ProcessGrid(comm))
        return twin.gather(twin.fprop(twin.scatter(x)))

    for actual in loopback.run(4, run_distributed_twin):
        np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-12)
