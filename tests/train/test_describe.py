"""The plan that `check` prints agrees with what a run really sends."""

import io

import pytest
from session_toys import experiment

from neondist.comm import loopback
from neondist.geometry import grid_shape
from neondist.layers import ActivationLayerDist, ConvLayerDist, FCLayerDist, ReLU
from neondist.optim import Adam
from neondist.train import describe


def text(made, ranks, **console):
    from rich.console import Console

    file = io.StringIO()
    Console(file=file, **console).print(describe(made, ranks), soft_wrap=True)
    return file.getvalue()


def rows(printed):
    return {cells[0]: cells for cells in map(str.split, printed.splitlines()) if cells}


@pytest.mark.parametrize(("ranks", "replicas"), [(1, 1), (2, 1), (3, 1), (6, 1), (2, 2), (4, 2), (6, 2)])
@pytest.mark.parametrize(("dtype", "first"), [("float32", "convolution"), ("float64", "activation")])
@pytest.mark.long
def test_bytes_are_those_that_a_run_sends(ranks, replicas, dtype, first):
    fields = {"dtype": dtype, "grid": {"replicas": replicas}, "batch_size": 9}  # 45 samples are 5 whole batches

    def layers():
        convs = ConvLayerDist(3, 3, padding=1), ConvLayerDist(4, 5, stride=2)
        return [*([ActivationLayerDist(ReLU())] * (first == "activation")), *convs, FCLayerDist(4)]

    def body(transport):
        made = experiment(1, layers, **fields)
        made.run(made.open_grid(transport), hooks=[])
        return made.model.bytes_sent

    def evaluation(transport):
        made = experiment(1, layers, **fields)
        grid = made.open_grid(transport)
        made.dataset.open(grid)
        made.model.build(made.dataset.sample_shape, 9, grid)
        from neondist.train import evaluate

        evaluate(made.model, made.dataset.test, 9)
        return made.model.bytes_sent

    made = experiment(1, layers, **fields)
    shape = grid_shape(ranks, replicas)
    plan = made.model.plan(made.dataset.sample_shape, shape, 9)
    costs = plan.costs()
    train = sum(loopback.run(ranks, body)) - sum(loopback.run(ranks, evaluation))
    assert train == 5 * sum(cost.sent_all for cost in costs) == 5 * sum(plan.bytes(rank) for rank in range(ranks))


def test_table():
    printed = text(experiment(), 6)
    found = rows(printed)
    assert "6 ranks (1 replicas, 3 rows, 2 cols)" in printed
    # 13 x 11 over 3 x 2, kernel 3: a corner tile of 5 x 6 cells needs a row of 7 and a column of 5 of others;
    # the middle row of tiles needs two rows of 7 and a column of 4, the most
    assert found["conv1"][:6] == ["conv1", "ConvLayerDist", "13×11×3", "4-5×5-6×3", "6-7×7-8×2", "18"]
    assert found["second"][1:3] == ["ConvLayerDist", "6×5×4"]
    assert found["fc1"][1:6] == ["FCLayerDist", "4", "4", "-", "-"]
    assert found["conv1"][-4] == str(3 * 3 * 2 * 3 + 3)
    assert found["total"][-4] == f"{57 + 3 * 3 * 3 * 4 + 4 + 6 * 5 * 4 * 4 + 4:,}"
    assert found["total"][-3] == f"{57 + 3 * 3 * 3 * 4 + 4 + 2 * 3 * 4 * 4 + 4:,}"  # 6 x 5 cells over 3 x 2
    assert {"tile:", "halo:", "sent:", "memory:"} <= found.keys()


def test_table_is_never_cut():
    wide = text(experiment(), 6)
    narrow = text(experiment(), 6, force_terminal=True, width=60, color_system=None)
    for printed in (wide, narrow):
        assert "…" not in printed
    assert max(map(len, wide.splitlines())) > 100
    assert len(narrow.splitlines()) > len(wide.splitlines())  # two tables
    assert {word for line in wide.splitlines()[:9] for word in line.split()} == {
        word for line in narrow.splitlines()[:17] for word in line.split()
    }


def test_memory_counts_the_optimisers_arrays():
    def parameters(optimizer):
        made = experiment(optimizer=optimizer)
        plan = made.model.plan(made.dataset.sample_shape, batch_size=10)
        return plan.costs()[-1].memory

    from neondist.optim import SGD

    count = 6 * 5 * 4 * 4 + 4
    assert parameters(Adam()) - parameters(SGD(0.1)) == 2 * 8 * count
    assert parameters(SGD(0.1, momentum=0.9)) - parameters(SGD(0.1)) == 8 * count
