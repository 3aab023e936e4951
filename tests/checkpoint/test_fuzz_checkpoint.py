"""Damaged checkpoints: rejected with one message by every command that reads checkpoints."""

import numpy as np
import pytest
from fuzz import check_outcomes, classify_command, damage_copies, run_isolated

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
    config, out, checkpoint = tmp_path / "x.yaml", tmp_path / "out", tmp_path / "moved" / "checkpoint.h5"
    config.write_text(EXPERIMENT)
    assert classify_command("run", config, "--output", out) == "fine"
    np.save(tmp_path / "x.npy", np.ones((1, 6, 5, 2)))
    checkpoint.parent.mkdir()
    images = "--input", tmp_path / "x.npy", "--output", tmp_path / "y.npy"
    commands = [
        ("run", config, "--output", checkpoint.parent, "--resume"),
        ("run", config, "--output", tmp_path / "other", "--init-from", checkpoint),
        ("evaluate", config, "--checkpoint", checkpoint),
        ("predict", config, "--checkpoint", checkpoint, *images),
    ]

    def attempt(case):
        number, content = case
        checkpoint.write_bytes(content)
        return classify_command(*commands[number % 4])

    content = (out / "checkpoint.h5").read_bytes()
    outcomes = run_isolated(enumerate(damage_copies(content, 100)), attempt)
    check_outcomes(outcomes, 90)
