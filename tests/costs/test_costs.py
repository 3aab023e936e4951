"""Costs against PyTorch, finite differences and hand-computed values."""

import math

import numpy as np
import pytest

from neondist.costs import CrossEntropy, SumSquared
from neondist.errors import DataError, ShapeError

SHAPES = [(5, 7), (1, 2), (3, 4, 5, 6), (2, 3, 4), (2, 3, 2, 2, 4)]


def draw_scores(shape, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(scale=3, size=shape), rng.integers(0, shape[-1], shape[:-1])


def draw_probabilities(shape, seed=1):
    p = np.random.default_rng(seed).random(shape)
    return p / p.sum(axis=-1, keepdims=True)


def compute_torch_cross_entropy(y, targets):
    torch = pytest.importorskip("torch")
    classes_first = torch.from_numpy(np.moveaxis(y, -1, 1).copy()).requires_grad_()
    t = torch.from_numpy(np.moveaxis(targets, -1, 1).copy() if targets.ndim == y.ndim else targets)
    loss = torch.nn.functional.cross_entropy(classes_first, t)
    loss.backward()
    return loss.item(), np.moveaxis(classes_first.grad.numpy(), 1, -1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dense", [False, True], ids=["labels", "probabilities"])
def test_cross_entropy_matches_torch(shape, dense):
    y, labels = draw_scores(shape)
    targets = draw_probabilities(shape) if dense else labels
    loss, gradient = compute_torch_cross_entropy(y, targets)
    cost = CrossEntropy()
    terms = shape[0] * cost.denominator_per_sample(shape[1:])
    assert cost.local_sum(y, targets) / terms == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(cost.local_sum_gradient(y, targets) / terms, gradient, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("cost", [CrossEntropy(), SumSquared()])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dense", [False, True], ids=["labels", "values"])
def test_gradient_matches_finite_differences(cost, shape, dense):
    y, labels = draw_scores(shape)
    targets = draw_probabilities(shape) * 1.7 if dense else labels  # includes rows that do not sum to 1
    direction = np.random.default_rng(2).normal(size=shape)
    step = 1e-5
    slope = (cost.local_sum(y + step * direction, targets) - cost.local_sum(y - step * direction, targets)) / (2 * step)
    assert slope == pytest.approx(float((cost.local_sum_gradient(y, targets) * direction).sum()), rel=1e-7)


@pytest.mark.parametrize("cost", [CrossEntropy(), SumSquared()])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_labels_equal_one_hot_vectors(cost, dtype):
    y, labels = draw_scores((4, 3, 5))
    y = y.astype(dtype)
    original, one_hot = y.copy(), np.eye(5, dtype=dtype)[labels]
    assert cost.local_sum(y, labels) == pytest.approx(cost.local_sum(y, one_hot), rel=1e-6)
    by_label, by_one_hot = (cost.local_sum_gradient(y, targets) for targets in (labels, one_hot))
    np.testing.assert_allclose(by_label, by_one_hot, rtol=1e-5, atol=1e-6)
    assert by_label.dtype == by_one_hot.dtype == dtype
    # float64 targets do not change the outputs' dtype
    assert cost.local_sum_gradient(y, np.eye(5)[labels]).dtype == dtype
    np.testing.assert_array_equal(y, original)


@pytest.mark.parametrize("cost", [CrossEntropy(), SumSquared()])
def test_sums_are_additive_over_parts(cost):
    y, labels = draw_scores((6, 4, 5, 3))
    parts = [(slice(0, 6), slice(0, 1)), (slice(0, 6), slice(1, 4)), (slice(0, 6), slice(4, 4))]
    assert sum(cost.local_sum(y[p], labels[p]) for p in parts) == pytest.approx(cost.local_sum(y, labels), rel=1e-12)
    joined = np.concatenate([cost.local_sum_gradient(y[p], labels[p]) for p in parts], axis=1)
    np.testing.assert_allclose(joined, cost.local_sum_gradient(y, labels), rtol=1e-13)


@pytest.mark.parametrize("cost", [CrossEntropy(), SumSquared()])
@pytest.mark.parametrize("shape", [(0, 4), (3, 0, 2, 4), (0, 0, 4)])
def test_empty_arrays(cost, shape):
    y = np.zeros(shape, np.float32)
    for targets in (np.zeros(shape[:-1], np.int64), y):
        assert cost.local_sum(y, targets) == 0
        assert cost.local_sum_gradient(y, targets).shape == shape


def test_cross_entropy_is_stable():
    y = np.array([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]])
    assert CrossEntropy().local_sum(y, np.array([0, 1])) == pytest.approx(math.log(3))
    assert CrossEntropy().local_sum(y, np.array([1, 1])) == pytest.approx(2e4 + math.log(3))
    assert np.isfinite(CrossEntropy().local_sum_gradient(y, np.array([1, 1]))).all()


def test_cells():
    assert CrossEntropy().denominator_per_sample((10,)) == 1
    assert CrossEntropy().denominator_per_sample((6, 4, 10)) == 24
    assert SumSquared().denominator_per_sample((6, 4, 10)) == 1


def test_sum_squared_by_hand():
    assert SumSquared().local_sum(np.array([[1.0, 2.0]]), np.array([[3.0, 5.0]])) == 6.5


@pytest.mark.parametrize("cost", [CrossEntropy(), SumSquared()])
@pytest.mark.parametrize("label", [-1, 3, 255])
def test_label_out_of_range(cost, label):
    with pytest.raises(DataError, match=rf"label {label} .*3 classes"):
        cost.local_sum(np.zeros((2, 3)), np.array([0, label]))
    with pytest.raises(DataError, match=rf"label {label} .*3 classes"):
        cost.local_sum_gradient(np.zeros((2, 3)), np.array([0, label]))


def test_shape_and_dtype_of_targets():
    with pytest.raises(ShapeError, match="FC or a global pooling"):
        CrossEntropy().local_sum(np.zeros((2, 4, 4, 3)), np.zeros(2, int))
    with pytest.raises(DataError, match="integers"):
        CrossEntropy().local_sum(np.zeros((2, 3)), np.zeros(2))


def test_check_rejects_too_few_outputs():
    CrossEntropy().check_output_shape((10,), 10)
    CrossEntropy().check_output_shape((7,), None)
    with pytest.raises(ShapeError, match=r"7 outputs.*10 classes"):
        CrossEntropy().check_output_shape((7,), 10)
