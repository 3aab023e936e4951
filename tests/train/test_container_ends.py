"""Byte counts and class checks of models that begin or end with a container or an empty list."""

import numpy as np
import pytest

import neondist as nd
from neondist.comm import loopback
from neondist.errors import ShapeError


def conv(channels, size=3):
    return nd.ConvLayerDist(channels, size, padding=size // 2, activation=nd.ReLU())


def norms():
    return [nd.BatchNormLayerDist(), nd.GroupNormLayerDist(1)]


NETWORKS = {
    "sum first": lambda: [nd.Sum([[*norms(), conv(2)], [conv(2), *norms()], []]), conv(4)],
    "concat first and last": lambda: [nd.Concat([conv(2, 5), [], [nd.Concat([norms(), conv(1)]), conv(1)]]),
                                      nd.Concat([conv(1), conv(3)])],
    "an empty list first": lambda: [[], conv(2), [[], conv(4)]],
    "identities first": lambda: [[nd.Concat([[], []])], nd.Sum([[]]), *norms(), nd.Concat([[[], conv(3)], [conv(1)]])],
    "an empty list last": lambda: [conv(3), nd.Concat([norms(), conv(1, 1)]), []],
}  # fmt: skip
SHAPE, BATCH = (9, 8, 2), 3


def make_model(name):
    return nd.ConvnetDist(NETWORKS[name](), cost=nd.Dice(), dtype="float64", backend="numpy")


@pytest.mark.parametrize("name", NETWORKS)
def test_planned_bytes_match_the_ledger(name):
    def job(comm):
        model, grid = make_model(name), nd.ProcessGrid(comm, rows=2, cols=2)
        model.build(SHAPE, BATCH, grid)
        model.train_batch(model.scatter(np.ones((BATCH, *SHAPE))), np.zeros((BATCH, *model.output_shape[:-1]), int))
        kinds = {"halo": {}, "sum": {}, "redistribution": {}}
        for account, count in model.ledger().items():
            sent = kinds[account.kind]
            sent[account.layer] = sent.get(account.layer, 0) + count * account.nbytes
        plan = model.compiled
        assert plan.reduction_bytes(grid.rank) == kinds["sum"]
        assert plan.bytes(grid.rank) == sum(kinds["halo"].values()) == model.bytes_sent
        assert plan.output_shape == model.output_shape
        return kinds["halo"], 8 * BATCH * model.executor.blocks.elements_per_sample

    model = make_model(name)
    results = loopback.run(4, job)
    grid = nd.GridShape(1, 2, 2)
    plans = model.plan(SHAPE, grid, BATCH)
    for plan, cost in zip(plans, plans.costs(), strict=True):
        assert cost.total_sent_bytes == sum(halo.get(plan.name, 0) for halo, _ in results), plan.name
    largest = max(length for _, length in results)
    assert plans.peak_arena_bytes == largest


def test_class_count_is_checked_against_the_model_output():
    def make_experiment(*channels):
        branches = [[nd.ConvLayer(n, 3, padding=1)] for n in channels]
        data = nd.Synthetic(shape=(9, 8, 1), classes=4, train=4, test=4)
        return nd.FitExperiment(data, nd.Convnet([nd.Concat(branches), nd.GlobalAvgPoolingLayer(), []]), batch_size=2)

    make_experiment(1, 3).validate(1)
    with pytest.raises(ShapeError, match="the last layer has 3 outputs, but the data set has 4 classes"):
        make_experiment(1, 2).validate(1)
    layers = [nd.GlobalAvgPoolingLayer(), nd.Concat([nd.FCLayer(1), nd.FCLayer(3)])]
    data = nd.Synthetic(shape=(9, 8, 1), classes=4, train=4, test=4)
    nd.FitExperiment(data, nd.Convnet(layers), batch_size=2).validate(1)
