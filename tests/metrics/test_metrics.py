"""Metrics against direct definitions, additivity over parts, and empty arrays."""

import numpy as np
import pytest

from neondist.costs import CrossEntropy
from neondist.errors import ConfigError, DataError
from neondist.metrics import LogLoss, Misclassification, TopK

ALL_METRICS = [Misclassification(), TopK(1), TopK(3), LogLoss()]


def draw_scores_and_labels(shape, seed=0, levels=5):
    rng = np.random.default_rng(seed)
    return rng.integers(0, levels, shape).astype(float), rng.integers(0, shape[-1], shape[:-1])  # with ties


@pytest.mark.parametrize("shape", [(40, 6), (3, 5, 4, 6), (2, 3, 6)])
@pytest.mark.parametrize("k", [1, 2, 6])
def test_topk_is_the_first_k_of_a_stable_sort(shape, k):
    y, labels = draw_scores_and_labels(shape)
    guesses = np.argsort(-y, axis=-1, kind="stable")[..., :k]
    misses = ~(guesses == labels[..., None]).any(axis=-1)
    assert TopK(k).local_sums(y, labels) == (misses.sum(), misses.size)


@pytest.mark.parametrize("shape", [(40, 6), (3, 5, 4, 6)])
def test_misclassification_equals_top1_error(shape):
    y, labels = draw_scores_and_labels(shape)
    assert Misclassification().local_sums(y, labels) == TopK(1).local_sums(y, labels)
    assert Misclassification().local_sums(y, y.argmax(-1)) == (0.0, y[..., 0].size)


@pytest.mark.parametrize("metric", [Misclassification(), TopK(2)])
@pytest.mark.parametrize("shape", [(40, 6), (3, 5, 4, 6)])
def test_regression_targets_give_nan(metric, shape):
    """One-hot vectors and probabilities denote classes; other values do not."""
    y, labels = draw_scores_and_labels(shape)
    one_hot = np.eye(shape[-1])[labels]
    expected = metric.local_sums(y, labels)
    for dense in (one_hot, one_hot.astype("float32") * 0.9 + np.float32(0.1 / shape[-1]), one_hot.astype("uint8")):
        assert metric.local_sums(y, dense) == expected
    for numbers in (y, one_hot * 2, one_hot - 0.5, np.zeros(shape)):
        total, count = metric.local_sums(y, numbers)
        assert np.isnan(total)
        assert count == expected[1]
    assert metric.local_sums(y[:0], y[:0]) == (0, 0)
    assert np.isnan(metric.local_sums(y[..., :1], y[..., :1] + 0.5)[0])  # a single output would never be wrong


def test_log_loss_is_the_mean_cross_entropy():
    y, labels = draw_scores_and_labels((4, 5, 6))
    total, count = LogLoss().local_sums(y, labels)
    assert count == 20
    assert total == CrossEntropy().local_sum(y, labels)
    flat = y - np.log(np.exp(y).sum(-1, keepdims=True))
    assert total == pytest.approx(-np.take_along_axis(flat, labels[..., None], -1).sum(), rel=1e-12)


@pytest.mark.parametrize("metric", ALL_METRICS)
def test_sums_are_additive_and_accept_one_hot_targets(metric):
    y, labels = draw_scores_and_labels((6, 4, 5))
    parts = [slice(0, 0), slice(0, 1), slice(1, 6)]
    sums = np.array([metric.local_sums(y[p], labels[p]) for p in parts]).sum(axis=0)
    np.testing.assert_allclose(sums, metric.local_sums(y, labels), rtol=1e-13)
    np.testing.assert_allclose(metric.local_sums(y, np.eye(5)[labels]), metric.local_sums(y, labels), rtol=1e-13)


@pytest.mark.parametrize("metric", ALL_METRICS)
@pytest.mark.parametrize("shape", [(0, 4), (3, 0, 2, 4)])
def test_empty_arrays(metric, shape):
    assert metric.local_sums(np.zeros(shape), np.zeros(shape[:-1], int)) == (0.0, 0)


def test_nan_outputs_count_as_errors():
    assert TopK(2).local_sums(np.full((3, 4), np.nan), np.array([0, 1, 2])) == (3.0, 3)


def test_values_out_of_range():
    with pytest.raises(ConfigError, match=r"^TopK: k: expected an integer of at least 1, got 0"):
        TopK(0)
    with pytest.raises(ConfigError, match=r"^k: 5 .* 3 classes"):
        TopK(5).check_class_count(3)
    TopK(5).check_class_count(None)
    with pytest.raises(DataError, match="label 9"):
        Misclassification().local_sums(np.zeros((1, 3)), np.array([9]))


def test_names():
    assert [m.name for m in ALL_METRICS] == ["misclassification", "top1_error", "top3_error", "log_loss"]
