"""A run plans once: what `check` prints, what ranks compare and what is executed are one object."""

import numpy as np
import pytest
from session_toys import experiment

import neondist as nd
from neondist.comm import loopback
from neondist.models import model as models
from neondist.plan import compile_plan


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_run_plans_and_checks_its_data_once(ranks, monkeypatch):
    planned, checked = [], []
    check = nd.Synthetic.check

    def planning(*arguments):
        planned.append(arguments)
        return compile_plan(*arguments)

    def checking(dataset):
        checked.append(dataset)
        check(dataset)

    def body(transport):
        made = experiment(1)
        made.run(made.open_grid(transport), hooks=[])

    monkeypatch.setattr(models, "compile_plan", planning)
    monkeypatch.setattr(nd.Synthetic, "check", checking)
    loopback.run(ranks, body)
    assert len(planned) == len(checked) == ranks


def test_the_plan_tells_what_it_is_asked():
    model = nd.ConvnetDist([nd.ConvLayerDist(4, 3, padding=1), nd.FCLayerDist(10)], optimizer=nd.Adam())
    plan = model.plan((8, 6, 2), nd.GridShape(rows=2), batch_size=5)
    assert [layer.name for layer in plan] == ["conv1", "fc1"]
    assert plan.bytes(0) == plan.bytes(1) == 5 * 6 * 2 * 4  # a row of 6 cells there; the images need no gradient
    weights, own = 3 * 3 * 2 * 4 + 4, 4 * 6 * 4 * 10 + 10
    blocks = plan.arena(0, 0)
    assert plan.memory(0) == blocks + 4 * 4 * (weights + own)
    text = plan.describe()
    assert "2 ranks (1 replicas, 2 rows, 1 cols)" in text
    assert "batches of 5" in text
    for words in ("conv1", "ConvLayerDist", "8×6×4", "planned peak", "sums over ranks"):
        assert words in text


def test_what_was_built_is_what_runs():
    model = nd.Convnet([nd.ConvLayer(2, 3, padding=1), nd.GlobalAvgPoolingLayer()])
    plan = model.plan((8, 8, 1), batch_size=2)
    model.build((8, 8, 1), 2, plan=plan)
    assert model.compiled is plan
    assert model.executor.graph is plan.graph
    assert model.fprop(np.ones((2, 8, 8, 1))).shape == (2, 2)
