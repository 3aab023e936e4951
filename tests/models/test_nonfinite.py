"""Non-finite values are detected, reported identically on all ranks, and change no state."""

import copy

import numpy as np
import pytest

import neondist as nd
from neondist.comm import loopback
from neondist.errors import NonFiniteError

SHAPE, BATCH = (8, 6, 2), 4
GRIDS = [(1, {}), (3, {}), (4, {"replicas": 2})]


class ExplodingIdentity(nd.Activation):
    """Identity with a non-finite gradient at one cell of selected ranks."""

    bad_value = None

    def fprop(self, z):
        return z

    def bprop(self, y, dy):
        dy = dy.copy()
        if self.bad_value is not None and dy.size:
            dy.flat[0] = self.bad_value
        return dy


def build_model(grid, nonfinite="stop", dtype="float64"):
    layers = [
        nd.ConvLayerDist(3, 3, padding=1, activation=ExplodingIdentity(), name="one"),
        nd.BatchNormLayerDist(name="norm"),
        nd.DropoutLayerDist(0.3),
        nd.LocalFilteringLayerDist(2, 2, name="local"),
        nd.ConvLayerDist(3, 3, padding=1, activation=nd.ReLU(), name="two"),
        nd.FCLayerDist(5, name="out"),
    ]
    model = nd.ConvnetDist(layers, optimizer=nd.SGD(0.01, momentum=0.9), dtype=dtype)
    model.build(SHAPE, BATCH, grid)
    model.nonfinite = nonfinite
    return model


def draw_batch(number):
    rng = np.random.default_rng(number)
    return rng.normal(size=(BATCH, *SHAPE)), rng.integers(0, 5, BATCH)


def spoil_images(model, x):
    if model.grid.rank == model.grid.size - 1:
        x[-1, -1, -1, 0] = np.inf
    return "the images"


def spoil_weights(model, x):
    model.layers[4].params["weights"].flat[0] = np.nan
    return "the weights of layer 'two'"


def spoil_tiled_weights(model, x):
    weights = model.layers[3].params["weights"]
    if model.grid.rank == 0:
        weights.flat[0] = np.nan
    return "the weights of layer 'local'"


def spoil_output(model, x):
    model.layers[5].params["weights"][...] = 1e308
    return "the output of layer 'out'"


def spoil_gradient(model, x):
    if model.grid.rank == model.grid.size - 1:
        model.layers[0].activation.bad_value = np.nan
    return "the gradients of the weights of layer 'one'"


SPOILERS = [spoil_images, spoil_weights, spoil_tiled_weights, spoil_output, spoil_gradient]


@pytest.mark.parametrize("spoil", SPOILERS)
@pytest.mark.parametrize(("ranks", "factors"), GRIDS)
@pytest.mark.long
def test_location_is_reported_identically_on_all_ranks(ranks, factors, spoil):
    def body(transport):
        model = build_model(nd.ProcessGrid(transport, **factors))
        images, targets = draw_batch(0)
        model.train_batch(model.scatter(images), targets, BATCH)
        x = model.scatter(images)
        location = spoil(model, x)
        before = {**model.state(), **model.optimizer_state()}
        with pytest.raises(NonFiniteError) as caught:
            model.train_batch(x, targets, BATCH)
        after = {**model.state(), **model.optimizer_state()}
        for name, array in before.items():
            np.testing.assert_array_equal(after[name], array)
        return location, str(caught.value), caught.value.raised_on_all_ranks, sorted(vars(model.layers[0]))

    results = loopback.run(ranks, body)
    location, message, agreed, names = results[0]
    assert all(result == results[0] for result in results)
    assert agreed
    assert message.startswith(f"step 2: first non-finite value: {location}")
    assert "lower the learning rate" in message
    assert "fprop" not in names


