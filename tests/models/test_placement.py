"""Weights of a fully connected layer that a rank keeps, and its part of sums."""

import numpy as np
import pytest

import neondist as nd
from neondist.comm import loopback
from neondist.parallel import HEADER

SHAPE, OUT = (16, 12, 3), 10


def model_of(shape, *sizes):
    layers = [nd.FCLayerDist(n, activation=nd.Tanh()) for n in sizes]
    model = nd.MLPDist(layers, optimizer=nd.Adam(0.01), dtype="float64", backend="numpy")
    return model, np.random.default_rng(1).normal(size=(6, *shape))


def gradient_words(model, group):
    return sum(
        account.nbytes * count // 8
        for account, count in model.ledger().items()
        if account.layer == "gradients" and account.peer == group
    )


@pytest.mark.parametrize("shape", [SHAPE, (576,)], ids=str)
def test_a_rank_keeps_and_sums_its_own_rows_alone(shape):
    whole = np.prod(shape) * OUT

    def body(comm):
        model, x = model_of(shape, OUT)
        model.build(shape, 6, nd.ProcessGrid(comm))
        model.train_batch(model.scatter(x), np.zeros(6, int))
        layer = model.layers[0]
        kept = [layer.params["weights"], layer.grads["weights"], *(slot[OUT:] for slot in model.slots.values())]
        return [array.size for array in kept], gradient_words(model, "world"), gradient_words(model, "replicas")

    for sizes, world, replicas in loopback.run(4, body):
        assert all(size <= 0.26 * whole for size in sizes)
        assert (world, replicas) == (HEADER + OUT, 0)
    assert model_of(shape, OUT)[0].plan(shape, nd.GridShape(1, 2, 2))[0].held == [whole // 4 + OUT] * 4


def test_rows_are_summed_over_replicas():
    def body(comm):
        model, x = model_of(SHAPE, OUT)
        model.build(SHAPE, 6, nd.ProcessGrid(comm, replicas=2))
        lo, hi = model.grid.sample_range(6)
        assert len(x[lo:hi]) == 3
        model.train_batch(model.scatter(x), np.zeros(6, int))
        return gradient_words(model, "world"), gradient_words(model, "replicas")

    assert loopback.run(4, body) == [(HEADER + OUT, np.prod(SHAPE) * OUT // 2)] * 4


@pytest.mark.parametrize("shape", [(7, 5, 2), (2, 3, 4), (3,), (5, 2)], ids=str)
@pytest.mark.long
def test_whole_arrays_go_from_any_grid_to_any_other(shape):
    """Uneven tiles, tiles of no cells, and vectors of fewer features than tiles."""
    names = {f"fc{at}/{name}" for at in (1, 2, 3) for name in ("weights", "bias")}

    def trained(grid, given=None):
        model, x = model_of(shape, 7, 2, OUT)
        model.build(shape, 6, grid)
        if given:
            model.load_state(given[0])
            model.load_optimizer_state(given[1])
        for _ in range(2):
            model.train_batch(model.scatter(x), np.arange(6))
        return model.state(), model.optimizer_state(), model.gradients()

    once = loopback.run(1, lambda comm: trained(nd.ProcessGrid(comm)))[0]
    twice = loopback.run(1, lambda comm: trained(nd.ProcessGrid(comm), once))[0]
    assert once[0].keys() == names
    assert once[0]["fc1/weights"].shape == (np.prod(shape), 7)
    for ranks, grid in ((3, {}), (4, {}), (6, {"rows": 6}), (4, {"replicas": 2})):
        for given, expected in ((None, once), (once, twice)):
            found = loopback.run(
                ranks, lambda comm, given=given, grid=grid: trained(nd.ProcessGrid(comm, **grid), given)
            )
            for mine in found:
                for some, other in zip(mine, expected, strict=True):
                    assert some.keys() == other.keys()
                    for name in some:
                        np.testing.assert_allclose(some[name], other[name], atol=1e-12, err_msg=name)
