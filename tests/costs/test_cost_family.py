"""Costs with weights, ignored cells and smoothing against torch, and their means over tiles, replicas and batches."""

import numpy as np
import pytest
from device import Device
from support import worst

import neondist as nd
from neondist.arrays.namespace import to_host
from neondist.comm import loopback
from neondist.errors import ConfigError, DataError, ShapeError
from neondist.train import evaluate

SHAPES = [(5, 4), (3, 4, 5, 4), (2, 3, 4), (2, 3, 2, 2, 4)]
WEIGHTS = [0.5, 2.0, 0.0, 1.25]
VOID = 255


def scores(shape, ignore=True):
    rng = np.random.default_rng(3)
    labels = rng.integers(0, shape[-1], shape[:-1])
    if ignore:
        labels[rng.random(labels.shape) < 0.3] = VOID
    return rng.normal(scale=3, size=shape), labels


def by_torch(function, y):
    """The value and the gradient of a function of a tensor with channels first."""
    torch = pytest.importorskip("torch")
    first = torch.from_numpy(np.moveaxis(y, -1, 1).copy()).requires_grad_()
    loss = function(torch, torch.nn.functional, first)
    loss.backward()
    return loss.item(), np.moveaxis(first.grad.numpy(), 1, -1)


def by_us(cost, y, targets):
    """The mean and its gradient, as training puts them together."""
    value, gradient = 0.0, 0.0
    for factor, part in cost.parts:
        over = part.weight(y.shape, targets) if part.weighted else len(y) * part.cells(y.shape[1:])
        value += factor * part.value(y, targets) / over
        gradient = gradient + factor * part.gradient(y, targets) / over
    return value, gradient


def focal(torch, f, y, labels):
    log_p = f.log_softmax(y, 1)
    keep = labels != VOID
    at = labels.where(keep, torch.zeros(()).long())[:, None]
    log_pt = log_p.gather(1, at)[:, 0]
    w = torch.tensor(WEIGHTS, dtype=y.dtype)[at[:, 0]] * keep
    return -(w * (1 - log_pt.exp()) ** 1.5 * log_pt).sum() / w.sum()


def dice(torch, f, y, labels):
    keep = (labels != VOID)[:, None]
    p = y.softmax(1) * keep
    hot = f.one_hot(labels.where(keep[:, 0], torch.zeros(()).long()), y.shape[1])
    t = torch.movedim(hot, -1, 1) * keep
    cells = tuple(range(2, y.ndim))
    both, overlap = ((p + t).sum(cells), (p * t).sum(cells)) if cells else (p + t, p * t)
    return ((both - 2 * overlap) / (both + 1)).mean(1).mean()


def entropy(f, y, t, **more):
    return f.cross_entropy(y, t, **more)


