"""The three splits in a run: records, choices, evaluation; and what version 0.1 has written of them."""

import json

import pytest
from session_toys import ToyData, ToyModel, experiment

import neondist as nd
from neondist.bench.schemes import read_results
from neondist.comm import ProcessGrid, loopback
from neondist.data import Synthetic
from neondist.errors import ConfigError
from neondist.metrics import LogLoss, Misclassification, TopK
from neondist.train import Record, evaluate, evaluate_checkpoint, fit
from neondist.train.callbacks.checkpoint import Progress
from neondist.train.callbacks.curves import draw_curves


def data():
    return Synthetic((13, 11, 2), classes=4, train=45, test=13, validation=9)


def old(record):
    """Return a record as version 0.1 wrote it."""
    return {name.replace("test_", "valid_"): value for name, value in record.items()}


def test_a_record_has_the_numbers_of_both_splits():
    model, toys = ToyModel(), ToyData(train=10, validation=5, test=7)
    record = fit(model, toys, 1, 4, metrics=[Misclassification(), LogLoss()])[-1]
    assert list(record)[:7] == [
        "epoch", "step", "train_loss", "validation_loss", "validation_error", "validation_log_loss", "test_loss",
    ]  # fmt: skip
    for name, split in (("validation", toys.validation), ("test", toys.test)):
        found = evaluate(model, split, 4, [Misclassification()])
        assert (record[f"{name}_loss"], record[f"{name}_error"]) == (found["loss"], found[Misclassification.name])
    assert record["validation_log_loss"] == pytest.approx(record["validation_loss"], rel=1e-12)
    assert record["log_loss"] == pytest.approx(record["test_loss"], rel=1e-12)
    assert record["validation_loss"] != record["test_loss"]


def test_a_record_of_a_data_set_without_a_test_split():
    record = fit(ToyModel(), ToyData(validation=5, test=None))[0]
    assert not [name for name in record if name.startswith("test_")]
    assert record["validation_error"] is not None


def test_settings_are_chosen_by_the_validation_split_if_there_is_one():
    both = Record(train_loss=0, validation_loss=1, validation_error=0.5, test_loss=2, test_error=0.25)
    assert (both.selection, both.selected("loss"), both.selected("error")) == ("validation", 1, 0.5)
    numbers = Record(validation_loss=1, validation_error=None, test_loss=2, test_error=0.25)
    assert numbers.selected("error") is None
    one = Record(train_loss=0, test_loss=2, test_error=0.25)
    assert (one.selection, one.selected("loss"), one.selected("error")) == ("test", 2, 0.25)


def test_the_names_of_version_0_1_lead_to_the_test_split():
    record = Record(test_loss=2.0, test_error=0.25, validation_loss=1.0)
    with pytest.warns(DeprecationWarning, match="'valid_error' of a record is now called 'test_error'"):
        assert record["valid_error"] == 0.25
    for name in ("valid_accuracy", "nothing"):
        with pytest.raises(KeyError, match=name):
            record[name]
    assert Record.of(old(record)) == record


@pytest.mark.parametrize(("ranks", "grid"), [(1, {}), (4, {}), (6, {"replicas": 2})])
@pytest.mark.long
def test_validation_is_the_same_on_every_grid(tmp_path, ranks, grid):
    def fresh():
        return experiment(1, dataset=data, metrics=[TopK(2)])

    expected = fresh().run(hooks=[]).history[0]

    def body(world):
        mesh, file = ProcessGrid(world, **grid), tmp_path / "checkpoint.h5"
        record = fresh().run(mesh, output=tmp_path, hooks=[]).history[0]
        return record, {
            name: evaluate_checkpoint(fresh(), file, mesh, name) for name in ("train", "validation", "test")
        }

    for record, found in loopback.run(ranks, body):
        assert [found[split]["samples"] for split in found] == [36, 9, 13]
        for name in ("train_loss", "validation_loss", "validation_error", "validation_top2_error", "test_loss"):
            assert record[name] == pytest.approx(expected[name], rel=1e-10)
        for split in ("validation", "test"):
            assert found[split]["loss"] == pytest.approx(record[f"{split}_loss"], rel=1e-12)
            assert found[split]["error"] == record[f"{split}_error"]
        assert found["validation"]["top2_error"] == record["validation_top2_error"]


