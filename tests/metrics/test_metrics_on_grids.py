"""Metrics against scikit-learn and scikit-image, on every grid and with uneven batches."""

import json

import numpy as np
import pytest

import neondist as nd
from neondist.comm import loopback
from neondist.errors import ConfigError, ShapeError
from neondist.metrics import roc
from neondist.train import evaluate

GRIDS = [(1, 1, None), (2, 2, None), (3, 1, None), (4, 2, None), (5, 1, None), (6, 3, None), (6, 1, 6)]
IGNORED_LABEL = 9


class FixedScores(nd.Synthetic):
    """Test split whose images are the scores of the model, with targets for each cell or image."""

    def __init__(self, y, targets):
        super().__init__(y.shape[1:], classes=2, train=1, test=len(y))
        self.y, self.targets = y, targets

    def open_splits(self, grid):
        box = (slice(None), *grid.tile_box(self.y.shape[1:-1]).slices)
        maps = self.targets.shape[1 : self.y.ndim - 1] == self.y.shape[1:-1]
        split = nd.Split(self.y[box], self.targets[box] if maps else self.targets, scale=1.0)
        return split, split


def make_model(channels, vectors, cost=None):
    layers = [nd.ActivationLayerDist(nd.Identity())] if not vectors else [nd.GlobalAvgPoolingLayerDist()]
    return nd.ConvnetDist(layers, cost=cost or nd.MSE(), dtype="float64", backend="numpy")


def evaluate_scores(y, targets, metrics, grid=None, batch=4, vectors=False, cost=None):
    data, grid = FixedScores(y, targets), grid or nd.ProcessGrid.serial()
    data.open(grid)
    model = make_model(y.shape[-1], vectors, cost)
    model.build(y.shape[1:], batch, grid)
    return evaluate(model, data.test, batch, metrics)


def check_on_all_grids(y, targets, metrics, grids=GRIDS, **options):
    """Check that all ranks of all grids have the same metrics, and return them."""
    serial = evaluate_scores(y, targets, metrics, **options)
    serial.pop("loss")
    for ranks, replicas, rows in grids:

        def job(comm, replicas=replicas, rows=rows):
            return evaluate_scores(y, targets, metrics, nd.ProcessGrid(comm, replicas=replicas, rows=rows), **options)

        for actual in loopback.run(ranks, job):
            for name, value in serial.items():
                np.testing.assert_allclose(actual[name], value, rtol=1e-9, atol=0)
    return serial


def draw_scores(shape, classes, seed=0, levels=None):
    rng = np.random.default_rng(seed)
    y = rng.normal(size=(*shape, classes)) if levels is None else rng.integers(0, levels, (*shape, classes)) * 0.5
    return y, rng.integers(0, classes, shape)


def test_class_metrics_match_scikit_learn():
    sk = pytest.importorskip("sklearn.metrics")
    y, labels = draw_scores((5, 7, 6), 20)
    y[..., 3] -= 1.5
    labels = labels.astype("u1")  # dtype of masks, in which products of classes overflow
    labels[labels == 1] = 2  # class 1 occurs only in predictions
    metrics = [nd.Accuracy(), nd.ConfusionMatrix()]
    metrics += [cls(average) for cls in (nd.IoU, nd.F1, nd.Precision, nd.Recall) for average in ("macro", "micro")]
    values = check_on_all_grids(y, labels, metrics)
    true, predicted = labels.ravel(), y.argmax(-1).ravel()
    assert values["accuracy"] == pytest.approx(sk.accuracy_score(true, predicted), rel=1e-12)
    assert values["confusion_matrix"] == sk.confusion_matrix(true, predicted, labels=range(20)).tolist()
    references = {
        "iou": sk.jaccard_score,
        "f1": sk.f1_score,
        "precision": sk.precision_score,
        "recall": sk.recall_score,
    }
    for name, score in references.items():
        options = {"zero_division": 0}
        assert values[name] == pytest.approx(score(true, predicted, average="macro", **options), rel=1e-12)
        assert values[f"{name}_micro"] == pytest.approx(score(true, predicted, average="micro", **options), rel=1e-12)
        np.testing.assert_allclose(
            values[f"{name}_per_class"], score(true, predicted, average=None, **options), rtol=1e-12
        )


