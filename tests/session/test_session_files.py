"""What a run writes, what it does with an earlier run's files, and how it continues."""

import json
import math

import numpy as np
import pytest
from session_toys import Recorder, ToyData, ToyModel, experiment

from neondist.errors import ConfigError, DataError
from neondist.layers import ConvLayerDist, FCLayerDist
from neondist.optim import SGD, Adam
from neondist.session import fit
from neondist.session.checkpoint import Snapshot, read, restore, write
from neondist.session.metrics_log import MetricsLog, line
from neondist.session.position import Position
from neondist.session.run import Run, Totals

KEYS = ["epoch", "step", "train_loss", "valid_loss", "valid_error", "seconds", "samples_per_second", "bytes_sent"]


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
    assert facts["grid"] == {"replicas": 1, "rows": 1, "cols": 1}
    assert {"versions", "hosts", "threads", "backend", "dtype"} <= facts.keys()
    assert [list(record) for record in lines(folder)] == [KEYS]
    assert sorted(result.files) == sorted(folder.iterdir())  # nothing partial is left


def test_no_output_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = experiment(1).run(hooks=[])
    assert result.files == []
    assert len(result.history) == 1
    assert not list(tmp_path.iterdir())


def test_an_earlier_runs_files_are_replaced_and_others_stay(tmp_path):
    experiment(2).run(output=tmp_path, resolved="first", hooks=[])
    (tmp_path / "mine.txt").write_text("keep")
    experiment(1).run(output=tmp_path, hooks=[])
    assert [record["epoch"] for record in lines(tmp_path)] == [1]
    assert not (tmp_path / "experiment.yaml").exists()  # it was of the earlier run
    assert (tmp_path / "mine.txt").read_text() == "keep"


def test_a_run_that_cannot_start_leaves_the_earlier_one(tmp_path):
    experiment(2).run(output=tmp_path, hooks=[])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(Exception, match="kernel"):
        experiment(1, lambda: [ConvLayerDist(2, 99), FCLayerDist(4)]).run(output=tmp_path, hooks=[])
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("optimizer", [SGD(0.05, 0.9), Adam(0.01)])
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
    for name in ("train_loss", "valid_loss", "valid_error", "step"):
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


SNAPSHOT = Snapshot(
    {"conv1/weights": np.random.default_rng(0).normal(size=(3, 3, 40, 50)), "bn/count": np.array(3)},
    {"conv1/weights/momentum": np.zeros((3, 3, 40, 50), np.float32), "empty/slot": np.zeros((0, 2))},
    Position(4, 99, 7, 10, 1, Totals(0.1, 0.2, 3, 4), [{"epoch": 4, "train_loss": 0.1, "valid_error": math.inf}]),
)


def test_checkpoint_keeps_every_bit(tmp_path):
    write(tmp_path / "c.h5", SNAPSHOT)
    found = read(tmp_path / "c.h5")
    assert found.position == SNAPSHOT.position
    for kept, there in ((SNAPSHOT.model, found.model), (SNAPSHOT.optimizer, found.optimizer)):
        assert kept.keys() == there.keys()
        for name, array in kept.items():
            np.testing.assert_array_equal(there[name], array)
            assert there[name].dtype == array.dtype
    assert [path.name for path in tmp_path.iterdir()] == ["c.h5"]


def _cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _garbage(path):
    path.write_bytes(b"not HDF5 at all" * 100)


def _empty(path):
    path.write_bytes(b"")


def _flip(path):
    content = bytearray(path.read_bytes())
    content[content.index(SNAPSHOT.model["conv1/weights"].tobytes()[:64]) + 20] ^= 1
    path.write_bytes(bytes(content))


def _without_model(path):
    import h5py

    with h5py.File(path, "r+") as file:
        del file["model"]


@pytest.mark.parametrize("harm", [_cut, _garbage, _empty, _flip, _without_model])
def test_damaged_checkpoint(tmp_path, harm):
    write(tmp_path / "c.h5", SNAPSHOT)
    harm(tmp_path / "c.h5")
    with pytest.raises(DataError, match=r"c\.h5: damaged .*--resume"):
        read(tmp_path / "c.h5")


def test_missing_checkpoint(tmp_path):
    with pytest.raises(DataError, match=r"c\.h5: no such file.*without --resume"):
        read(tmp_path / "c.h5")


def test_a_checkpoint_that_fails_leaves_the_old_one(tmp_path):
    write(tmp_path / "c.h5", SNAPSHOT)
    with pytest.raises(TypeError):
        write(tmp_path / "c.h5", Snapshot({"a": np.array(object())}, {}, Position()))
    assert read(tmp_path / "c.h5").position.epoch == 4


def test_checkpoint_of_another_model_changes_nothing(tmp_path):
    model = ToyModel(SGD(0.1, 0.9))
    before = model.state()["toy/weights"]
    for state, slots, name in [
        ({"toy/weights": np.ones(4)}, model.optimizer_state(), "toy/weights"),
        ({"toy/weights": np.ones(3), "toy/bias": np.ones(1)}, model.optimizer_state(), "toy/bias"),
        ({}, model.optimizer_state(), "toy/weights"),
        ({"toy/weights": np.ones(3)}, {}, "toy/weights/momentum"),
    ]:
        write(tmp_path / "c.h5", Snapshot(state, slots, Position(1, 1)))
        with pytest.raises(DataError, match=f"another model.*'{name}'"):
            restore(tmp_path / "c.h5", Run(model, ToyData(), 2, 4))
        np.testing.assert_array_equal(model.weights, before)
