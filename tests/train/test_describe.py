"""Agreement of the plan printed by `check` with the bytes that a run sends."""

import io

import pytest
from toy_training import make_experiment

from neondist.comm import loopback
from neondist.geometry import grid_shape
from neondist.layers import ActivationLayerDist, ConvLayerDist, FCLayerDist, ReLU
from neondist.optim import Adam
from neondist.train import describe_experiment


def render_description(experiment, ranks, **console):
    from rich.console import Console

    file = io.StringIO()
    Console(file=file, **console).print(describe_experiment(experiment, ranks), soft_wrap=True)
    return file.getvalue()


def parse_rows(printed):
    return {cells[0]: cells for cells in map(str.split, printed.splitlines()) if cells}


@pytest.mark.parametrize(("ranks", "replicas"), [(1, 1), (2, 1), (3, 1), (6, 1), (2, 2), (4, 2), (6, 2)])
@pytest.mark.parametrize(("dtype", "first"), [("float32", "convolution"), ("float64", "activation")])
@pytest.mark.long
def test_planned_bytes_match_bytes_sent(ranks, replicas, dtype, first):
    fields = {"dtype": dtype, "grid": {"replicas": replicas}, "batch_size": 9}  # 45 samples are 5 full batches

    def layers():
        convs = ConvLayerDist(3, 3, padding=1), ConvLayerDist(4, 5, stride=2)
        return [*([ActivationLayerDist(ReLU())] * (first == "activation")), *convs, FCLayerDist(4)]

    def train(transport):
        experiment = make_experiment(1, layers, **fields)
        experiment.run(experiment.open_grid(transport), hooks=[])
        return experiment.model.bytes_sent

    def evaluate_only(transport):
        experiment = make_experiment(1, layers, **fields)
        grid = experiment.open_grid(transport)
        experiment.dataset.open(grid)
        experiment.model.build(experiment.dataset.sample_shape, 9, grid)
        from neondist.train import evaluate

        evaluate(experiment.model, experiment.dataset.test, 9)
        return experiment.model.bytes_sent

    experiment = make_experiment(1, layers, **fields)
    shape = grid_shape(ranks, replicas)
    plan = experiment.model.plan(experiment.dataset.sample_shape, shape, 9)
    costs = plan.costs()
    train_bytes = sum(loopback.run(ranks, train)) - sum(loopback.run(ranks, evaluate_only))
    assert (
        train_bytes
        == 5 * sum(cost.total_sent_bytes for cost in costs)
        == 5 * sum(plan.bytes(rank) for rank in range(ranks))
    )


def test_table_lists_layers_and_totals():
    printed = render_description(make_experiment(), 6)
    rows = parse_rows(printed)
    assert "6 ranks (1 replica, 3 rows, 2 cols)" in printed
    # 13 x 11 over 3 x 2, kernel 3: a corner tile of 5 x 6 cells needs a row of 7 and a column of 5 halo cells;
    # the middle tiles need the most: two rows of 7 and a column of 4
    assert rows["conv1"][:6] == ["conv1", "ConvLayerDist", "13×11×3", "4-5×5-6×3", "6-7×7-8×2", "18"]
    assert rows["second"][1:3] == ["ConvLayerDist", "6×5×4"]
    assert rows["fc1"][1:6] == ["FCLayerDist", "4", "4", "-", "-"]
    assert rows["conv1"][-4] == str(3 * 3 * 2 * 3 + 3)
    assert rows["total"][-4] == f"{57 + 3 * 3 * 3 * 4 + 4 + 6 * 5 * 4 * 4 + 4:,}"
    assert rows["total"][-3] == f"{57 + 3 * 3 * 3 * 4 + 4 + 2 * 3 * 4 * 4 + 4:,}"  # 6 x 5 cells over 3 x 2
    assert {"tile:", "halo:", "sent:", "memory:"} <= rows.keys()


def test_table_is_not_truncated():
    wide = render_description(make_experiment(), 6)
    narrow = render_description(make_experiment(), 6, force_terminal=True, width=60, color_system=None)
    for printed in (wide, narrow):
        assert "…" not in printed
    assert max(map(len, wide.splitlines())) > 100
    assert len(narrow.splitlines()) > len(wide.splitlines())  # two tables
    assert {word for line in wide.splitlines()[:9] for word in line.split()} == {
        word for line in narrow.splitlines()[:17] for word in line.split()
    }


def test_memory_includes_optimiser_state():
    def parameter_memory(optimizer):
        experiment = make_experiment(optimizer=optimizer)
        plan = experiment.model.plan(experiment.dataset.sample_shape, batch_size=10)
        return plan.costs()[-1].memory

    from neondist.optim import SGD

    count = 6 * 5 * 4 * 4 + 4
    assert parameter_memory(Adam()) - parameter_memory(SGD(0.1)) == 2 * 8 * count
    assert parameter_memory(SGD(0.1, momentum=0.9)) - parameter_memory(SGD(0.1)) == 8 * count