def test_absent_classes_and_ignored_cells():
    sk = pytest.importorskip("sklearn.metrics")
    y, labels = draw_scores((4, 7, 6), 4, seed=1)
    y[..., 2] = -9
    labels[labels == 2] = IGNORED_LABEL
    metrics = [nd.IoU(), nd.Accuracy(), nd.Misclassification(), nd.LogLoss(), nd.ROCAUC()]
    values = check_on_all_grids(y, labels, metrics, cost=nd.CrossEntropy(ignore_index=IGNORED_LABEL))
    keep = labels != IGNORED_LABEL
    true, predicted = labels[keep], y.argmax(-1)[keep]
    assert np.isnan(values["iou_per_class"][2])
    assert values["iou"] == pytest.approx(sk.jaccard_score(true, predicted, average="macro"), rel=1e-12)
    assert (
        values["accuracy"]
        == pytest.approx(1 - values["misclassification"])
        == pytest.approx(np.mean(true == predicted))
    )
    assert np.isnan(values["roc_auc_per_class"][2])
    ignored = evaluate_scores(
        y, np.full_like(labels, IGNORED_LABEL), metrics, cost=nd.CrossEntropy(ignore_index=IGNORED_LABEL)
    )
    assert np.isnan(ignored["loss"])
    assert np.isnan(ignored["iou"])
    assert np.isnan(ignored["roc_auc"])


@pytest.mark.parametrize("vectors", [False, True], ids=["maps", "vectors"])
@pytest.mark.parametrize("levels", [None, 4], ids=["distinct", "ties"])
def test_roc_auc_matches_scikit_learn(vectors, levels):
    sk = pytest.importorskip("sklearn.metrics")
    y, labels = draw_scores((13, 1, 1) if vectors else (5, 7, 6), 3, 2, levels)
    targets = labels[:, 0, 0] if vectors else labels
    grids = [grid for grid in GRIDS if not vectors or grid[0] == grid[1]]
    if vectors:
        y, grids = np.repeat(y, 4, axis=1), GRIDS[:5]
    p = np.exp(y - y.max(-1, keepdims=True))
    p = (p / p.sum(-1, keepdims=True)) if not vectors else (p / p.sum(-1, keepdims=True))[:, 0, 0]
    values = check_on_all_grids(y, targets, [nd.ROCAUC()], grids, vectors=vectors)
    p = np.round(p, 12)  # the sum in a softmax depends on the order of the classes
    areas = [sk.roc_auc_score(targets.ravel() == c, p.reshape(-1, 3)[:, c]) for c in range(3)]
    np.testing.assert_allclose(values["roc_auc_per_class"], areas, rtol=1e-9)
    assert values["roc_auc"] == pytest.approx(np.mean(areas), rel=1e-9)


def test_single_outputs_are_binary():
    sk = pytest.importorskip("sklearn.metrics")
    y, labels = draw_scores((5, 7, 6), 2, 3, levels=9)
    score, y = y[..., 1] - y[..., 0], y[..., 1:] - y[..., :1]
    metrics = [nd.ROCAUC(), nd.Misclassification(), nd.F1(), nd.LogLoss(), nd.TopK(1)]
    values = check_on_all_grids(y, labels, metrics, cost=nd.BCE())
    true = labels.ravel()
    assert values["roc_auc"] == pytest.approx(sk.roc_auc_score(true, score.ravel()), rel=1e-12)
    assert values["f1_per_class"] == pytest.approx(list(sk.f1_score(true, score.ravel() > 0, average=None)))
    assert values["misclassification"] == values["top1_error"] == np.mean((score > 0) != labels)
    assert values["log_loss"] == pytest.approx(sk.log_loss(true, 1 / (1 + np.exp(-score.ravel()))), rel=1e-12)
    coarse = evaluate_scores(y, labels, [nd.ROCAUC(bins=1000)])["roc_auc"]
    assert coarse == pytest.approx(values["roc_auc"], abs=2e-3)
    assert np.isnan(evaluate_scores(y, labels + 0.5, metrics)["roc_auc"])


def test_metrics_of_numbers_per_image_match_scikit_learn():
    reference = pytest.importorskip("sklearn.metrics", reason="the oracle")
    y, targets = np.random.default_rng(0).normal(size=(2, 11, 3))
    metrics, images = [nd.RMSE(), nd.MeanAbsoluteError(), nd.R2(), nd.Bias()], y[:, None, None]
    results = check_on_all_grids(images, targets, metrics, vectors=True)
    scores = {"rmse": reference.root_mean_squared_error, "mae": reference.mean_absolute_error, "r2": reference.r2_score}
    for name, score in scores.items():
        np.testing.assert_allclose(results[name], score(targets, y, multioutput="raw_values"))
    np.testing.assert_allclose(results["bias"], (y - targets).mean(0))


