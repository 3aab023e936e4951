"""Output, stop and resumption of experiments with pretraining."""

import numpy as np
import pytest
from gb_runs import make_gb
from training_records import StopAtStep, read_json_lines, read_metrics, strip_times

import neondist as nd
from neondist.comm import loopback


class StopPretraining(StopAtStep):
    runs_during_pretraining = True

    def __init__(self, stage, step):
        super().__init__(step)
        self.stage = stage

    def after_step(self, run):
        if getattr(run.model, "name", "") == self.stage:
            super().after_step(run)


class ModelRecorder(nd.Hook):
    def __init__(self, runs_during_pretraining):
        self.runs_during_pretraining, self.models = runs_during_pretraining, []

    def before_run(self, run):
        self.models.append(run.model.display_name)


def train(ranks, **arguments):
    """Train on virtual ranks; return rank 0's result and weights."""

    def body(comm):
        data = nd.Synthetic((12, 10, 1), classes=4, train=24, test=10, noise=0.3)
        model = make_gb("unshared", dist=True, num_pretrain_epochs=2, num_initial_epochs=1)
        experiment = nd.FitExperiment(data, model, batch_size=8, epochs=2)
        return experiment.run(experiment.open_grid(comm), **{"hooks": []} | arguments), model.state()

    return loopback.run(ranks, body)[0]


@pytest.fixture(scope="module")
def reference_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    return (folder, *train(1, output=folder))


def test_pretraining_costs_are_written(reference_run):
    records = read_json_lines(reference_run[0] / "pretrain.jsonl")
    assert [(r["stage"], r["epoch"]) for r in records] == [
        (f"local_filtering{stage}", epoch) for stage in (1, 2) for epoch in (0, 1, 2)
    ]
    for first, last in ((records[0], records[2]), (records[3], records[5])):
        assert last["test_loss"] < first["test_loss"]
        assert last["reconstruction_error"] < first["reconstruction_error"]
        assert last["test_error"] is None
    assert len(read_metrics(reference_run[0])) == 2
    assert {"pretrain_1.h5", "pretrain_2.h5"} <= {path.name for path in reference_run[1].files}


@pytest.mark.parametrize("stop", [("local_filtering1", 2), ("local_filtering2", 4), ("local_filtering2", 6)])
@pytest.mark.long
def test_pretraining_resumes_on_other_ranks(tmp_path, reference_run, stop):
    result, _ = train(1, output=tmp_path, hooks=[StopPretraining(*stop)])
    assert result.stop.reason == "asked to"
    assert result.history == []
    result, state = train(2, output=tmp_path, resume=True)
    for name, array in reference_run[2].items():
        np.testing.assert_allclose(state[name], array, rtol=1e-9, atol=1e-12, err_msg=name)
    losses = [
        [r["test_loss"] for r in read_json_lines(folder / "pretrain.jsonl")] for folder in (reference_run[0], tmp_path)
    ]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-9)


def test_supervised_training_resumes_in_either_phase(tmp_path, reference_run):
    for attempt, step in enumerate((2, 3, 5, 99)):  # while only the top trains, at the end of that, with all layers
        result, state = train(1, output=tmp_path, resume=attempt > 0, hooks=[StopAtStep(step)])
    assert strip_times(result.history) == strip_times(reference_run[1].history)
    for name, array in reference_run[2].items():
        np.testing.assert_array_equal(state[name], array)


def test_only_joining_hooks_see_pretraining():
    joining, other = ModelRecorder(True), ModelRecorder(False)
    train(1, hooks=[joining, other])
    assert joining.models == ["Autoencoder of 'local_filtering1'", "Autoencoder of 'local_filtering2'", "GBDist"]
    assert other.models == ["GBDist"]