@pytest.mark.parametrize("spoil", [spoil_images, spoil_gradient])
@pytest.mark.parametrize(("ranks", "factors"), GRIDS)
def test_skipped_steps_change_only_the_count(ranks, factors, spoil):
    """Steps 1, 2 (spoiled) and 3 equal steps 1 and 3 of a model whose step count is advanced."""

    def body(transport):
        model, other = (build_model(nd.ProcessGrid(transport, **factors), "skip") for _ in range(2))
        for number in range(3):
            images, targets = draw_batch(number)
            if number == 1:
                x = model.scatter(images)
                spoil(model, x)
                assert np.isnan(model.train_batch(x, targets, BATCH))
                model.layers[0].activation.bad_value = None
                assert (model.nonfinite_monitor.last_skipped_step, model.nonfinite_monitor.consecutive_skips) == (1, 1)
                other.step += 1
            else:
                losses = [each.train_batch(each.scatter(images), targets, BATCH) for each in (model, other)]
                assert losses[0] == losses[1]
        return [{**each.state(), **each.optimizer_state()} for each in (model, other)]

    for actual, expected in loopback.run(ranks, body):
        assert all(np.array_equal(actual[name], array) for name, array in expected.items())


@pytest.mark.parametrize("bad_step", [0, 1, 4])
@pytest.mark.parametrize("scheme", ["stale", "stale(steps=2)", "every(j=4)", "quantised(bits=8, feedback=true)"])
@pytest.mark.long
def test_schemes_ignore_skipped_steps(scheme, bad_step):
    """Other steps equal those of a model without it; `every` exchanges in steps 0 and 4."""

    def body(transport):
        models = []
        for _ in range(2):
            layers = [nd.ConvLayerDist(3, 3, padding=1), nd.LCNLayerDist(3), nd.ConvLayerDist(5, 3, padding=1)]
            models.append(nd.ConvnetDist(layers, dtype="float64", backend="numpy", scheme=scheme))
            models[-1].build(SHAPE, BATCH, nd.ProcessGrid(transport, rows=2, cols=1))
            models[-1].nonfinite = "skip"
        model, other = models
        for number in range(7):
            images, labels = draw_batch(number)[0], np.full((BATCH, *SHAPE[:-1]), number % 5)
            count = BATCH - (number == 3)  # another number of samples has separate state
            if number == bad_step:
                images[0, 4] = np.nan  # next to the tile boundary
                assert np.isnan(model.train_batch(model.scatter(images), labels))
                other.step += 1
                continue
            x = model.scatter(images[:count])
            assert model.train_batch(x, labels[:count], count) == other.train_batch(x, labels[:count], count)
        assert model.nonfinite_monitor.consecutive_skips == 0

    loopback.run(2, body)


@pytest.mark.parametrize("scheme", ["stale", "quantised(bits=8, feedback=true)"])
def test_schemes_ignore_skipped_pretraining_steps(scheme):
    def body(transport):
        layers = [nd.LocalFilteringLayerDist(2, 3, name="filters"), nd.L2PoolingLayerDist(2, 1), nd.FCLayerDist(3)]
        costs = []
        for bad_step in (1, None):
            model = nd.GBDist(layers, backend="numpy", dtype="float64", scheme=scheme)
            model.build(SHAPE, BATCH, nd.ProcessGrid(transport, rows=2, cols=1))
            model.nonfinite, stage = "skip", model.stages[0]
            stage.begin_epoch(0)
            for number in range(5):
                x = model.scatter(draw_batch(number)[0])
                if number == 1:
                    if bad_step is None:
                        continue
                    x[0] = np.nan
                costs.append(stage.train_batch(x, None, BATCH))
        assert np.isnan(costs.pop(1))
        assert costs[:4] == costs[4:]

    loopback.run(2, body)


@pytest.mark.parametrize("skipped", [1, 20])
def test_adam_does_not_count_skipped_steps(skipped):
    """The first counted step has the size of the learning rate."""
    model = nd.Convnet([nd.FCLayer(5)], optimizer=nd.Adam(0.01), dtype="float64", backend="numpy")
    model.build(SHAPE, BATCH)
    model.nonfinite = "skip"
    images, labels = draw_batch(0)
    for _ in range(skipped):
        model.train_batch(images * np.nan, labels)
    before = model.state()["fc1/weights"]
    model.train_batch(images, labels)
    moved = np.abs(model.state()["fc1/weights"] - before).max()
    assert moved == pytest.approx(0.01, rel=1e-3)
    assert (model.step, model.steps_without_optimizer) == (skipped + 1, skipped)


