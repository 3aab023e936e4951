"""Files of a run, files of an earlier run, and how a run continues."""

import json
import math

import numpy as np
import pytest
from session_toys import Recorder, ToyData, ToyModel, experiment

from neondist.comm import loopback
from neondist.data import Synthetic
from neondist.errors import ConfigError
from neondist.layers import ConvLayerDist, FCLayerDist
from neondist.optim import SGD, Adam
from neondist.train import fit
from neondist.train.callbacks.metrics_log import MetricsLog, line

KEYS = ["epoch", "step", "train_loss", "test_loss", "test_error", "seconds", "samples_per_second"]
KEYS += ["bytes_sent", "bytes_summed"]


def lines(folder):
    return [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]


def test_metrics_log(tmp_path):
    history = fit(ToyModel(), ToyData(), 2, 4, [MetricsLog(tmp_path / "metrics.jsonl")])
    assert lines(tmp_path) == history  # every digit
    assert [list(record) for record in lines(tmp_path)] == [KEYS, KEYS]


def test_metrics_are_in_the_file_when_the_epoch_ends(tmp_path):
    counts = []

    class Count(Recorder):
        def after_epoch(self, run):
            counts.append(len(lines(tmp_path)))

    fit(ToyModel(), ToyData(), 3, 4, [MetricsLog(tmp_path / "metrics.jsonl"), Count()])
    assert counts == [1, 2, 3]


def test_numbers_that_json_has_not_become_null():
    text = line({"epoch": 1, "a": math.nan, "b": math.inf, "c": None, "d": 0.1})
    assert json.loads(text) == {"epoch": 1, "a": None, "b": None, "c": None, "d": 0.1}


def test_files_of_a_run(tmp_path):
    result = experiment(1).run(output=tmp_path / "new" / "folder", resolved="!FitExperiment {}\n", hooks=[])
    folder = tmp_path / "new" / "folder"
    assert (folder / "experiment.yaml").read_text() == "!FitExperiment {}\n"
    facts = json.loads((folder / "environment.json").read_text())
    assert facts["ranks"] == 1
    assert facts["grid"] == {"replicas": 1, "planes": 1, "rows": 1, "cols": 1}
    assert {"versions", "hosts", "threads", "backend", "dtype"} <= facts.keys()
    assert [list(record) for record in lines(folder)] == [KEYS]
    assert sorted(result.files) == sorted(folder.iterdir())  # nothing partial is left


def test_planes_are_named(tmp_path, capsys):
    def body(world):
        made = experiment(
            1,
            lambda: [ConvLayerDist(2, 3, padding=1), FCLayerDist(4)],
            dataset=lambda: Synthetic((8, 5, 5, 1), classes=4, train=4, test=2),
            grid={"planes": 4},
        )
        made.run(made.open_grid(world), output=tmp_path)

    loopback.run(4, body)
    assert "on 4 ranks (1 x 4 x 1 x 1)" in capsys.readouterr().out
    facts = json.loads((tmp_path / "environment.json").read_text())
    assert facts["grid"] == {"replicas": 1, "planes": 4, "rows": 1, "cols": 1}


def test_no_output_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = experiment(1).run(hooks=[])
    assert result.files == []
    assert len(result.history) == 1
    assert not list(tmp_path.iterdir())


def test_an_earlier_runs_files_are_replaced_and_others_stay(tmp_path):
    experiment(2).run(output=tmp_path, resolved="first", hooks=[])
    (tmp_path / "mine.txt").write_text("keep")
    experiment(1).run(output=tmp_path, hooks=[], overwrite=True)
    assert [record["epoch"] for record in lines(tmp_path)] == [1]
    assert not (tmp_path / "experiment.yaml").exists()  # it was of the earlier run
    assert (tmp_path / "mine.txt").read_text() == "keep"


def test_a_run_that_cannot_start_leaves_the_earlier_one(tmp_path):
    experiment(2).run(output=tmp_path, hooks=[])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(Exception, match="kernel"):
        experiment(1, lambda: [ConvLayerDist(2, 99), FCLayerDist(4)]).run(output=tmp_path, hooks=[])
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("optimizer", [SGD(0.05, momentum=0.9), Adam(0.01)])
def test_resume_continues_as_if_nothing_had_happened(tmp_path, optimizer):
    whole = experiment(3, optimizer=optimizer)
    expected = whole.run(hooks=[]).history
    experiment(1, optimizer=optimizer).run(output=tmp_path, hooks=[])
    with (tmp_path / "metrics.jsonl").open("a") as file:  # killed after the second epoch's line, in the third
        file.write('{"epoch": 2, "step": 10}\n{"epoch": 3, "st')
    resumed = experiment(3, optimizer=optimizer)
    history = resumed.run(output=tmp_path, resume=True, hooks=[]).history
    assert [record["epoch"] for record in lines(tmp_path)] == [1, 2, 3]
    assert lines(tmp_path) == history
    for name in ("train_loss", "test_loss", "test_error", "step"):
        assert [record[name] for record in history] == [record[name] for record in expected]
    for name, array in whole.model.state().items():
        np.testing.assert_array_equal(resumed.model.state()[name], array)


def test_resume_of_a_complete_run_trains_nothing(tmp_path):
    first = experiment(2).run(output=tmp_path, hooks=[])
    hook = Recorder()
    assert experiment(2).run(output=tmp_path, resume=True, hooks=[hook]).history == first.history
    assert [name for name, *_ in hook.calls] == ["before_run", "after_run"]


def test_running_twice_begins_anew_each_time():
    made = experiment(1, optimizer=Adam(0.01))
    runs = [made.run(hooks=[]).history[0] for _ in range(2)]
    assert runs[0]["train_loss"] == runs[1]["train_loss"]
    assert runs[0]["step"] == runs[1]["step"]


def test_resume_needs_an_output():
    with pytest.raises(ConfigError, match="resume"):
        experiment().run(resume=True)
