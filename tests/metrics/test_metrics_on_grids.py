"""Metrics against scikit-learn's and scikit-image's on the whole, on every grid, with uneven batches."""

import json

import numpy as np
import pytest

import neondist as nd
from neondist.comm import loopback
from neondist.errors import ConfigError, ShapeError
from neondist.metrics import roc
from neondist.train import evaluate

GRIDS = [(1, 1, None), (2, 2, None), (3, 1, None), (4, 2, None), (5, 1, None), (6, 3, None), (6, 1, 6)]
VOID = 9


class Given(nd.Synthetic):
    """A test split of images that are the scores of the model, with targets for each cell or image."""

    def __init__(self, y, targets):
        super().__init__(y.shape[1:], classes=2, train=1, test=len(y))
        self.y, self.given = y, targets

    def load(self, grid):
        box = (slice(None), *grid.tile_box(self.y.shape[1:-1]).slices)
        maps = self.given.shape[1 : self.y.ndim - 1] == self.y.shape[1:-1]
        found = nd.Split(self.y[box], self.given[box] if maps else self.given, scale=1.0)
        return found, found


def model_of(channels, vectors, cost=None):
    layers = [nd.ActivationLayerDist(nd.Identity())] if not vectors else [nd.GlobalAvgPoolingLayerDist()]
    return nd.ConvnetDist(layers, cost=cost or nd.MSE(), dtype="float64", backend="numpy")


def measured(y, targets, metrics, grid=None, batch=4, vectors=False, cost=None):
    data, grid = Given(y, targets), grid or nd.ProcessGrid.serial()
    data.open(grid)
    model = model_of(y.shape[-1], vectors, cost)
    model.build(y.shape[1:], batch, grid)
    return evaluate(model, data.test, batch, metrics)


def on_all_grids(y, targets, metrics, grids=GRIDS, **how):
    """The same numbers on all ranks of all grids."""
    whole = measured(y, targets, metrics, **how)
    whole.pop("loss")
    for ranks, replicas, rows in grids:

        def job(comm, replicas=replicas, rows=rows):
            return measured(y, targets, metrics, nd.ProcessGrid(comm, replicas=replicas, rows=rows), **how)

        for found in loopback.run(ranks, job):
            for name, value in whole.items():
                np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=0)
    return whole


def labelled(shape, classes, seed=0, levels=None):
    rng = np.random.default_rng(seed)
    y = rng.normal(size=(*shape, classes)) if levels is None else rng.integers(0, levels, (*shape, classes)) * 0.5
    return y, rng.integers(0, classes, shape)


def test_classes_as_scikit_learn():
    sk = pytest.importorskip("sklearn.metrics")
    y, labels = labelled((5, 7, 6), 20)
    y[..., 3] -= 1.5
    labels = labels.astype("u1")  # as masks are, in which no product of two classes fits
    labels[labels == 1] = 2  # class 1 is only said
    metrics = [nd.Accuracy(), nd.ConfusionMatrix()]
    metrics += [cls(average) for cls in (nd.IoU, nd.F1, nd.Precision, nd.Recall) for average in ("macro", "micro")]
    found = on_all_grids(y, labels, metrics)
    true, said = labels.ravel(), y.argmax(-1).ravel()
    assert found["accuracy"] == pytest.approx(sk.accuracy_score(true, said), rel=1e-12)
    assert found["confusion_matrix"] == sk.confusion_matrix(true, said, labels=range(20)).tolist()
    theirs = {"iou": sk.jaccard_score, "f1": sk.f1_score, "precision": sk.precision_score, "recall": sk.recall_score}
    for name, score in theirs.items():
        how = {"zero_division": 0}
        assert found[name] == pytest.approx(score(true, said, average="macro", **how), rel=1e-12)
        assert found[f"{name}_micro"] == pytest.approx(score(true, said, average="micro", **how), rel=1e-12)
        np.testing.assert_allclose(found[f"{name}_per_class"], score(true, said, average=None, **how), rtol=1e-12)


