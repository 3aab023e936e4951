"""Single plan of a run, which is printed by `check`, compared between ranks and executed."""

import numpy as np
import pytest
from toy_training import make_experiment

import neondist as nd
from neondist.comm import loopback
from neondist.models import model as models
from neondist.plan import compile_plan


@pytest.mark.parametrize("ranks", [1, 4])
def test_plan_and_data_check_run_once(ranks, monkeypatch):
    planned, checked = [], []
    check = nd.Synthetic.check

    def record_plan(*arguments):
        planned.append(arguments)
        return compile_plan(*arguments)

    def record_check(dataset):
        checked.append(dataset)
        check(dataset)

    def body(transport):
        experiment = make_experiment(1)
        experiment.run(experiment.open_grid(transport), hooks=[])

    monkeypatch.setattr(models, "compile_plan", record_plan)
    monkeypatch.setattr(nd.Synthetic, "check", record_check)
    loopback.run(ranks, body)
    assert len(planned) == len(checked) == ranks


def test_plan_reports_bytes_and_memory():
    model = nd.ConvnetDist([nd.ConvLayerDist(4, 3, padding=1), nd.FCLayerDist(10)], optimizer=nd.Adam())
    plan = model.plan((8, 6, 2), nd.GridShape(rows=2), batch_size=5)
    assert [layer.name for layer in plan] == ["conv1", "fc1"]
    assert plan.bytes(0) == plan.bytes(1) == 5 * 6 * 2 * 4  # one row of 6 cells, forward only: images need no gradient
    conv_weights, fc_weights = 3 * 3 * 2 * 4 + 4, 4 * 6 * 4 * 10 + 10
    blocks = plan.arena_bytes(0, 0)
    assert plan.memory(0) == blocks + 4 * 4 * (conv_weights + fc_weights)
    text = plan.describe()
    assert "2 ranks (1 replica, 2 rows, 1 col)" in text
    assert "batches of 5" in text
    assert "sums over ranks: 608 B per rank and step (gradients 408 B, fc1 200 B)" in text
    for fragment in ("conv1", "ConvLayerDist", "8×6×4", "planned peak"):
        assert fragment in text


def test_built_plan_is_executed():
    model = nd.Convnet([nd.ConvLayer(2, 3, padding=1), nd.GlobalAvgPoolingLayer()])
    plan = model.plan((8, 8, 1), batch_size=2)
    model.build((8, 8, 1), 2, plan=plan)
    assert model.compiled is plan
    assert model.executor.graph is plan.graph
    assert model.fprop(np.ones((2, 8, 8, 1))).shape == (2, 2)
