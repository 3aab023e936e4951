"""Costs with weights, ignored cells and smoothing against PyTorch, and their means over tiles, replicas and batches."""

import numpy as np
import pytest
from common_checks import max_relative_difference
from device import Device

import neondist as nd
from neondist.arrays.namespace import to_host
from neondist.comm import loopback
from neondist.errors import ConfigError, DataError, ShapeError
from neondist.train import evaluate

SHAPES = [(5, 4), (3, 4, 5, 4), (2, 3, 4), (2, 3, 2, 2, 4)]
CLASS_WEIGHTS = [0.5, 2.0, 0.0, 1.25]
IGNORED_LABEL = 255


def draw_scores(shape, ignore=True):
    rng = np.random.default_rng(3)
    labels = rng.integers(0, shape[-1], shape[:-1])
    if ignore:
        labels[rng.random(labels.shape) < 0.3] = IGNORED_LABEL
    return rng.normal(scale=3, size=shape), labels


def compute_with_torch(function, y):
    """Return the value and gradient of a function of a tensor with channels first."""
    torch = pytest.importorskip("torch")
    tensor = torch.from_numpy(np.moveaxis(y, -1, 1).copy()).requires_grad_()
    loss = function(torch, torch.nn.functional, tensor)
    loss.backward()
    return loss.item(), np.moveaxis(tensor.grad.numpy(), 1, -1)


def compute_mean(cost, y, targets):
    """Return the mean and its gradient as computed in training."""
    value, gradient = 0.0, 0.0
    for factor, part in cost.parts:
        divisor = (
            part.local_denominator(y.shape, targets)
            if part.has_weighted_mean
            else len(y) * part.denominator_per_sample(y.shape[1:])
        )
        value += factor * part.local_sum(y, targets) / divisor
        gradient = gradient + factor * part.local_sum_gradient(y, targets) / divisor
    return value, gradient


def compute_focal(torch, f, y, labels):
    log_p = f.log_softmax(y, 1)
    keep = labels != IGNORED_LABEL
    indices = labels.where(keep, torch.zeros(()).long())[:, None]
    log_pt = log_p.gather(1, indices)[:, 0]
    w = torch.tensor(CLASS_WEIGHTS, dtype=y.dtype)[indices[:, 0]] * keep
    return -(w * (1 - log_pt.exp()) ** 1.5 * log_pt).sum() / w.sum()


def compute_dice(torch, f, y, labels):
    keep = (labels != IGNORED_LABEL)[:, None]
    p = y.softmax(1) * keep
    one_hot = f.one_hot(labels.where(keep[:, 0], torch.zeros(()).long()), y.shape[1])
    t = torch.movedim(one_hot, -1, 1) * keep
    cells = tuple(range(2, y.ndim))
    total, overlap = ((p + t).sum(cells), (p * t).sum(cells)) if cells else (p + t, p * t)
    return ((total - 2 * overlap) / (total + 1)).mean(1).mean()


def compute_entropy(f, y, t, **options):
    return f.cross_entropy(y, t, **options)


