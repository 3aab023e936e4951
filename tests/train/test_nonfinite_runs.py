"""Runs that meet what is not finite."""

import json
import math

import numpy as np
import pytest
from session_toys import experiment

from neondist.cli import main
from neondist.comm import loopback
from neondist.errors import ConfigError, NonFiniteError
from neondist.train import Hook

YAML = """\
!FitExperiment
dataset: !Synthetic {shape: [8, 8, 1], classes: 3, train: 24, test: 12}
model: !ConvnetDist
  layers: [!ConvLayerDist {out_channels: 2, kernel_size: 3, activation: !ReLU {}}, !FCLayerDist {out_features: 3}]
  optimizer: !SGD {learning_rate: 1e300}
batch_size: 8
dtype: float64
backend: numpy
"""


class SpoilSample(Hook):
    """Make a training image infinite, in rank 0's tile."""

    def before_run(self, run):
        if run.first_rank:
            images = run.dataset.train.images
            run.dataset.train.images = lambda index, dtype: np.where(
                (index == 7)[:, None, None, None], np.inf, images(index, dtype)
            )


def test_a_run_skips_and_says_so(tmp_path, capsys):
    from neondist.train import ProgressBar

    def body(transport):
        made = experiment(2, nonfinite="skip")
        made.run(made.open_grid(transport), hooks=[SpoilSample(), ProgressBar()], output=tmp_path)
        return made.model.step

    assert loopback.run(2, body) == [10, 10]
    out = capsys.readouterr().out
    assert out.count(" skipped: not finite: the images on rank 0") == 2
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < record["train_loss"] < 5 for record in records)


def test_a_run_stops_on_all_ranks():
    def body(transport):
        made = experiment(2)
        with pytest.raises(NonFiniteError, match="not finite: the images on rank 0 first") as caught:
            made.run(made.open_grid(transport), hooks=[SpoilSample()])
        return str(caught.value)

    assert len(set(loopback.run(3, body))) == 1


def test_one_message_and_code_2(tmp_path, capsys):
    (tmp_path / "a.yaml").write_text(YAML)
    assert main(["run", str(tmp_path / "a.yaml"), "--output", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "step 2: not finite: the output of layer 'fc1' first; lower the learning rate" in err


def test_all_steps_skipped_has_no_mean(tmp_path):
    made = experiment(1, nonfinite="skip")
    history = made.run(hooks=[SpoilAll()]).history
    assert math.isnan(history[0]["train_loss"])


class SpoilAll(Hook):
    def before_run(self, run):
        run.model.layers[0].params["weights"][...] = np.nan


def test_choices():
    with pytest.raises(ConfigError, match="nonfinite: expected 'stop' or 'skip', got the text 'no'"):
        experiment(1, nonfinite="no")
