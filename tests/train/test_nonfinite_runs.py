"""Runs with non-finite values."""

import math
import re

import h5py
import numpy as np
import pytest
from toy_training import make_experiment
from training_records import read_metrics

import neondist as nd
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
        with pytest.raises(NonFiniteError, match=r"value: the images on rank 0;.*\(input of sample 7 is not") as caught:
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
    assert re.search(r"skip \(largest in this batch: \d\S*, input of sample \d+\)\n", err)


@pytest.mark.parametrize("ranks", [1, 2])
def test_nonfinite_values_in_hdf5_files_are_located(tmp_path, ranks):
    path = tmp_path / "a.h5"
    images = np.ones((12, 6, 6, 1), "f4")
    images[7, 5, 5] = np.nan
    with h5py.File(path, "w") as file:
        file["train/images"], file["train/labels"] = images, np.zeros((12, 6, 6), "f4")

    def body(transport):
        model = nd.ConvnetDist([nd.ConvLayerDist(1, 3, padding=1)], cost=nd.MSE(), optimizer=nd.SGD(0.1))
        dataset = nd.HDF5Dataset(path, validation=None)
        experiment = nd.FitExperiment(dataset, model, batch_size=4, epochs=1)
        with pytest.raises(NonFiniteError) as caught:
            experiment.run(experiment.open_grid(transport), output=tmp_path / "run")
        return str(caught.value)

    for message in loopback.run(ranks, body):
        assert message.endswith(f"(input of {path}: sample 7 of train/images is not finite)")


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
