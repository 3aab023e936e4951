"""The best epoch is kept, and a run that gets no better ends, also after it was resumed."""

import numpy as np
import pytest

import neondist as nd
from neondist.comm import loopback
from neondist.errors import ConfigError
from neondist.train import Record, evaluate_checkpoint

LOSSES = [3.0, 2.0, 2.5, 1.9, None, 1.95, 1.89, 4.0]


def history(values, name="validation_loss"):
    return [Record({"epoch": at, "validation_loss": 0.0, name: v}) for at, v in enumerate(values, start=1)]


@pytest.mark.parametrize(
    ("best", "values", "expected"),
    [
        (nd.Best(), LOSSES, 7),
        (nd.Best(min_change=0.05), LOSSES, 4),
        (nd.Best(), [None, float("nan")], 0),
        (nd.Best(), [2.0, 2.0], 1),
        (nd.Best(), [], 0),
    ],
)
def test_which_is_the_best(best, values, expected):
    assert best.epoch(history(values), []) == expected


def test_more_of_a_metric_is_better():
    best = nd.Best("validation_iou", patience=2)
    assert best.epoch(history([0.1, 0.5, 0.4], "validation_iou"), [nd.IoU()]) == 2
    assert best.stalled(history([0.1, 0.5, 0.4], "validation_iou"), [nd.IoU()]) == ""
    told = best.stalled(history([0.1, 0.5, 0.4, 0.5], "validation_iou"), [nd.IoU()])
    assert told == "validation_iou has not improved since epoch 2: the run ends after epoch 4"
    assert nd.Best().stalled(history([1.0] * 99), []) == ""


def experiment(epochs=9, **best):
    data = nd.Synthetic((5, 6, 1), classes=2, train=8, test=4, validation=4)
    model = nd.ConvnetDist([nd.FCLayerDist(2)], optimizer=nd.SGD(0.3), dtype="float64", backend="numpy")
    return nd.FitExperiment(data, model, batch_size=2, epochs=epochs, best=nd.Best(**best), metrics=[nd.F1()])


def test_a_run_ends_and_stays_ended(tmp_path, capsys):
    def run(comm, resume, patience=2):
        made = experiment(patience=patience, number="test_loss", min_change=0.05)
        return made.run(made.open_grid(comm), output=tmp_path, resume=resume).history

    found = loopback.run(2, lambda comm: run(comm, False))[0]
    losses = [record["test_loss"] for record in found]
    best = nd.Best("test_loss", min_change=0.05).epoch(found, [])
    assert len(found) == best + 2 < 9
    ended = f"test_loss has not improved since epoch {best}: the run ends after epoch {best + 2}"
    assert ended in capsys.readouterr().out
    made = experiment()
    judged = evaluate_checkpoint(made, tmp_path / "checkpoint_best.h5", nd.ProcessGrid.serial())
    assert judged["loss"] == pytest.approx(losses[best - 1], rel=1e-12)
    assert len(loopback.run(3, lambda comm: run(comm, True))[0]) == best + 2
    assert "raise patience" in capsys.readouterr().out
    assert len(loopback.run(2, lambda comm: run(comm, True, patience=3))[0]) > best + 2


def test_what_cannot_be_is_named():
    with pytest.raises(ConfigError, match="number: 'validation_f2' is not in any record; did you mean 'validation_f1'"):
        experiment(number="validation_f2").validate()
    with pytest.raises(ConfigError, match="patience: expected an integer of at least 1"):
        nd.Best(patience=0)
    made = experiment(number="validation_f1")
    made.dataset = nd.Synthetic((5, 6, 1), classes=2, train=8, test=4)
    with pytest.raises(ConfigError, match="no validation split; give the data set"):
        made.run(nd.ProcessGrid.serial(), hooks=[])
    assert np.isfinite(experiment(2, number="f1").run(nd.ProcessGrid.serial(), hooks=[]).history[-1]["f1"])
