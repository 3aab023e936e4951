"""Output, stop and resumption of experiments with pretraining."""

import json

import numpy as np
import pytest
from gb_runs import gb_of
from test_stop_resume import StopAt, numbers

import neondist as nd
from neondist.comm import loopback


class StopPretraining(StopAt):
    joins_pretraining = True

    def __init__(self, stage, step):
        super().__init__(step)
        self.stage = stage

    def after_step(self, run):
        if getattr(run.model, "name", "") == self.stage:
            super().after_step(run)


class Watch(nd.Hook):
    def __init__(self, joins):
        self.joins_pretraining, self.models = joins, []

    def before_run(self, run):
        self.models.append(str(run.model))


def run(ranks, **arguments):
    """Run on virtual ranks; return rank 0's result and weights."""

    def body(comm):
        data = nd.Synthetic((12, 10, 1), classes=4, train=24, test=10, noise=0.3)
        model = gb_of("unshared", dist=True, num_pretrain_epochs=2, num_initial_epochs=1)
        made = nd.FitExperiment(data, model, batch_size=8, epochs=2)
        return made.run(made.open_grid(comm), **{"hooks": []} | arguments), model.state()

    return loopback.run(ranks, body)[0]


def lines(path):
    return [json.loads(text) for text in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return (folder, *run(1, output=folder))


def test_a_run_writes_the_costs_of_pretraining(whole):
    records = lines(whole[0] / "pretrain.jsonl")
    assert [(r["stage"], r["epoch"]) for r in records] == [
        (f"local_filtering{stage}", epoch) for stage in (1, 2) for epoch in (0, 1, 2)
    ]
    for first, last in ((records[0], records[2]), (records[3], records[5])):
        assert last["test_loss"] < first["test_loss"]
        assert last["reconstruction_error"] < first["reconstruction_error"]
        assert last["test_error"] is None
    assert len(lines(whole[0] / "metrics.jsonl")) == 2
    assert {"pretrain_1.h5", "pretrain_2.h5"} <= {path.name for path in whole[1].files}


@pytest.mark.parametrize("at", [("local_filtering1", 2), ("local_filtering2", 4), ("local_filtering2", 6)])
@pytest.mark.long
def test_pretraining_stops_anywhere_and_resumes_on_other_ranks(tmp_path, whole, at):
    result, _ = run(1, output=tmp_path, hooks=[StopPretraining(*at)])
    assert result.stop.reason == "asked to"
    assert result.history == []
    result, state = run(2, output=tmp_path, resume=True)
    for name, array in whole[2].items():
        np.testing.assert_allclose(state[name], array, rtol=1e-9, atol=1e-12, err_msg=name)
    losses = [[r["test_loss"] for r in lines(folder / "pretrain.jsonl")] for folder in (whole[0], tmp_path)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-9)


def test_supervised_training_resumes_in_either_phase(tmp_path, whole):
    for at, step in enumerate((2, 3, 5, 99)):  # with the top alone, at its end, with all layers
        result, state = run(1, output=tmp_path, resume=at > 0, hooks=[StopAt(step)])
    assert numbers(result.history) == numbers(whole[1].history)
    for name, array in whole[2].items():
        np.testing.assert_array_equal(state[name], array)


def test_only_hooks_that_join_see_the_stages():
    joining, other = Watch(True), Watch(False)
    run(1, hooks=[joining, other])
    assert joining.models == ["Autoencoder of 'local_filtering1'", "Autoencoder of 'local_filtering2'", "GBDist"]
    assert other.models == ["GBDist"]