def test_training_does_not_see_them():
    """The samples left train as a data set that has no others."""
    kept = experiment(2, dataset=data).run(hooks=[]).history
    fewer = experiment(2, dataset=lambda: Synthetic((13, 11, 2), classes=4, train=36, test=13)).run(hooks=[]).history
    assert [record["train_loss"] for record in kept] == [record["train_loss"] for record in fewer]
    assert [record["test_loss"] for record in kept] == [record["test_loss"] for record in fewer]


def test_a_split_that_is_not_there(tmp_path):
    experiment(1).run(output=tmp_path, hooks=[])
    with pytest.raises(ConfigError, match="split: the data set has no validation split; choose from train, test"):
        evaluate_checkpoint(experiment(1), tmp_path / "checkpoint.h5", split="validation")
    with pytest.raises(ConfigError, match="split: 'valid' is invalid; choose from train, validation, test"):
        evaluate_checkpoint(experiment(1), tmp_path / "checkpoint.h5", split="valid")


def test_what_is_evaluated_unless_asked(tmp_path):
    """The test split; of a data set that has none, as `neondist init` writes, the validation split."""

    class NoTest(Synthetic):
        def load(self, grid):
            return super().load(grid)[0], None

    others = NoTest((13, 11, 2), classes=4, train=45, validation=9)
    for split, made in (("test", experiment(1)), ("validation", experiment(1, dataset=lambda: others))):
        made.run(output=tmp_path / split, hooks=[])
        found = evaluate_checkpoint(made, tmp_path / split / "checkpoint.h5", nd.ProcessGrid.serial())
        assert found["split"] == split


def test_a_run_folder_of_version_0_1_goes_on(tmp_path, monkeypatch):
    expected = experiment(3).run(hooks=[]).history
    with monkeypatch.context() as patch:
        to_json = Progress.to_json
        patch.setattr(Progress, "to_json", lambda self: to_json(self).replace('"test_', '"valid_'))
        first = experiment(1).run(output=tmp_path, hooks=[]).history
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(old(record)) + "\n" for record in first))
    history = experiment(3).run(output=tmp_path, resume=True, hooks=[]).history
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == history
    for found, record in zip(lines, expected, strict=True):
        assert list(found) == list(record)
        assert (found["test_loss"], found["test_error"]) == (record["test_loss"], record["test_error"])


def test_a_history_of_version_0_1_goes_on():
    history = fit(ToyModel(), ToyData(), 1, 4)
    assert fit(ToyModel(), ToyData(), 2, 4, epoch=1, history=[old(history[0])])[0] == history[0]


def test_results_of_version_0_1_are_read(tmp_path):
    (tmp_path / "results.jsonl").write_text('{"key": "k", "valid_loss": 1.5, "valid_error": 0.25}\n{"key"')
    (row,) = read_results(tmp_path / "results.jsonl")
    assert (row.selection, row["test_loss"], row.selected("error")) == ("test", 1.5, 0.25)


@pytest.mark.parametrize("kept", [None, 5])
def test_curves_have_a_line_for_each_split(tmp_path, pictures, kept, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    history = fit(ToyModel(), ToyData(validation=kept), 3, 4)
    history = history if kept else [old(record) for record in history]
    figures = []
    monkeypatch.setattr("neondist.train.callbacks.curves.write_figure", lambda path, found: figures.append(found))
    draw_curves(history, tmp_path / "curves.png")
    assert isinstance(figures[0], figure.Figure)
    loss, error = figures[0].axes
    names = ["validation", "test"] if kept else ["test"]
    assert [line.get_label() for line in loss.lines] == ["train", *names]
    assert [line.get_label() for line in error.lines] == names
    assert error.get_title().startswith(f"{names[0].capitalize()} error: ")
    shown = Record.of(history[-1])[f"{names[0]}_error"]
    assert error.lines[0].get_ydata()[-1] == pytest.approx(100 * shown)
