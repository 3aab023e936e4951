"""Graphs in YAML: a residual block and a skip connection, equal on tiles and in one process."""

import pytest

import neondist as nd
from neondist.comm import loopback
from neondist.config import dump, load_experiment
from neondist.errors import ShapeError

EXPERIMENT_YAML = """
!FitExperiment
dist_flag: true
seed: 1
dtype: float64
dataset: !Synthetic {shape: [17, 12, 3], classes: 4, train: 24, test: 8}
model: !ConvnetDist
  layers:
    - !ConvLayerDist {out_channels: 4, kernel_size: 3, padding: 1, activation: !ReLU {}}
    - !Sum
      layers:
        - - !ConvLayerDist {out_channels: 4, kernel_size: 3, padding: 1}
          - !ConvLayerDist {out_channels: 4, kernel_size: 1}
        - []
    - !Concat
      layers:
        - !Sequential {layers: [!AvgPoolingLayerDist {kernel_size: 3, stride: 1, padding: 1}]}
        - []
    - !GlobalAvgPoolingLayerDist {}
    - !FCLayerDist {out_features: 4}
batch_size: 8
epochs: 2
"""


def train_losses(comm=None, **settings):
    overrides = [f"{key}={value}" for key, value in settings.items()]
    experiment = load_experiment("graph.yaml", overrides, text=EXPERIMENT_YAML)
    grid = None if comm is None else nd.ProcessGrid(comm)
    history = experiment.run(grid or nd.ProcessGrid.serial(), hooks=[]).history
    return [record["train_loss"] for record in history]


def test_tiled_graph_matches_one_process():
    expected = train_losses(dist_flag="false")
    assert expected[1] < expected[0]
    for actual in loopback.run(4, train_losses):
        assert actual == pytest.approx(expected, rel=1e-10)


def test_resolved_yaml_round_trip():
    text = dump(load_experiment("graph.yaml", [], text=EXPERIMENT_YAML))
    assert dump(load_experiment("again.yaml", [], text=text)) == text
    assert "cost: !CrossEntropy {class_weights: null" in text


def test_mismatched_branches_are_reported():
    experiment = load_experiment("graph.yaml", ["model.layers.2.layers.0.layers.0.padding=0"], text=EXPERIMENT_YAML)
    with pytest.raises(ShapeError, match=r"layer 2 'concat1'.*\(15, 10, 4\).*\(17, 12, 4\)"):
        experiment.validate(4)