def test_a_class_that_is_nowhere_has_no_score_and_ignored_cells_do_not_count():
    sk = pytest.importorskip("sklearn.metrics")
    y, labels = labelled((4, 7, 6), 4, seed=1)
    y[..., 2] = -9
    labels[labels == 2] = VOID
    metrics = [nd.IoU(), nd.Accuracy(), nd.Misclassification(), nd.LogLoss(), nd.ROCAUC()]
    found = on_all_grids(y, labels, metrics, cost=nd.CrossEntropy(ignore_index=VOID))
    keep = labels != VOID
    true, said = labels[keep], y.argmax(-1)[keep]
    assert np.isnan(found["iou_per_class"][2])
    assert found["iou"] == pytest.approx(sk.jaccard_score(true, said, average="macro"), rel=1e-12)
    assert found["accuracy"] == pytest.approx(1 - found["misclassification"]) == pytest.approx(np.mean(true == said))
    assert np.isnan(found["roc_auc_per_class"][2])
    nothing = measured(y, np.full_like(labels, VOID), metrics, cost=nd.CrossEntropy(ignore_index=VOID))
    assert np.isnan(nothing["loss"])
    assert np.isnan(nothing["iou"])
    assert np.isnan(nothing["roc_auc"])


@pytest.mark.parametrize("vectors", [False, True], ids=["maps", "vectors"])
@pytest.mark.parametrize("levels", [None, 4], ids=["distinct", "ties"])
def test_roc_auc_as_scikit_learn(vectors, levels):
    sk = pytest.importorskip("sklearn.metrics")
    y, labels = labelled((13, 1, 1) if vectors else (5, 7, 6), 3, 2, levels)
    targets = labels[:, 0, 0] if vectors else labels
    grids = [grid for grid in GRIDS if not vectors or grid[0] == grid[1]]
    if vectors:
        y, grids = np.repeat(y, 4, axis=1), GRIDS[:5]
    p = np.exp(y - y.max(-1, keepdims=True))
    p = (p / p.sum(-1, keepdims=True)) if not vectors else (p / p.sum(-1, keepdims=True))[:, 0, 0]
    found = on_all_grids(y, targets, [nd.ROCAUC()], grids, vectors=vectors)
    p = np.round(p, 12)  # the sum in a softmax depends on the order of the classes
    areas = [sk.roc_auc_score(targets.ravel() == c, p.reshape(-1, 3)[:, c]) for c in range(3)]
    np.testing.assert_allclose(found["roc_auc_per_class"], areas, rtol=1e-9)
    assert found["roc_auc"] == pytest.approx(np.mean(areas), rel=1e-9)


def test_one_output_is_two_classes():
    sk = pytest.importorskip("sklearn.metrics")
    y, labels = labelled((5, 7, 6), 2, 3, levels=9)
    score, y = y[..., 1] - y[..., 0], y[..., 1:] - y[..., :1]
    metrics = [nd.ROCAUC(), nd.Misclassification(), nd.F1(), nd.LogLoss(), nd.TopK(1)]
    found = on_all_grids(y, labels, metrics, cost=nd.BCE())
    true = labels.ravel()
    assert found["roc_auc"] == pytest.approx(sk.roc_auc_score(true, score.ravel()), rel=1e-12)
    assert found["f1_per_class"] == pytest.approx(list(sk.f1_score(true, score.ravel() > 0, average=None)))
    assert found["misclassification"] == found["top1_error"] == np.mean((score > 0) != labels)
    assert found["log_loss"] == pytest.approx(sk.log_loss(true, 1 / (1 + np.exp(-score.ravel()))), rel=1e-12)
    coarse = measured(y, labels, [nd.ROCAUC(bins=1000)])["roc_auc"]
    assert coarse == pytest.approx(found["roc_auc"], abs=2e-3)
    assert np.isnan(measured(y, labels + 0.5, metrics)["roc_auc"])


def test_too_many_scores_are_refused_by_all_ranks(monkeypatch):
    monkeypatch.setattr(roc, "MOST", 30)
    y, labels = labelled((4, 6, 5), 2)

    def job(comm):
        with pytest.raises(nd.UserError, match=r"more than 30 distinct scores.*bins: 65536"):
            measured(y, labels, [nd.ROCAUC()], nd.ProcessGrid(comm))
        return measured(y, labels, [nd.ROCAUC(bins=20)], nd.ProcessGrid(comm))["roc_auc"]

    assert len(set(loopback.run(3, job))) == 1