LABEL_COSTS = {
    "weights": (
        nd.CrossEntropy(class_weights=CLASS_WEIGHTS),
        lambda torch, f, y, t, w: compute_entropy(f, y, t.where(t != IGNORED_LABEL, torch.zeros(()).long()), weight=w),
    ),
    "ignore": (
        nd.SoftmaxCrossEntropy(ignore_index=IGNORED_LABEL),
        lambda o, f, y, t, w: compute_entropy(f, y, t, ignore_index=IGNORED_LABEL),
    ),
    "smoothing": (
        nd.CrossEntropy(ignore_index=IGNORED_LABEL, label_smoothing=0.2),
        lambda o, f, y, t, w: compute_entropy(f, y, t, ignore_index=IGNORED_LABEL, label_smoothing=0.2),
    ),
    "all": (
        nd.CrossEntropy(class_weights=CLASS_WEIGHTS, ignore_index=IGNORED_LABEL, label_smoothing=0.1),
        lambda o, f, y, t, w: compute_entropy(f, y, t, weight=w, ignore_index=IGNORED_LABEL, label_smoothing=0.1),
    ),
    "focal": (
        nd.Focal(1.5, class_weights=CLASS_WEIGHTS, ignore_index=IGNORED_LABEL),
        lambda o, f, y, t, w: compute_focal(o, f, y, t),
    ),
    "dice": (nd.Dice(ignore_index=IGNORED_LABEL), lambda o, f, y, t, w: compute_dice(o, f, y, t)),
    "dice and entropy": (
        nd.DiceCE(
            dice_weight=0.5, ce_weight=2.0, class_weights=CLASS_WEIGHTS, ignore_index=IGNORED_LABEL, label_smoothing=0.1
        ),
        lambda o, f, y, t, w: (
            0.5 * compute_dice(o, f, y, t)
            + 2 * compute_entropy(f, y, t, weight=w, ignore_index=IGNORED_LABEL, label_smoothing=0.1)
        ),
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", LABEL_COSTS)
def test_label_costs_match_torch(name, shape):
    cost, reference = LABEL_COSTS[name]
    y, labels = draw_scores(shape, ignore=name != "weights")
    original = y.copy()

    def function(torch, f, tensor):
        return reference(torch, f, tensor, torch.from_numpy(labels), torch.tensor(CLASS_WEIGHTS, dtype=torch.float64))

    loss, gradient = compute_with_torch(function, y)
    value, actual_gradient = compute_mean(cost, y, labels)
    assert value == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(actual_gradient, gradient, rtol=1e-10, atol=1e-14)
    np.testing.assert_array_equal(y, original)
    if len(cost.parts) > 1:  # the mean times the number of samples
        assert cost.local_sum(y, labels) / len(y) == pytest.approx(loss, rel=1e-12)
        np.testing.assert_allclose(cost.local_sum_gradient(y, labels) / len(y), gradient, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_and_smoothing_of_probabilities(shape):
    p = np.random.default_rng(1).random(shape)
    cost = nd.CrossEntropy(class_weights=CLASS_WEIGHTS, label_smoothing=0.1)
    y, _ = draw_scores(shape)
    loss, gradient = compute_with_torch(
        lambda torch, f, x: f.cross_entropy(
            x,
            torch.from_numpy(np.moveaxis(p, -1, 1).copy()),
            torch.tensor(CLASS_WEIGHTS, dtype=x.dtype),
            label_smoothing=0.1,
        ),
        y,
    )
    value, actual_gradient = compute_mean(cost, y, p)
    assert value == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(actual_gradient, gradient, rtol=1e-11, atol=1e-14)


REGRESSION_COSTS = {
    "mse": (nd.MSE(), lambda f, y, t: f.mse_loss(y, t)),
    "mae": (nd.MAE(), lambda f, y, t: f.l1_loss(y, t)),
    "huber": (nd.Huber(0.7), lambda f, y, t: f.huber_loss(y, t, delta=0.7)),
    "bce": (nd.BCE(), lambda f, y, t: f.binary_cross_entropy_with_logits(y, t)),
    "weighted bce": (
        nd.BCE(pos_weight=3.5),
        lambda f, y, t: f.binary_cross_entropy_with_logits(y, t, pos_weight=0 * y[0].detach() + 3.5),
    ),
}


@pytest.mark.parametrize("shape", [*SHAPES, (3, 5, 4, 1), (6, 1)])
@pytest.mark.parametrize("name", REGRESSION_COSTS)
def test_regression_costs_match_torch(name, shape):
    cost, reference = REGRESSION_COSTS[name]
    y = 20 * draw_scores(shape)[0] if "bce" in name else draw_scores(shape)[0]
    t = np.random.default_rng(1).random(shape)
    loss, gradient = compute_with_torch(
        lambda torch, f, x: reference(f, x, torch.from_numpy(np.moveaxis(t, -1, 1).copy())), y
    )
    for targets in (t, *([t[..., 0]] if shape[-1] == 1 else [])):
        value, actual_gradient = compute_mean(cost, y, targets)
        assert value == pytest.approx(loss, rel=1e-12)
        np.testing.assert_allclose(actual_gradient, gradient, rtol=1e-10, atol=1e-15)


def test_bce_of_labels():
    y, labels = draw_scores((4, 5, 6, 1))
    labels = np.where(labels == IGNORED_LABEL, IGNORED_LABEL, labels % 2 + (np.arange(6) % 2 == 0)) % 256
    labels[labels == 2] = 1
    keep = labels != IGNORED_LABEL
    loss, gradient = compute_with_torch(
        lambda torch, f, x: f.binary_cross_entropy_with_logits(
            x[:, 0][torch.from_numpy(keep)], torch.from_numpy(labels[keep].astype("f8"))
        ),
        y,
    )
    value, actual_gradient = compute_mean(nd.BCE(ignore_index=IGNORED_LABEL), y, labels)
    assert value == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(actual_gradient, gradient, rtol=1e-11, atol=1e-15)
    outputs, classes = draw_scores((4, 5, 3), ignore=False)
    assert nd.BCE().local_sum(outputs, classes) == pytest.approx(
        nd.BCE().local_sum(outputs, np.eye(3)[classes]), rel=1e-13
    )
    with pytest.raises(DataError, match="label 2 is outside the 2 classes"):
        nd.BCE().local_sum(np.zeros((2, 1)), np.array([0, 2]))


@pytest.mark.parametrize("cost", [c for c, _ in LABEL_COSTS.values()], ids=list(LABEL_COSTS))
def test_empty_and_fully_ignored_targets(cost):
    for shape in ((0, 4), (3, 0, 2, 4)):
        assert cost.local_sum(np.zeros(shape), np.zeros(shape[:-1], int)) == 0
        assert cost.local_sum_gradient(np.zeros(shape), np.zeros(shape[:-1], int)).shape == shape
    if cost.ignore_index is not None:
        y, void = draw_scores((2, 3, 4))[0], np.full((2, 3), IGNORED_LABEL)
        assert cost.local_sum(y, void) == 0
        assert not cost.local_sum_gradient(y, void).any()
        assert cost.local_sum_gradient(y.astype("f4"), void).dtype == "f4"


COSTS = {
    **{name: (cost, "labels") for name, (cost, _) in LABEL_COSTS.items() if cost.ignore_index},
    **{name: (cost, "numbers") for name, (cost, _) in REGRESSION_COSTS.items()},
    "bce of classes": (nd.BCE(pos_weight=[1, 2, 3, 4], ignore_index=IGNORED_LABEL), "labels"),
}
EXTENT = (7, 6)


class CellTargets(nd.Synthetic):
    """Data set of six training and five test samples, with a target for each cell."""

    def __init__(self, kind):
        super().__init__((*EXTENT, 2), classes=2, train=6, test=5)
        self.kind = kind

    def open_splits(self, grid):
        box = grid.tile_box(EXTENT).slices
        for split, seed in zip(super().open_splits(grid), (1, 2), strict=True):
            rng = np.random.default_rng(seed)
            labels = rng.integers(0, 4, (len(split), *EXTENT))
            if self.kind == "labels":
                labels[rng.random(labels.shape) < 0.3] = IGNORED_LABEL
                labels[0] = IGNORED_LABEL
            else:
                labels = rng.random((*labels.shape, 4))
            yield nd.Split(split.images(range(len(split)), "float64"), labels[(slice(None), *box)], scale=1.0)


def train(name, grid=None, **options):
    cost, kind = COSTS[name]
    layers = [nd.ConvLayerDist(4, 3, padding=1, activation=nd.Tanh()), nd.ConvLayerDist(4, 3, padding=1)]
    model = nd.ConvnetDist(layers, cost=cost, optimizer=nd.SGD(0.1), dtype="float64", backend="numpy", **options)
    data = CellTargets(kind)
    grid = grid or nd.ProcessGrid.serial()
    data.open(grid)
    model.build(data.sample_shape, 4, grid)
    record = nd.fit(model, data, 2, 4)[-1]  # batches of 4 and 2
    losses = {"train": record["train_loss"], "test": evaluate(model, data.test, 3)["loss"]}
    return {**{key: np.array([value]) for key, value in losses.items()}, **model.state()}


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.long
def test_means_are_of_the_global_batch_on_every_grid(name):
    serial = train(name)
    assert all(np.isfinite(array).all() for array in serial.values())

    def job(comm, replicas, options):
        return train(name, nd.ProcessGrid(comm, replicas=replicas), **options)

    configurations = [(1, 1, {"accumulate": 3}), (2, 2, {}), (3, 1, {"recompute": True}), (6, 2, {"strips": 2})]
    for ranks, replicas, options in [(4, 2, {"accumulate": 2}), configurations[list(COSTS).index(name) % 4]]:
        for actual in loopback.run(ranks, lambda comm, r=replicas, h=options: job(comm, r, h)):
            assert max_relative_difference(actual, serial) < 1e-10


def test_plan_includes_the_normaliser():
    def job(comm):
        model = nd.ConvnetDist(
            [nd.ConvLayerDist(3, 3)], cost=nd.DiceCE(ignore_index=0), dtype="float64", backend="numpy"
        )
        model.build((7, 6, 1), 4, nd.ProcessGrid(comm, replicas=2))
        model.train_batch(model.scatter(np.ones((4, 7, 6, 1))), np.ones((4, 5, 4), int))
        return model.bytes_summed, sum(model.compiled.reduction_bytes(comm.rank).values())

    for sent, planned in loopback.run(4, job):
        assert sent == planned


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: nd.CrossEntropy(class_weights=[1, -1]), ConfigError, "class_weights.1: expected a number of at least"),
        (lambda: nd.CrossEntropy(label_smoothing=1), ConfigError, "label_smoothing: .* below 1"),
        (
            lambda: nd.CrossEntropy(class_weights=[1, 2]).check_output_shape((3,), 3),
            ConfigError,
            "2 weights for 3 outputs; give one per output",
        ),
        (lambda: nd.DiceCE(class_weights=[0, 0]).check_output_shape((2,), 2), ConfigError, "class_weights: all are 0"),
        (
            lambda: nd.BCE(pos_weight=[1.0]).check_output_shape((2,), 2),
            ConfigError,
            "pos_weight: 1 weight for 2 outputs",
        ),
        (lambda: nd.BCE().check_output_shape((1,), 3), ShapeError, "1 output, but the data set has 3"),
        (lambda: nd.Huber(0), ConfigError, "delta: expected a number above 0"),
        (lambda: nd.Focal(-1), ConfigError, "gamma: expected a number of at least 0"),
    ],
)
def test_error_messages(make, error, message):
    nd.BCE().check_output_shape((1,), 2)
    nd.MSE().check_output_shape((1,), 10)
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("name", COSTS)
def test_device_results_match_the_host(name):
    device = Device()
    cost, kind = COSTS[name]
    y, targets = draw_scores((3, 4, 5, 4))
    targets = targets if kind == "labels" else np.random.default_rng(1).random(y.shape)
    for _, part in cost.parts:
        device_array = device.xp.asarray(y)
        assert float(part.local_sum(device_array, targets)) == pytest.approx(
            float(part.local_sum(y, targets)), rel=1e-13
        )
        gradient = part.local_sum_gradient(y, targets)
        np.testing.assert_allclose(to_host(part.local_sum_gradient(device_array, targets)), gradient, rtol=1e-12)


@pytest.mark.parametrize("cost", [nd.CrossEntropy, nd.SoftmaxCrossEntropy, nd.Focal, nd.Dice, nd.DiceCE])
@pytest.mark.parametrize("dense", [False, True])
def test_softmax_over_one_output_is_rejected(cost, dense):
    message = "is always 1 for a single output.*; use BCE for two classes with one output, MSE for a number"
    with pytest.raises(ConfigError, match=message):
        cost().check_output_shape((4, 4, 1), None if dense else 1)
    model = nd.Convnet([nd.ConvLayer(1, 3, padding=1)], cost=cost())
    model.build((4, 4, 1), batch_size=2)
    targets = np.zeros((2, 4, 4, 1), "f4") if dense else np.zeros((2, 4, 4), "i8")
    with pytest.raises(ConfigError, match=message):
        model.train_batch(np.ones((2, 4, 4, 1), "f4"), targets)
