"""Training, validation and test splits in records, selection and evaluation."""

import pytest
from toy_training import ToyData, ToyModel, make_experiment

import neondist as nd
from neondist.comm import ProcessGrid, loopback
from neondist.data import Synthetic
from neondist.errors import ConfigError
from neondist.metrics import LogLoss, Misclassification, TopK
from neondist.train import EpochRecord, evaluate, evaluate_checkpoint, fit
from neondist.train.callbacks.curves_picture import write_curves_picture


def make_data():
    return Synthetic((13, 11, 2), classes=4, train=45, test=13, validation=9)


def test_record_has_metrics_of_both_splits():
    model, dataset = ToyModel(), ToyData(train=10, validation=5, test=7)
    record = fit(model, dataset, 1, 4, metrics=[Misclassification(), LogLoss()])[-1]
    assert list(record)[:7] == [
        "epoch", "step", "train_loss", "validation_loss", "validation_error", "validation_log_loss", "test_loss",
    ]  # fmt: skip
    for name, split in (("validation", dataset.validation), ("test", dataset.test)):
        results = evaluate(model, split, 4, [Misclassification()])
        assert (record[f"{name}_loss"], record[f"{name}_error"]) == (results["loss"], results[Misclassification.name])
    assert record["validation_log_loss"] == pytest.approx(record["validation_loss"], rel=1e-12)
    assert record["log_loss"] == pytest.approx(record["test_loss"], rel=1e-12)
    assert record["validation_loss"] != record["test_loss"]


def test_record_without_a_test_split():
    record = fit(ToyModel(), ToyData(validation=5, test=None))[0]
    assert not [name for name in record if name.startswith("test_")]
    assert record["validation_error"] is not None


def test_selection_prefers_the_validation_split():
    both = EpochRecord(train_loss=0, validation_loss=1, validation_error=0.5, test_loss=2, test_error=0.25)
    assert (both.selection_split, both.selection_value("loss"), both.selection_value("error")) == ("validation", 1, 0.5)
    regression = EpochRecord(validation_loss=1, validation_error=None, test_loss=2, test_error=0.25)
    assert regression.selection_value("error") is None
    train_only = EpochRecord(train_loss=3)
    assert (train_only.selection_split, train_only.selection_value("loss")) == ("train", 3)
    assert train_only.selection_value("error") is None
    test_only = EpochRecord(train_loss=0, test_loss=2, test_error=0.25)
    assert (test_only.selection_split, test_only.selection_value("loss"), test_only.selection_value("error")) == (
        "test",
        2,
        0.25,
    )


@pytest.mark.parametrize(("ranks", "grid"), [(1, {}), (4, {}), (6, {"replicas": 2})])
@pytest.mark.long
def test_validation_is_the_same_on_every_grid(tmp_path, ranks, grid):
    def make():
        return make_experiment(1, dataset=make_data, metrics=[TopK(2)])

    expected = make().run(hooks=[]).history[0]

    def body(world):
        process_grid, checkpoint = ProcessGrid(world, **grid), tmp_path / "checkpoint.h5"
        record = make().run(process_grid, output=tmp_path, hooks=[]).history[0]
        return record, {
            name: evaluate_checkpoint(make(), checkpoint, process_grid, name)
            for name in ("train", "validation", "test")
        }

    for record, results in loopback.run(ranks, body):
        assert [results[split]["samples"] for split in results] == [36, 9, 13]
        for name in ("train_loss", "validation_loss", "validation_error", "validation_top2_error", "test_loss"):
            assert record[name] == pytest.approx(expected[name], rel=1e-10)
        for split in ("validation", "test"):
            assert results[split]["loss"] == pytest.approx(record[f"{split}_loss"], rel=1e-12)
            assert results[split]["error"] == record[f"{split}_error"]
        assert results["validation"]["top2_error"] == record["validation_top2_error"]


def test_training_excludes_the_validation_split():
    """Training equals that on a data set of only the remaining samples."""
    with_validation = make_experiment(2, dataset=make_data).run(hooks=[]).history
    smaller = make_experiment(2, dataset=lambda: Synthetic((13, 11, 2), classes=4, train=36, test=13))
    without_validation = smaller.run(hooks=[]).history
    assert [record["train_loss"] for record in with_validation] == [
        record["train_loss"] for record in without_validation
    ]
    assert [record["test_loss"] for record in with_validation] == [record["test_loss"] for record in without_validation]


def test_missing_split_is_rejected(tmp_path):
    make_experiment(1).run(output=tmp_path, hooks=[])
    with pytest.raises(ConfigError, match="split: the data set has no validation split; choose from train, test"):
        evaluate_checkpoint(make_experiment(1), tmp_path / "checkpoint.h5", split="validation")
    with pytest.raises(ConfigError, match=r"split: expected .*'test' or null, got the text 'valid'; did you mean 'val"):
        evaluate_checkpoint(make_experiment(1), tmp_path / "checkpoint.h5", split="valid")


def test_default_split_of_evaluation(tmp_path):
    """The test split, or the validation split of a data set without a test split, as `neondist init` writes."""

    class NoTest(Synthetic):
        def open_splits(self, grid):
            return super().open_splits(grid)[0], None

    dataset = NoTest((13, 11, 2), classes=4, train=45, validation=9)
    for split, experiment in (
        ("test", make_experiment(1)),
        ("validation", make_experiment(1, dataset=lambda: dataset)),
    ):
        experiment.run(output=tmp_path / split, hooks=[])
        results = evaluate_checkpoint(experiment, tmp_path / split / "checkpoint.h5", nd.ProcessGrid.serial())
        assert results["split"] == split


@pytest.mark.parametrize("validation", [None, 5])
def test_curves_have_a_line_for_each_split(tmp_path, plotting, validation, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    history = fit(ToyModel(), ToyData(validation=validation), 3, 4)
    figures = []
    monkeypatch.setattr("neondist.train.callbacks.curves_picture.write_figure", lambda path, fig: figures.append(fig))
    write_curves_picture(history, tmp_path / "curves.png")
    assert isinstance(figures[0], figure.Figure)
    loss, error = figures[0].axes
    names = ["validation", "test"] if validation else ["test"]
    assert [line.get_label() for line in loss.lines] == ["train", *names]
    assert [line.get_label() for line in error.lines] == names
    assert error.get_title().startswith(f"{names[0].capitalize()} error: ")
    shown = history[-1][f"{names[0]}_error"]
    assert error.lines[0].get_ydata()[-1] == pytest.approx(100 * shown)
