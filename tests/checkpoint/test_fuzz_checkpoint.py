"""Damaged checkpoints: every command that reads one refuses it in one message."""

import numpy as np
import pytest
from fuzz import check_outcomes, damaged, survive, typed

EXPERIMENT = """
!FitExperiment
backend: numpy
dataset: !Synthetic {shape: [6, 5, 2], classes: 3, train: 6, test: 3}
model: !ConvnetDist
  layers: [!ConvLayerDist {out_channels: 2, kernel_size: 3}, !FCLayerDist {out_features: 3}]
batch_size: 4
"""


@pytest.mark.long
def test_damaged_checkpoints(tmp_path):
    file, out, bad = tmp_path / "x.yaml", tmp_path / "out", tmp_path / "moved" / "checkpoint.h5"
    file.write_text(EXPERIMENT)
    assert typed("run", file, "--output", out) == "fine"
    np.save(tmp_path / "x.npy", np.ones((1, 6, 5, 2)))
    bad.parent.mkdir()
    images = "--input", tmp_path / "x.npy", "--output", tmp_path / "y.npy"
    commands = [
        ("run", file, "--output", bad.parent, "--resume"),
        ("run", file, "--output", tmp_path / "other", "--init-from", bad),
        ("evaluate", file, "--checkpoint", bad),
        ("predict", file, "--checkpoint", bad, *images),
    ]

    def attempt(case):
        number, content = case
        bad.write_bytes(content)
        return typed(*commands[number % 4])

    good = (out / "checkpoint.h5").read_bytes()
    outcomes = survive(enumerate(damaged(good, 100)), attempt)
    check_outcomes(outcomes, 90)
