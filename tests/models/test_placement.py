"""Placement of fully connected weights on ranks, and sums of their gradients."""

import numpy as np
import pytest

import neondist as nd
from neondist.comm import loopback
from neondist.parallel import FLAG_HEADER_LENGTH

SHAPE, OUT = (16, 12, 3), 10


def make_model(shape, *sizes):
    layers = [nd.FCLayerDist(features, activation=nd.Tanh()) for features in sizes]
    model = nd.MLPDist(layers, optimizer=nd.Adam(0.01), dtype="float64", backend="numpy")
    return model, np.random.default_rng(1).normal(size=(6, *shape))


def count_gradient_values(model, group):
    return sum(
        account.nbytes * count // 8
        for account, count in model.ledger().items()
        if account.layer == "gradients" and account.peer == group
    )


@pytest.mark.parametrize("shape", [SHAPE, (576,)], ids=str)
def test_ranks_hold_and_sum_only_their_rows(shape):
    total = np.prod(shape) * OUT

    def body(comm):
        model, x = make_model(shape, OUT)
        model.build(shape, 6, nd.ProcessGrid(comm))
        model.train_batch(model.scatter(x), np.zeros(6, int))
        layer = model.layers[0]
        arrays = [layer.params["weights"], layer.grads["weights"], *(slot[OUT:] for slot in model.slots.values())]
        return (
            [array.size for array in arrays],
            count_gradient_values(model, "world"),
            count_gradient_values(model, "replicas"),
        )

    for sizes, world, replicas in loopback.run(4, body):
        assert all(size <= 0.26 * total for size in sizes)
        assert (world, replicas) == (FLAG_HEADER_LENGTH + OUT, 0)
    assert (
        make_model(shape, OUT)[0].plan(shape, nd.GridShape(1, 2, 2))[0].num_parameters_by_tile == [total // 4 + OUT] * 4
    )


def test_rows_are_summed_over_replicas():
    def body(comm):
        model, x = make_model(SHAPE, OUT)
        model.build(SHAPE, 6, nd.ProcessGrid(comm, replicas=2))
        lo, hi = model.grid.sample_range(6)
        assert len(x[lo:hi]) == 3
        model.train_batch(model.scatter(x), np.zeros(6, int))
        return count_gradient_values(model, "world"), count_gradient_values(model, "replicas")

    assert loopback.run(4, body) == [(FLAG_HEADER_LENGTH + OUT, np.prod(SHAPE) * OUT // 2)] * 4


@pytest.mark.parametrize("shape", [(7, 5, 2), (2, 3, 4), (3,), (5, 2)], ids=str)
@pytest.mark.long
def test_state_moves_between_grids(shape):
    """Include uneven and empty tiles, and vectors with fewer features than tiles."""
    names = {f"fc{index}/{name}" for index in (1, 2, 3) for name in ("weights", "bias")}

    def train(grid, initial=None):
        model, x = make_model(shape, 7, 2, OUT)
        model.build(shape, 6, grid)
        if initial:
            model.load_state(initial[0])
            model.load_optimizer_state(initial[1])
        for _ in range(2):
            model.train_batch(model.scatter(x), np.arange(6))
        return model.state(), model.optimizer_state(), model.gradients()

    first_run = loopback.run(1, lambda comm: train(nd.ProcessGrid(comm)))[0]
    second_run = loopback.run(1, lambda comm: train(nd.ProcessGrid(comm), first_run))[0]
    assert first_run[0].keys() == names
    assert first_run[0]["fc1/weights"].shape == (np.prod(shape), 7)
    for ranks, grid in ((3, {}), (4, {}), (6, {"rows": 6}), (4, {"replicas": 2})):
        for initial, expected in ((None, first_run), (first_run, second_run)):
            results = loopback.run(
                ranks, lambda comm, initial=initial, grid=grid: train(nd.ProcessGrid(comm, **grid), initial)
            )
            for result in results:
                for actual_arrays, expected_arrays in zip(result, expected, strict=True):
                    assert actual_arrays.keys() == expected_arrays.keys()
                    for name in actual_arrays:
                        np.testing.assert_allclose(actual_arrays[name], expected_arrays[name], atol=1e-12, err_msg=name)
