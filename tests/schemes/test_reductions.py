"""Bytes of sums and redistributions match the plan for every layer with reductions, every cost and every grid."""

import numpy as np
import pytest
from scheme_runs import run_on_ranks

import neondist as nd
from neondist.geometry import GridShape

# layers and cost; outputs are images or vectors
NETWORKS = {
    "joined": (
        lambda: [nd.BatchNormLayerDist(), nd.ConvLayerDist(4, 3), nd.GroupNormLayerDist(2), nd.FCLayerDist(6),
                 nd.BatchNormLayerDist(), nd.FCLayerDist(3)],
        nd.CrossEntropy,
    ),
    "pooled": (
        lambda: [nd.LCNLayerDist(3, min_deviation="mean"), nd.LCNLayerDist(3, min_deviation="mean"),
                 nd.LocalFilteringLayerDist(2, 3, bias=True), nd.InstanceNormLayerDist(),
                 nd.GlobalAvgPoolingLayerDist()],
        nd.CrossEntropy,
    ),
    "fully connected chain": (
        lambda: [nd.GlobalAvgPoolingLayerDist(), nd.FCLayerDist(7, activation=nd.Tanh()), nd.FCLayerDist(5),
                 nd.ActivationLayerDist(nd.Tanh()), nd.FCLayerDist(4, activation=nd.Softmax()), nd.FCLayerDist(3)],
        nd.CrossEntropy,
    ),
    "segmented": (lambda: [nd.BatchNormLayerDist(), nd.ConvLayerDist(2, 3), nd.BatchNormLayerDist()], nd.Dice),
}  # fmt: skip
GRIDS = [(1, 1, 1), (1, 2, 2), (2, 1, 1), (2, 2, 1), (1, 3, 2)]  # replicas, rows, cols
SHAPE, BATCH = (9, 8, 2), 5


def train(comm, layers, cost, replicas, rows, cols):
    """Train two steps; return their bytes by kind and layer."""
    model = nd.ConvnetDist(layers(), cost=cost(), seed=1, dtype="float64", backend="numpy")
    model.build(SHAPE, BATCH, nd.ProcessGrid(comm, replicas=replicas, rows=rows, cols=cols))
    lo, hi = model.grid.sample_range(BATCH)
    x = np.random.default_rng(3).random((BATCH, *SHAPE))[(slice(lo, hi), *model.input.own.slices)]
    targets = np.zeros((BATCH, *model.output_shape[:-1]), int)
    for _ in range(2):
        model.train_batch(x, targets, batch_size=BATCH)
    totals = {"sum": {}, "redistribution": {}, "halo": {}}
    for account, count in model.ledger().items():
        by_layer = totals[account.kind]
        by_layer[account.layer] = by_layer.get(account.layer, 0) + count * account.nbytes
    assert sum(totals.pop("halo").values()) == model.bytes_sent
    assert sum(sum(by_layer.values()) for by_layer in totals.values()) == model.bytes_summed
    return totals


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.long
def test_bytes_match_the_plan(name):
    layers, cost = NETWORKS[name]
    for replicas, rows, cols in GRIDS:
        grid, model = GridShape(replicas, rows, cols), nd.ConvnetDist(layers(), cost=cost(), dtype="float64")
        plan = model.plan(SHAPE, grid, BATCH)
        planned = {"sum": plan.reduction_bytes, "redistribution": plan.redistribution_bytes}
        expected = [
            {kind: {name: 2 * count for name, count in reduced(rank).items()} for kind, reduced in planned.items()}
            for rank in range(grid.size)
        ]
        measured = run_on_ranks(
            grid.size, lambda comm, factors=(replicas, rows, cols): train(comm, layers, cost, *factors)
        )
        assert measured == expected, grid
        assert grid.size > 1 or measured == [{"sum": {}, "redistribution": {}}]


def test_ledger_accounts():
    def job(comm):
        model = nd.ConvnetDist([nd.FCLayerDist(4), nd.FCLayerDist(3)], dtype="float64", backend="numpy")
        grid = nd.ProcessGrid(comm, replicas=2)
        model.build((4, 3, 1), 4, grid)
        lo, hi = model.grid.sample_range(4)
        x = np.ones((4, 4, 3, 1))[(slice(lo, hi), *model.input.own.slices)]
        model.train_batch(x, np.zeros(4, int), batch_size=4)
        peer = grid.rank ^ 1
        redistributions = [account[1:] for account in model.ledger() if account.kind == "redistribution"]
        assert sorted(redistributions) == [("fc1", direction, peer, 2 * 2 * 8) for direction in ("backward", "forward")]
        return sorted(account[1:] for account in model.ledger() if account.kind == "sum")

    rows, biases = 6 * 4 + 2 * 3, 4 + 3  # parameters of one tile; shared by both
    assert (
        run_on_ranks(4, job)
        == [
            [
                ("fc2", "forward", "tiles", 2 * 3 * 8),
                ("gradients", "backward", "replicas", rows * 8),
                ("gradients", "backward", "world", (16 + biases) * 8),
                ("loss", "forward", "replicas", 8),
            ]
        ]
        * 4
    )
