"""Targets that are numbers to be met: there is a loss, and no share of wrong answers."""

import json

import numpy as np
import pytest

import neondist as nd
from neondist.bench.schemes import bench_schemes
from neondist.comm import SingleTransport, loopback
from neondist.errors import ConfigError
from neondist.train import ProgressBar, evaluate_checkpoint
from neondist.train.state import format_results


class Smooth(nd.Synthetic):
    """The target of each cell is the image itself, weakened."""

    def load(self, grid):
        splits = super().load(grid)
        images = [split.images(range(len(split)), "float64") for split in splits]
        return tuple(nd.Split(x, 0.5 * x, scale=1.0) for x in images)


def experiment(metrics=()):
    layers = [nd.ConvLayerDist(3, 3, padding=1), nd.ConvLayerDist(2, 1)]
    model = nd.ConvnetDist(layers, cost=nd.SumSquared(), optimizer=nd.SGD(0.01), dtype="float64", backend="numpy")
    return nd.FitExperiment(Smooth((7, 6, 2), classes=2, train=8, test=3), model, batch_size=4, metrics=metrics)


def test_there_is_no_error(tmp_path, capsys):
    def body(world):
        made = experiment()
        made.run(made.open_grid(world), output=tmp_path, hooks=[ProgressBar()])
        return evaluate_checkpoint(experiment([nd.TopK(2)]), tmp_path / "checkpoint.h5", made.open_grid(world))

    found = loopback.run(2, body)[0]
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert record["test_error"] is None
    loss = pytest.approx(record["test_loss"])
    assert found == {"split": "test", "samples": 3, "loss": loss, "error": None, "top2_error": None}
    out = capsys.readouterr().out
    assert "test loss" in out
    assert "error" not in out
    assert not (tmp_path / "curves.png").exists() or _wide(tmp_path / "curves.png") < 700  # one panel


def _wide(path):
    return int.from_bytes(path.read_bytes()[16:20], "big")


def test_schemes_are_not_compared_by_it(tmp_path):
    describe_object = type("Described", (), {"scheme": "halo", "seed": 1})
    with pytest.raises(ConfigError, match="no classes"):
        bench_schemes(SingleTransport(), tmp_path, [(describe_object, experiment)])


def test_one_hot_targets_have_one():
    class Hot(nd.Synthetic):
        def load(self, grid):
            return tuple(
                nd.Split(s.images(range(len(s))), np.eye(self.classes)[s.labels], scale=1.0) for s in super().load(grid)
            )

    def fresh(data):
        model = nd.MLP([nd.FCLayer(3)], cost=nd.SumSquared(), optimizer=nd.SGD(0.01), dtype="float64", backend="numpy")
        return nd.FitExperiment(data((5, 4, 1), classes=3, train=8, test=9), model, batch_size=4, dist_flag=False)

    records = [fresh(data).run(hooks=[]).history[-1] for data in (Hot, nd.Synthetic)]
    assert records[0]["test_error"] == records[1]["test_error"] > 0


def test_what_is_not_finite_is_told_as_null():
    found = format_results(2, {"loss": float("nan"), "misclassification": 0.5, "iou": [1.0, float("inf")]})
    assert found == {"samples": 2, "loss": None, "error": 0.5, "iou": [1.0, None]}
