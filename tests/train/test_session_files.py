"""Files of a run, replacement of earlier files, and resumption."""

import json
import math

import numpy as np
import pytest
from toy_training import Recorder, ToyData, ToyModel, make_experiment
from training_records import read_metrics

from neondist.comm import loopback
from neondist.data import Synthetic
from neondist.errors import ConfigError
from neondist.layers import ConvLayerDist, FCLayerDist
from neondist.optim import SGD, Adam
from neondist.train import fit
from neondist.train.callbacks.metrics_log import MetricsLog, record_json_line

RECORD_KEYS = ["epoch", "step", "train_loss", "test_loss", "test_error", "seconds", "samples_per_second"]
RECORD_KEYS += ["bytes_sent", "bytes_summed"]


def test_metrics_log(tmp_path):
    history = fit(ToyModel(), ToyData(), 2, 4, [MetricsLog(tmp_path / "metrics.jsonl")])
    assert read_metrics(tmp_path) == history  # exactly
    assert [list(record) for record in read_metrics(tmp_path)] == [RECORD_KEYS, RECORD_KEYS]


def test_metrics_are_written_at_epoch_end(tmp_path):
    counts = []

    class LineCounter(Recorder):
        def after_epoch(self, run):
            counts.append(len(read_metrics(tmp_path)))

    fit(ToyModel(), ToyData(), 3, 4, [MetricsLog(tmp_path / "metrics.jsonl"), LineCounter()])
    assert counts == [1, 2, 3]


def test_non_finite_numbers_become_null():
    text = record_json_line({"epoch": 1, "a": math.nan, "b": math.inf, "c": None, "d": 0.1})
    assert json.loads(text) == {"epoch": 1, "a": None, "b": None, "c": None, "d": 0.1}


def test_files_of_a_run(tmp_path):
    result = make_experiment(1).run(output=tmp_path / "new" / "folder", yaml_text="!FitExperiment {}\n", hooks=[])
    folder = tmp_path / "new" / "folder"
    assert (folder / "experiment.yaml").read_text() == "!FitExperiment {}\n"
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["ranks"] == 1
    assert environment["grid"] == {"replicas": 1, "planes": 1, "rows": 1, "cols": 1}
    assert {"versions", "hosts", "threads", "backend", "dtype"} <= environment.keys()
    assert [list(record) for record in read_metrics(folder)] == [RECORD_KEYS]
    assert sorted(result.files) == sorted(folder.iterdir())  # no partial file


def test_planes_are_reported(tmp_path, capsys):
    def body(world):
        experiment = make_experiment(
            1,
            lambda: [ConvLayerDist(2, 3, padding=1), FCLayerDist(4)],
            dataset=lambda: Synthetic((8, 5, 5, 1), classes=4, train=4, test=2),
            grid={"planes": 4},
        )
        experiment.run(experiment.open_grid(world), output=tmp_path)

    loopback.run(4, body)
    assert "on 4 ranks (1 x 4 x 1 x 1)" in capsys.readouterr().out
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["grid"] == {"replicas": 1, "planes": 4, "rows": 1, "cols": 1}


def test_no_output_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = make_experiment(1).run(hooks=[])
    assert result.files == []
    assert len(result.history) == 1
    assert not list(tmp_path.iterdir())


def test_only_files_of_the_earlier_run_are_replaced(tmp_path):
    make_experiment(2).run(output=tmp_path, yaml_text="first", hooks=[])
    (tmp_path / "mine.txt").write_text("keep")
    make_experiment(1).run(output=tmp_path, hooks=[], overwrite=True)
    assert [record["epoch"] for record in read_metrics(tmp_path)] == [1]
    assert not (tmp_path / "experiment.yaml").exists()  # of the earlier run
    assert (tmp_path / "mine.txt").read_text() == "keep"


def test_failed_start_keeps_the_earlier_run(tmp_path):
    make_experiment(2).run(output=tmp_path, hooks=[])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(Exception, match="kernel"):
        make_experiment(1, lambda: [ConvLayerDist(2, 99), FCLayerDist(4)]).run(output=tmp_path, hooks=[])
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("optimizer", [SGD(0.05, momentum=0.9), Adam(0.01)])
def test_resumed_run_matches_uninterrupted_run(tmp_path, optimizer):
    uninterrupted = make_experiment(3, optimizer=optimizer)
    expected = uninterrupted.run(hooks=[]).history
    make_experiment(1, optimizer=optimizer).run(output=tmp_path, hooks=[])
    with (tmp_path / "metrics.jsonl").open("a") as file:  # killed after the second epoch's line, in the third
        file.write('{"epoch": 2, "step": 10}\n{"epoch": 3, "st')
    resumed = make_experiment(3, optimizer=optimizer)
    history = resumed.run(output=tmp_path, resume=True, hooks=[]).history
    assert [record["epoch"] for record in read_metrics(tmp_path)] == [1, 2, 3]
    assert read_metrics(tmp_path) == history
    for name in ("train_loss", "test_loss", "test_error", "step"):
        assert [record[name] for record in history] == [record[name] for record in expected]
    for name, array in uninterrupted.model.state().items():
        np.testing.assert_array_equal(resumed.model.state()[name], array)


def test_resume_of_a_complete_run_trains_nothing(tmp_path):
    first = make_experiment(2).run(output=tmp_path, hooks=[])
    hook = Recorder()
    assert make_experiment(2).run(output=tmp_path, resume=True, hooks=[hook]).history == first.history
    assert [name for name, *_ in hook.calls] == ["before_run", "after_run"]


def test_repeated_runs_start_from_scratch():
    experiment = make_experiment(1, optimizer=Adam(0.01))
    runs = [experiment.run(hooks=[]).history[0] for _ in range(2)]
    assert runs[0]["train_loss"] == runs[1]["train_loss"]
    assert runs[0]["step"] == runs[1]["step"]


def test_resume_requires_an_output():
    with pytest.raises(ConfigError, match="resume"):
        make_experiment().run(resume=True)