OF_LABELS = {
    "weights": (
        nd.CrossEntropy(class_weights=WEIGHTS),
        lambda torch, f, y, t, w: entropy(f, y, t.where(t != VOID, torch.zeros(()).long()), weight=w),
    ),
    "ignore": (nd.SoftmaxCrossEntropy(ignore_index=VOID), lambda o, f, y, t, w: entropy(f, y, t, ignore_index=VOID)),
    "smoothing": (
        nd.CrossEntropy(ignore_index=VOID, label_smoothing=0.2),
        lambda o, f, y, t, w: entropy(f, y, t, ignore_index=VOID, label_smoothing=0.2),
    ),
    "all": (
        nd.CrossEntropy(class_weights=WEIGHTS, ignore_index=VOID, label_smoothing=0.1),
        lambda o, f, y, t, w: entropy(f, y, t, weight=w, ignore_index=VOID, label_smoothing=0.1),
    ),
    "focal": (nd.Focal(1.5, class_weights=WEIGHTS, ignore_index=VOID), lambda o, f, y, t, w: focal(o, f, y, t)),
    "dice": (nd.Dice(ignore_index=VOID), lambda o, f, y, t, w: dice(o, f, y, t)),
    "dice and entropy": (
        nd.DiceCE(dice_weight=0.5, ce_weight=2.0, class_weights=WEIGHTS, ignore_index=VOID, label_smoothing=0.1),
        lambda o, f, y, t, w: (
            0.5 * dice(o, f, y, t) + 2 * entropy(f, y, t, weight=w, ignore_index=VOID, label_smoothing=0.1)
        ),
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", OF_LABELS)
def test_costs_of_labels_are_those_of_torch(name, shape):
    cost, theirs = OF_LABELS[name]
    y, labels = scores(shape, ignore=name != "weights")
    kept = y.copy()

    def function(torch, f, tensor):
        return theirs(torch, f, tensor, torch.from_numpy(labels), torch.tensor(WEIGHTS, dtype=torch.float64))

    loss, gradient = by_torch(function, y)
    value, mine = by_us(cost, y, labels)
    assert value == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(mine, gradient, rtol=1e-10, atol=1e-14)
    np.testing.assert_array_equal(y, kept)
    if len(cost.parts) > 1:  # the mean of what is given, times the samples
        assert cost.value(y, labels) / len(y) == pytest.approx(loss, rel=1e-12)
        np.testing.assert_allclose(cost.gradient(y, labels) / len(y), gradient, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_and_smoothing_of_probabilities(shape):
    p = np.random.default_rng(1).random(shape)
    cost = nd.CrossEntropy(class_weights=WEIGHTS, label_smoothing=0.1)
    y, _ = scores(shape)
    loss, gradient = by_torch(
        lambda torch, f, x: f.cross_entropy(
            x, torch.from_numpy(np.moveaxis(p, -1, 1).copy()), torch.tensor(WEIGHTS, dtype=x.dtype), label_smoothing=0.1
        ),
        y,
    )
    value, mine = by_us(cost, y, p)
    assert value == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(mine, gradient, rtol=1e-11, atol=1e-14)


OF_NUMBERS = {
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
@pytest.mark.parametrize("name", OF_NUMBERS)
def test_costs_of_numbers_are_those_of_torch(name, shape):
    cost, theirs = OF_NUMBERS[name]
    y = 20 * scores(shape)[0] if "bce" in name else scores(shape)[0]
    t = np.random.default_rng(1).random(shape)
    loss, gradient = by_torch(lambda torch, f, x: theirs(f, x, torch.from_numpy(np.moveaxis(t, -1, 1).copy())), y)
    for targets in (t, *([t[..., 0]] if shape[-1] == 1 else [])):
        value, mine = by_us(cost, y, targets)
        assert value == pytest.approx(loss, rel=1e-12)
        np.testing.assert_allclose(mine, gradient, rtol=1e-10, atol=1e-15)


def test_bce_of_labels():
    y, labels = scores((4, 5, 6, 1))
    labels = np.where(labels == VOID, VOID, labels % 2 + (np.arange(6) % 2 == 0)) % 256
    labels[labels == 2] = 1
    keep = labels != VOID
    loss, gradient = by_torch(
        lambda torch, f, x: f.binary_cross_entropy_with_logits(
            x[:, 0][torch.from_numpy(keep)], torch.from_numpy(labels[keep].astype("f8"))
        ),
        y,
    )
    value, mine = by_us(nd.BCE(ignore_index=VOID), y, labels)
    assert value == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(mine, gradient, rtol=1e-11, atol=1e-15)
    many, classes = scores((4, 5, 3), ignore=False)
    assert nd.BCE().value(many, classes) == pytest.approx(nd.BCE().value(many, np.eye(3)[classes]), rel=1e-13)
    with pytest.raises(DataError, match="label 2 is outside the 2 classes"):
        nd.BCE().value(np.zeros((2, 1)), np.array([0, 2]))


@pytest.mark.parametrize("cost", [c for c, _ in OF_LABELS.values()], ids=list(OF_LABELS))
def test_nothing_and_nothing_that_counts(cost):
    for shape in ((0, 4), (3, 0, 2, 4)):
        assert cost.value(np.zeros(shape), np.zeros(shape[:-1], int)) == 0
        assert cost.gradient(np.zeros(shape), np.zeros(shape[:-1], int)).shape == shape
    if cost.ignore_index is not None:
        y, void = scores((2, 3, 4))[0], np.full((2, 3), VOID)
        assert cost.value(y, void) == 0
        assert not cost.gradient(y, void).any()
        assert cost.gradient(y.astype("f4"), void).dtype == "f4"


COSTS = {
    **{name: (cost, "labels") for name, (cost, _) in OF_LABELS.items() if cost.ignore_index},
    **{name: (cost, "numbers") for name, (cost, _) in OF_NUMBERS.items()},
    "bce of classes": (nd.BCE(pos_weight=[1, 2, 3, 4], ignore_index=VOID), "labels"),
}
EXTENT = (7, 6)


class Cells(nd.Synthetic):
    """Six samples for training and five for the test, with a target for each cell."""

    def __init__(self, kind):
        super().__init__((*EXTENT, 2), classes=2, train=6, test=5)
        self.kind = kind

    def load(self, grid):
        box = grid.tile_box(EXTENT).slices
        for split, seed in zip(super().load(grid), (1, 2), strict=True):
            rng = np.random.default_rng(seed)
            labels = rng.integers(0, 4, (len(split), *EXTENT))
            if self.kind == "labels":
                labels[rng.random(labels.shape) < 0.3] = VOID
                labels[0] = VOID
            else:
                labels = rng.random((*labels.shape, 4))
            yield nd.Split(split.images(range(len(split)), "float64"), labels[(slice(None), *box)], scale=1.0)


def trained(name, grid=None, **how):
    cost, kind = COSTS[name]
    layers = [nd.ConvLayerDist(4, 3, padding=1, activation=nd.Tanh()), nd.ConvLayerDist(4, 3, padding=1)]
    model = nd.ConvnetDist(layers, cost=cost, optimizer=nd.SGD(0.1), dtype="float64", backend="numpy", **how)
    data = Cells(kind)
    grid = grid or nd.ProcessGrid.serial()
    data.open(grid)
    model.build(data.sample_shape, 4, grid)
    record = nd.fit(model, data, 2, 4)[-1]  # batches of 4 and 2
    found = {"train": record["train_loss"], "test": evaluate(model, data.test, 3)["loss"]}
    return {**{key: np.array([value]) for key, value in found.items()}, **model.state()}


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.long
def test_means_are_of_the_whole_batch_on_every_grid(name):
    whole = trained(name)
    assert all(np.isfinite(array).all() for array in whole.values())

    def job(comm, replicas, how):
        return trained(name, nd.ProcessGrid(comm, replicas=replicas), **how)

    ways = [(1, 1, {"accumulate": 3}), (2, 2, {}), (3, 1, {"recompute": True}), (6, 2, {"strips": 2})]
    for ranks, replicas, how in [(4, 2, {"accumulate": 2}), ways[list(COSTS).index(name) % 4]]:
        for found in loopback.run(ranks, lambda comm, r=replicas, h=how: job(comm, r, h)):
            assert worst(found, whole) < 1e-10


def test_the_plan_knows_what_the_normaliser_sends():
    def job(comm):
        model = nd.ConvnetDist(
            [nd.ConvLayerDist(3, 3)], cost=nd.DiceCE(ignore_index=0), dtype="float64", backend="numpy"
        )
        model.build((7, 6, 1), 4, nd.ProcessGrid(comm, replicas=2))
        model.train_batch(model.scatter(np.ones((4, 7, 6, 1))), np.ones((4, 5, 4), int))
        return model.bytes_summed, sum(model.compiled.reduced(comm.rank).values())

    for sent, planned in loopback.run(4, job):
        assert sent == planned


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: nd.CrossEntropy(class_weights=[1, -1]), ConfigError, "class_weights.1: expected a number of at least"),
        (lambda: nd.CrossEntropy(label_smoothing=1), ConfigError, "label_smoothing: .* below 1"),
        (lambda: nd.CrossEntropy(class_weights=[1, 2]).check((3,), 3), ConfigError, "2 weights for 3 outputs; give 3"),
        (lambda: nd.DiceCE(class_weights=[0, 0]).check((2,), 2), ConfigError, "class_weights: all are 0"),
        (lambda: nd.BCE(pos_weight=[1.0]).check((2,), 2), ConfigError, "pos_weight: 1 weights for 2 outputs"),
        (lambda: nd.BCE().check((1,), 3), ShapeError, "1 outputs, but the data set has 3"),
        (lambda: nd.Huber(0), ConfigError, "delta: expected a number above 0"),
        (lambda: nd.Focal(-1), ConfigError, "gamma: expected a number of at least 0"),
    ],
)
def test_what_cannot_work_is_named(make, error, words):
    nd.BCE().check((1,), 2)
    nd.MSE().check((1,), 10)
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize("name", COSTS)
def test_on_a_device(name):
    device = Device()
    cost, kind = COSTS[name]
    y, targets = scores((3, 4, 5, 4))
    targets = targets if kind == "labels" else np.random.default_rng(1).random(y.shape)
    for _, part in cost.parts:
        there = device.xp.asarray(y)
        assert float(part.value(there, targets)) == pytest.approx(float(part.value(y, targets)), rel=1e-13)
        np.testing.assert_allclose(to_host(part.gradient(there, targets)), part.gradient(y, targets), rtol=1e-12)
