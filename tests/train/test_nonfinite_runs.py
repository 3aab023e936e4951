"""Runs with non-finite values."""

import math

import numpy as np
import pytest
from toy_training import make_experiment
from training_records import read_metrics

from neondist.cli import main
from neondist.comm import loopback
from neondist.errors import ConfigError, NonFiniteError
from neondist.train import Hook

EXPERIMENT_YAML = """\
!FitExperiment
dataset: !Synthetic {shape: [8, 8, 1], classes: 3, train: 24, test: 12}
model: !ConvnetDist
  layers: [!ConvLayerDist {out_channels: 2, kernel_size: 3, activation: !ReLU {}}, !FCLayerDist {out_features: 3}]
  optimizer: !SGD {learning_rate: 1e300}
batch_size: 8
dtype: float64
backend: numpy
"""


class MakeSampleNonfinite(Hook):
    """Make a training image infinite in the tile of rank 0."""

    def before_run(self, run):
        if run.is_first_rank:
            images = run.dataset.train.images
            run.dataset.train.images = lambda index, dtype: np.where(
                (index == 7)[:, None, None, None], np.inf, images(index, dtype)
            )


def test_skipped_steps_are_reported(tmp_path, capsys):
    from neondist.train import ProgressBar

    def body(transport):
        experiment = make_experiment(2, nonfinite="skip")
        experiment.run(experiment.open_grid(transport), hooks=[MakeSampleNonfinite(), ProgressBar()], output=tmp_path)
        return experiment.model.step

    assert loopback.run(2, body) == [10, 10]
    out = capsys.readouterr().out
    assert out.count(" skipped: first non-finite value: the images on rank 0") == 2
    records = read_metrics(tmp_path)
    assert all(0 < record["train_loss"] < 5 for record in records)


def test_run_stops_on_all_ranks():
    def body(transport):
        experiment = make_experiment(2)
        with pytest.raises(NonFiniteError, match="first non-finite value: the images on rank 0;") as caught:
            experiment.run(experiment.open_grid(transport), hooks=[MakeSampleNonfinite()])
        return str(caught.value)

    assert len(set(loopback.run(3, body))) == 1


def test_message_and_exit_code_of_a_nonfinite_loss(tmp_path, capsys):
    (tmp_path / "a.yaml").write_text(EXPERIMENT_YAML)
    assert main(["run", str(tmp_path / "a.yaml"), "--output", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "step 2: first non-finite value: the output of layer 'fc1'; lower the learning rate" in err


def test_mean_loss_is_nan_if_all_steps_are_skipped(tmp_path):
    experiment = make_experiment(1, nonfinite="skip")
    history = experiment.run(hooks=[MakeAllSamplesNonfinite()]).history
    assert math.isnan(history[0]["train_loss"])


class MakeAllSamplesNonfinite(Hook):
    def before_run(self, run):
        run.model.layers[0].params["weights"][...] = np.nan


def test_invalid_nonfinite_field_is_rejected():
    with pytest.raises(ConfigError, match="nonfinite: expected 'stop' or 'skip', got the text 'no'"):
        make_experiment(1, nonfinite="no")