@pytest.mark.parametrize(
    ("shape", "channels"),
    [((13, 15), 1), ((12, 11), 3), ((40,), 2), ((11, 12, 13), 1)],
    ids=["grey", "colour", "1-D", "3-D"],
)
def test_images_as_scikit_image(shape, channels):
    sk = pytest.importorskip("skimage.metrics")
    rng = np.random.default_rng(0)
    y = rng.random((5, *shape, channels))
    t = np.clip(y + rng.normal(scale=0.2, size=y.shape), 0, 1)
    metrics = [nd.PSNR(0.8), nd.SSIM(0.8)]
    found = on_all_grids(y, t, metrics)
    psnr = [sk.peak_signal_noise_ratio(a, b, data_range=0.8) for a, b in zip(t, y, strict=True)]
    assert found["psnr"] == pytest.approx(np.mean(psnr), rel=1e-12)
    ssim = [sk.structural_similarity(a, b, data_range=0.8, channel_axis=-1) for a, b in zip(t, y, strict=True)]
    assert found["ssim"] == pytest.approx(np.mean(ssim), rel=1e-9)
    gauss = [
        sk.structural_similarity(
            a, b, data_range=0.8, channel_axis=-1, gaussian_weights=True, use_sample_covariance=False
        )
        for a, b in zip(t, y, strict=True)
    ]
    whole = measured(y, t, [nd.SSIM(0.8, weights="gaussian")])["ssim"]
    assert whole == pytest.approx(np.mean(gauss), rel=1e-9)
    alone = nd.SSIM(0.8).measure(y, t)
    assert alone[0] / alone[1] == pytest.approx(found["ssim"], rel=1e-12)
    if channels == 1:
        assert nd.PSNR(0.8).measure(y, t[..., 0]) == pytest.approx(nd.PSNR(0.8).measure(y, t))


def test_gaussian_windows_reach_over_tiles():
    y = np.random.default_rng(0).random((5, 17, 14, 2))
    on_all_grids(y, y[::-1].copy(), [nd.SSIM(weights="gaussian"), nd.PSNR()])


def test_where_there_are_no_images():
    assert np.isnan(nd.PSNR().measure(np.zeros((2, 8, 8, 3)), np.zeros((2, 8, 8), int))[0])
    with pytest.raises(ShapeError, match="SSIM compares images"):
        nd.SSIM().check_outputs((10,))
    with pytest.raises(ShapeError, match="windows of 7 cells, but outputs are 9 x 6"):
        nd.SSIM().check_outputs((9, 6, 1))
    with pytest.raises(ConfigError, match="bins: expected an integer of at least 1"):
        nd.ROCAUC(bins=0)
    with pytest.raises(ConfigError, match="average"):
        nd.IoU("weighted")


def test_they_are_written_and_shown(tmp_path, capsys):
    y, labels = labelled((6, 8, 7), 3)

    def job(comm):
        model = nd.ConvnetDist([nd.ConvLayerDist(3, 1)], dtype="float64", backend="numpy")
        metrics = [nd.IoU(), nd.ConfusionMatrix(), nd.ROCAUC()]
        made = nd.FitExperiment(Given(y, labels), model, batch_size=4, epochs=2, metrics=metrics)
        made.run(made.open_grid(comm), output=tmp_path)
        made = nd.FitExperiment(Given(y, labels), model, batch_size=4, epochs=3, metrics=metrics)
        return made.run(made.open_grid(comm), output=tmp_path, resume=True).history

    history = loopback.run(2, job)[0]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == len(history) == 3
    assert np.sum(lines[-1]["confusion_matrix"]) == labels.size
    assert len(lines[-1]["iou_per_class"]) == len(lines[-1]["roc_auc_per_class"]) == 3
    assert f"iou {lines[-1]['iou']:.3f}" in capsys.readouterr().out