def test_too_many_scores_are_rejected_on_all_ranks(monkeypatch):
    monkeypatch.setattr(roc, "MAX_DISTINCT_SCORES_PER_CLASS", 30)
    y, labels = draw_scores((4, 6, 5), 2)

    def job(comm):
        with pytest.raises(nd.UserError, match=r"more than 30 distinct scores.*bins: 65536"):
            evaluate_scores(y, labels, [nd.ROCAUC()], nd.ProcessGrid(comm))
        return evaluate_scores(y, labels, [nd.ROCAUC(bins=20)], nd.ProcessGrid(comm))["roc_auc"]

    assert len(set(loopback.run(3, job))) == 1


@pytest.mark.parametrize(
    ("shape", "channels"),
    [((13, 15), 1), ((12, 11), 3), ((40,), 2), ((11, 12, 13), 1)],
    ids=["grey", "colour", "1-D", "3-D"],
)
def test_image_metrics_match_scikit_image(shape, channels):
    sk = pytest.importorskip("skimage.metrics")
    rng = np.random.default_rng(0)
    y = rng.random((5, *shape, channels))
    t = np.clip(y + rng.normal(scale=0.2, size=y.shape), 0, 1)
    metrics = [nd.PSNR(0.8), nd.SSIM(0.8)]
    values = check_on_all_grids(y, t, metrics)
    psnr = [sk.peak_signal_noise_ratio(a, b, data_range=0.8) for a, b in zip(t, y, strict=True)]
    assert values["psnr"] == pytest.approx(np.mean(psnr), rel=1e-12)
    ssim = [sk.structural_similarity(a, b, data_range=0.8, channel_axis=-1) for a, b in zip(t, y, strict=True)]
    assert values["ssim"] == pytest.approx(np.mean(ssim), rel=1e-9)
    gaussian = [
        sk.structural_similarity(
            a, b, data_range=0.8, channel_axis=-1, gaussian_weights=True, use_sample_covariance=False
        )
        for a, b in zip(t, y, strict=True)
    ]
    gaussian_ssim = evaluate_scores(y, t, [nd.SSIM(0.8, weights="gaussian")])["ssim"]
    assert gaussian_ssim == pytest.approx(np.mean(gaussian), rel=1e-9)
    total_and_count = nd.SSIM(0.8).local_sums(y, t)
    assert total_and_count[0] / total_and_count[1] == pytest.approx(values["ssim"], rel=1e-12)
    if channels == 1:
        assert nd.PSNR(0.8).local_sums(y, t[..., 0]) == pytest.approx(nd.PSNR(0.8).local_sums(y, t))


def test_gaussian_windows_across_tiles():
    y = np.random.default_rng(0).random((5, 17, 14, 2))
    check_on_all_grids(y, y[::-1].copy(), [nd.SSIM(weights="gaussian"), nd.PSNR()])


def test_unsuitable_outputs_and_arguments():
    assert np.isnan(nd.PSNR().local_sums(np.zeros((2, 8, 8, 3)), np.zeros((2, 8, 8), int))[0])
    with pytest.raises(ShapeError, match="SSIM compares images"):
        nd.SSIM().check_output_shape((10,))
    with pytest.raises(ShapeError, match="windows of 7 cells, but outputs are 9 x 6"):
        nd.SSIM().check_output_shape((9, 6, 1))
    with pytest.raises(ConfigError, match="bins: expected an integer of at least 1"):
        nd.ROCAUC(bins=0)
    with pytest.raises(ConfigError, match="average"):
        nd.IoU("weighted")


def test_metrics_are_written_and_shown(tmp_path, capsys):
    y, labels = draw_scores((6, 8, 7), 3)

    def job(comm):
        model = nd.ConvnetDist([nd.ConvLayerDist(3, 1)], dtype="float64", backend="numpy")
        metrics = [nd.IoU(), nd.ConfusionMatrix(), nd.ROCAUC()]
        experiment = nd.FitExperiment(FixedScores(y, labels), model, batch_size=4, epochs=2, metrics=metrics)
        experiment.run(experiment.open_grid(comm), output=tmp_path)
        experiment = nd.FitExperiment(FixedScores(y, labels), model, batch_size=4, epochs=3, metrics=metrics)
        return experiment.run(experiment.open_grid(comm), output=tmp_path, resume=True).history

    history = loopback.run(2, job)[0]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == len(history) == 3
    assert np.sum(lines[-1]["confusion_matrix"]) == labels.size
    assert len(lines[-1]["iou_per_class"]) == len(lines[-1]["roc_auc_per_class"]) == 3
    assert f"iou {lines[-1]['iou']:.3f}" in capsys.readouterr().out
