"""Regression targets: runs report a loss, but no error rate."""

import json

import numpy as np
import pytest

import neondist as nd
from neondist.bench.schemes import bench_schemes
from neondist.comm import SingleTransport, loopback
from neondist.errors import ConfigError
from neondist.train import ProgressBar, evaluate_checkpoint
from neondist.train.state import format_evaluation_results


class SmoothRegressionData(nd.Synthetic):
    """Data set whose target is the image scaled by 0.5."""

    def open_splits(self, grid):
        splits = super().open_splits(grid)
        images = [split.images(range(len(split)), "float64") for split in splits]
        return tuple(nd.Split(x, 0.5 * x, scale=1.0) for x in images)


def make_experiment(metrics=()):
    layers = [nd.ConvLayerDist(3, 3, padding=1), nd.ConvLayerDist(2, 1)]
    model = nd.ConvnetDist(layers, cost=nd.SumSquared(), optimizer=nd.SGD(0.01), dtype="float64", backend="numpy")
    return nd.FitExperiment(
        SmoothRegressionData((7, 6, 2), classes=2, train=8, test=3), model, batch_size=4, metrics=metrics
    )


def test_regression_has_no_error_rate(tmp_path, capsys):
    def body(world):
        experiment = make_experiment()
        experiment.run(experiment.open_grid(world), output=tmp_path, hooks=[ProgressBar()])
        return evaluate_checkpoint(
            make_experiment([nd.TopK(2)]), tmp_path / "checkpoint.h5", experiment.open_grid(world)
        )

    results = loopback.run(2, body)[0]
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert record["test_error"] is None
    loss = pytest.approx(record["test_loss"])
    assert results == {"split": "test", "samples": 3, "loss": loss, "error": None, "top2_error": None}
    out = capsys.readouterr().out
    assert "test loss" in out
    assert "error" not in out
    assert not (tmp_path / "curves.png").exists() or _read_png_width(tmp_path / "curves.png") < 700  # one panel


def _read_png_width(path):
    return int.from_bytes(path.read_bytes()[16:20], "big")


def test_scheme_benchmark_requires_classes(tmp_path):
    describe_object = type("Described", (), {"scheme": "halo", "seed": 1})
    with pytest.raises(ConfigError, match="errors of a validation or test split, but the experiment has none"):
        bench_schemes(SingleTransport(), tmp_path, [(describe_object, make_experiment)])


def test_one_hot_targets_have_an_error_rate():
    class OneHot(nd.Synthetic):
        def open_splits(self, grid):
            return tuple(
                nd.Split(s.images(range(len(s))), np.eye(self.classes)[s.labels], scale=1.0)
                for s in super().open_splits(grid)
            )

    def make_mlp_experiment(data):
        model = nd.MLP([nd.FCLayer(3)], cost=nd.SumSquared(), optimizer=nd.SGD(0.01), dtype="float64", backend="numpy")
        return nd.FitExperiment(data((5, 4, 1), classes=3, train=8, test=9), model, batch_size=4, dist_flag=False)

    records = [make_mlp_experiment(data).run(hooks=[]).history[-1] for data in (OneHot, nd.Synthetic)]
    assert records[0]["test_error"] == records[1]["test_error"] > 0


def test_non_finite_values_become_null():
    results = format_evaluation_results(2, {"loss": float("nan"), "misclassification": 0.5, "iou": [1.0, float("inf")]})
    assert results == {"samples": 2, "loss": None, "error": 0.5, "iou": [1.0, None]}
