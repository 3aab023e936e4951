"""Best-epoch selection and early stopping, also after a resume."""

import numpy as np
import pytest

import neondist as nd
from neondist.comm import loopback
from neondist.errors import ConfigError
from neondist.train import EpochRecord, evaluate_checkpoint

EPOCH_LOSSES = [3.0, 2.0, 2.5, 1.9, None, 1.95, 1.89, 4.0]


def make_history(values, name="validation_loss"):
    return [EpochRecord({"epoch": at, "validation_loss": 0.0, name: v}) for at, v in enumerate(values, start=1)]


@pytest.mark.parametrize(
    ("best", "values", "expected"),
    [
        (nd.Best(), EPOCH_LOSSES, 7),
        (nd.Best(min_change=0.05), EPOCH_LOSSES, 4),
        (nd.Best(), [None, float("nan")], 0),
        (nd.Best(), [2.0, 2.0], 1),
        (nd.Best(), [], 0),
    ],
)
def test_best_epoch_selection(best, values, expected):
    assert best.find_best_epoch(make_history(values), []) == expected


def test_larger_metrics_are_better():
    best = nd.Best("validation_iou", patience=2)
    assert best.find_best_epoch(make_history([0.1, 0.5, 0.4], "validation_iou"), [nd.IoU()]) == 2
    assert best.early_stop_reason(make_history([0.1, 0.5, 0.4], "validation_iou"), [nd.IoU()]) == ""
    message = best.early_stop_reason(make_history([0.1, 0.5, 0.4, 0.5], "validation_iou"), [nd.IoU()])
    assert message == "validation_iou has not improved since epoch 2: the run ends after epoch 4"
    assert nd.Best().early_stop_reason(make_history([1.0] * 99), []) == ""


def make_experiment(epochs=9, **best):
    data = nd.Synthetic((5, 6, 1), classes=2, train=8, test=4, validation=4)
    model = nd.ConvnetDist([nd.FCLayerDist(2)], optimizer=nd.SGD(0.3), dtype="float64", backend="numpy")
    return nd.FitExperiment(data, model, batch_size=2, epochs=epochs, best=nd.Best(**best), metrics=[nd.F1()])


@pytest.mark.parametrize("ranks", [1, 2])
def test_lists_cannot_select_an_epoch(ranks):
    def train(comm):
        experiment = make_experiment(number="validation_confusion_matrix")
        experiment.metrics.append(nd.ConfusionMatrix())
        with pytest.raises(ConfigError, match=r"number: 'validation_confusion_matrix' is not a single number.*_loss"):
            experiment.run(experiment.open_grid(comm), hooks=[])

    loopback.run(ranks, train)


def test_early_stopping_persists_across_resume(tmp_path, capsys):
    def train(comm, resume, patience=2):
        experiment = make_experiment(patience=patience, number="test_loss", min_change=0.05)
        return experiment.run(experiment.open_grid(comm), output=tmp_path, resume=resume).history

    history = loopback.run(2, lambda comm: train(comm, False))[0]
    losses = [record["test_loss"] for record in history]
    best = nd.Best("test_loss", min_change=0.05).find_best_epoch(history, [])
    assert len(history) == best + 2 < 9
    message = f"test_loss has not improved since epoch {best}: the run ends after epoch {best + 2}"
    assert message in capsys.readouterr().out
    experiment = make_experiment()
    evaluation = evaluate_checkpoint(experiment, tmp_path / "checkpoint_best.h5", nd.ProcessGrid.serial())
    assert evaluation["loss"] == pytest.approx(losses[best - 1], rel=1e-12)
    assert len(loopback.run(3, lambda comm: train(comm, True))[0]) == best + 2
    assert "raise the patience of best" in capsys.readouterr().out
    assert len(loopback.run(2, lambda comm: train(comm, True, patience=3))[0]) > best + 2


def test_invalid_settings_are_rejected():
    with pytest.raises(ConfigError, match="number: 'validation_f2' is not in any record; did you mean 'validation_f1'"):
        make_experiment(number="validation_f2").validate()
    with pytest.raises(ConfigError, match="'validation_bias' has a sign: its best value is neither the smallest nor"):
        nd.Best("validation_bias").check_metric_is_recorded([nd.RMSE(), nd.Bias()], None)
    with pytest.raises(ConfigError, match="patience: expected an integer of at least 1"):
        nd.Best(patience=0)
    experiment = make_experiment(number="validation_f1")
    experiment.dataset = nd.Synthetic((5, 6, 1), classes=2, train=8, test=4)
    with pytest.raises(ConfigError, match=r"no validation split; set validation: 0\.1"):
        experiment.run(nd.ProcessGrid.serial(), hooks=[])
    for splits, remedy in ((["train", "validation"], "test: 0.1"), (["train"], "choose a metric of the train split")):
        with pytest.raises(ConfigError, match=f"no 'f1', because the data set has no test split.*{remedy}"):
            nd.Best("f1").check_split_exists(splits)
    nd.Best("train_loss").check_split_exists(["train"])
    assert np.isfinite(make_experiment(2, number="f1").run(nd.ProcessGrid.serial(), hooks=[]).history[-1]["f1"])