class InfiniteCost(nd.CrossEntropy):
    """Cost that is infinite for one class, with finite gradients."""

    def local_sum(self, y, targets, sum_over_tiles=None):
        return np.inf if (targets == 4).any() else super().local_sum(y, targets)


@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
@pytest.mark.parametrize(("ranks", "factors"), GRIDS)
def test_infinite_loss_of_one_rank_is_detected_on_all(ranks, factors, nonfinite):
    """All gradients are finite."""

    def body(transport):
        layers = [nd.ConvLayerDist(5, 3, padding=1, name="one")]
        model = nd.ConvnetDist(
            layers, cost=InfiniteCost(), optimizer=nd.SGD(0.1, momentum=0.9), backend="numpy", dtype="float64"
        )
        model.build(SHAPE, BATCH, nd.ProcessGrid(transport, **factors))
        model.nonfinite = nonfinite
        labels = np.zeros((BATCH, *SHAPE[:-1]), int)
        images, _ = draw_batch(0)
        assert np.isfinite(model.train_batch(model.scatter(images), labels))
        before = {**model.state(), **model.optimizer_state()}
        labels[-1, -1, -1] = 4
        if nonfinite == "skip":
            assert np.isnan(model.train_batch(model.scatter(images), labels))
        else:
            with pytest.raises(NonFiniteError, match="step 2: first non-finite value: the cost"):
                model.train_batch(model.scatter(images), labels)
        for name, array in {**model.state(), **model.optimizer_state()}.items():
            np.testing.assert_array_equal(before[name], array)
        return model.nonfinite_monitor.nonfinite_value

    assert len(set(loopback.run(ranks, body))) == 1


@pytest.mark.parametrize(("ranks", "factors"), GRIDS)
def test_non_finite_tile_gradient_is_detected_on_all_ranks(ranks, factors):
    """The loss and all gradients summed over ranks are finite."""

    def body(transport):
        layers = [
            nd.LocalFilteringLayerDist(2, 2, activation=ExplodingIdentity(), name="local"),
            nd.ConvLayerDist(5, 3, padding=1, name="out"),
        ]
        model = nd.ConvnetDist(layers, backend="numpy", dtype="float64")
        model.build(SHAPE, BATCH, nd.ProcessGrid(transport, **factors))
        if model.grid.rank == model.grid.size - 1:
            model.layers[0].activation.bad_value = np.inf
        images, _ = draw_batch(0)
        before = model.state()
        with pytest.raises(NonFiniteError) as caught:
            model.train_batch(model.scatter(images), np.zeros((BATCH, *model.output_shape[:-1]), int))
        for name, array in model.state().items():
            np.testing.assert_array_equal(before[name], array)
        return str(caught.value)

    results = loopback.run(ranks, body)
    assert len(set(results)) == 1
    assert "the gradients of the weights of layer 'local'" in results[0]


class ExplodingFC(nd.FCLayerDist):
    """FC layer with non-finite weight gradients on selected ranks."""

    bad_value = None

    def backward(self, ctx, dy):
        dx = super().backward(ctx, dy)
        if self.bad_value is not None:
            ctx.grads["weights"] = np.full_like(ctx.params["weights"], self.bad_value)
        return dx


@pytest.mark.parametrize("epoch", [0, 1])
def test_non_finite_row_gradient_is_detected_in_head_training(epoch):
    def body(transport):
        model = nd.GBDist(
            [nd.LocalFilteringLayerDist(2, 2), ExplodingFC(5, name="top")], backend="numpy", dtype="float64"
        )
        model.build(SHAPE, BATCH, nd.ProcessGrid(transport))
        model.begin_epoch(epoch)
        assert model.trains_head_only == (epoch == 0)
        if model.grid.rank == 2:
            model.layers[1].bad_value = np.inf
        images, labels = draw_batch(0)
        before = model.state()
        with pytest.raises(
            NonFiniteError, match="first non-finite value: the gradients of the weights of layer 'top' on rank 2"
        ):
            model.train_batch(model.scatter(images), labels)
        for name, array in model.state().items():
            np.testing.assert_array_equal(before[name], array)

    loopback.run(3, body)


def spoil_filters(stage, x):
    stage.layer.params["weights"].flat[0] = np.nan
    return "the weights of layer 'filters'"


def spoil_stage_images(stage, x):
    x[-1, -1, -1, 0] = np.inf
    return "the images"


def spoil_stage_gradient(stage, x):
    """Keep the cost and the gradients of all other ranks finite."""
    filters = copy.copy(stage.layer.filters)
    stage.layer.filters = filters
    filters.weights_gradient = lambda view, z, weights: np.full_like(weights, np.inf)
    return "the gradients of the weights of layer 'filters'"


@pytest.mark.parametrize("spoil", [spoil_filters, spoil_stage_images, spoil_stage_gradient])
@pytest.mark.parametrize(("ranks", "factors"), GRIDS)
def test_pretraining_reports_the_location_and_keeps_the_weights(ranks, factors, spoil):
    def body(transport):
        grid = nd.ProcessGrid(transport, **factors)
        layers = [nd.LocalFilteringLayerDist(2, 3, name="filters"), nd.L2PoolingLayerDist(2, 1), nd.FCLayerDist(3)]
        model = nd.GBDist(layers, backend="numpy")
        model.build(SHAPE, BATCH, grid)
        model.nonfinite = "skip"
        stage, x = model.stages[0], model.scatter(np.ones((BATCH, *SHAPE)))
        stage.begin_epoch(0)
        assert np.isfinite(stage.train_batch(x, None, BATCH))
        where = spoil(stage, x) if grid.rank == grid.size - 1 else ""
        before = model.state()
        assert np.isnan(stage.train_batch(x, None, BATCH))
        assert all(np.array_equal(before[name], array, equal_nan=True) for name, array in model.state().items())
        return model.nonfinite_monitor.nonfinite_value, where

    results = loopback.run(ranks, body)
    in_both_replicas = factors and spoil is spoil_stage_gradient  # summed over the replicas
    location = "" if ranks == 1 else " on ranks 1, 3" if in_both_replicas else f" on rank {ranks - 1}"
    assert {reported for reported, _ in results} == {results[-1][1] + location}


class BackwardRecorder(nd.Observer):
    """Observer that records layer names in the order of the backward pass."""

    def __init__(self):
        self.names = []

    def on_begin(self, event, name, direction, subject):
        if event == "layer" and direction == "backward":
            self.names.append(name)


def test_search_does_not_notify_other_observers():
    model, calls = build_model(None, "skip"), BackwardRecorder()
    images, targets = draw_batch(0)
    with model.grid.observers.add_temporarily(calls):
        for x in (images, images * np.nan, images):
            calls.names.clear()
            model.train_batch(model.scatter(x), targets)
    assert calls.names == [layer.name for layer in reversed(model.leaves)]
    assert not model.grid.observers


def test_skipped_steps_are_limited():
    model = build_model(None, "skip")
    images, targets = draw_batch(0)
    spoil_weights(model, None)
    for _ in range(100):
        assert np.isnan(model.train_batch(model.scatter(images), targets))
    with pytest.raises(
        NonFiniteError, match=r"step 101: the last 100 steps were skipped; first non-finite value: the weights of"
    ):
        model.train_batch(model.scatter(images), targets)


def test_large_gradients_whose_sum_overflows_are_finite():
    from neondist.parallel import are_all_finite

    assert are_all_finite(np.full(10, 3e38, np.float32))
    assert are_all_finite(np.zeros((0, 3)))
    for bad in (np.nan, np.inf, -np.inf):
        assert not are_all_finite(np.array([1.0, bad, -bad]))
