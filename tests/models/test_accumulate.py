"""A step in micro-batches has the numbers of the whole batch."""

import numpy as np
import pytest
from gb_runs import KINDS, built
from support import worst
from test_interleaving import built as every_layer
from test_interleaving import layers

import neondist as nd
from neondist.comm import loopback
from neondist.data import Synthetic
from neondist.errors import NonFiniteError
from neondist.geometry import split
from neondist.train import evaluate

BATCHES = (8, 5)


def images(model, batch, seed):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(batch, *model.input_shape)), rng.integers(0, 4, batch)


def steps(model):
    """Losses, gradients and weights, running statistics included, of two steps of different sizes."""
    found = {}
    for number, batch in enumerate(BATCHES):
        x, labels = images(model, batch, number)
        found[f"loss {number}"] = np.array([model.train_batch(model.scatter(x), labels, batch)])
        found |= {f"{name} {number}": gradient for name, gradient in model.gradients().items()}
    return found | model.state()


@pytest.fixture(scope="module")
def whole():
    return steps(every_layer(batch=8))


@pytest.mark.parametrize("grid", [(1, 1), (3, 3), (4, 1), (4, 2)], ids=str)
@pytest.mark.long
def test_every_layer(whole, grid):
    ranks, replicas = grid

    def job(comm):
        found = []
        for parts in (1, 2, 3, 5):
            model = every_layer("Dist", nd.ProcessGrid(comm, replicas=replicas), batch=8, accumulate=parts)
            found.append((steps(model), model.executor.blocks.count))
        return found

    for rank, results in enumerate(loopback.run(ranks, job)):
        for parts, (found, workspaces) in zip((1, 2, 3, 5), results, strict=True):
            assert worst(found, whole) < 1e-10
            lo, hi = split(8, replicas, rank // (ranks // replicas))
            assert workspaces == min(parts, hi - lo)  # all at once, for the statistics


def small(**more):
    model = nd.Convnet(
        [
            nd.ConvLayer(4, 3, activation=nd.ReLU(), padding=1),
            nd.MaxPoolingLayer(2),
            nd.DropoutLayer(0.4),
            nd.FCLayer(4),
        ],
        dtype="float64",
        **more,
    )
    model.build((8, 8, 2), 8)
    return model


def test_memory_is_that_of_one_micro_batch():
    expected, model = steps(small()), small(accumulate=4)
    assert worst(steps(model), expected) < 1e-10
    assert model.executor.blocks.count == 1
    blocks = model.executor.blocks
    (block,) = blocks._blocks.values()
    assert block.size == 2 * blocks.length  # two samples of eight
    plans = model.plan((8, 8, 2), batch_size=8)
    assert plans.peak == 2 * (8 * model.executor.blocks.length + sum(plans.sections[0].saved(0, 8)))


def test_evaluation_takes_no_more_samples_at_once():
    model = small(accumulate=3)
    data = Synthetic((8, 8, 2), classes=4, train=9, test=1)
    data.open(nd.ProcessGrid.serial())
    found, expected = (evaluate(m, data.splits["train"], 8) for m in (model, small()))
    assert found == pytest.approx(expected)
    model.last_pass = None
    assert list(model.executor.blocks._blocks) == [(0, 3)]


@pytest.mark.parametrize("ranks", [1, 4])
def test_costs_that_look_at_whole_images(ranks):
    def job(comm, parts=3):
        net = [nd.BatchNormLayerDist(), nd.ConvLayerDist(3, 3, padding=1)]
        model = nd.ConvnetDist(net, cost=nd.Dice(), dtype="float64", accumulate=parts)
        model.build((6, 6, 2), 5, nd.ProcessGrid(comm))
        rng = np.random.default_rng(3)
        x, labels = rng.normal(size=(5, 6, 6, 2)), rng.integers(0, 3, (5, 6, 6))
        return {"loss": np.array([model.train_batch(model.scatter(x), labels)])} | model.gradients() | model.state()

    expected = loopback.run(1, lambda comm: job(comm, 1))[0]
    for found in loopback.run(ranks, job):
        assert worst(found, expected) < 1e-10


@pytest.mark.parametrize("kind", KINDS)
def test_pretraining_and_the_top_alone(kind):
    def trained(parts):
        model, x = built(kind, batch=4, accumulate=parts)
        labels = images(model, 4, 0)[1]
        found = {}
        for number, stage in enumerate(model.stages):
            stage.begin_epoch(0)
            found[f"stage {number}"] = np.array([stage.train_batch(x)])
        for epoch in (0, 1):
            model.begin_epoch(epoch)
            found[f"loss {epoch}"] = np.array([model.train_batch(x, labels)])
        return found | model.state()

    assert worst(trained(3), trained(1)) < 1e-9


def test_where_a_micro_batch_is_not_finite():
    model = small(accumulate=3)
    x, labels = images(model, 8, 0)
    x[7, 0, 0, 0] = np.nan
    with pytest.raises(NonFiniteError, match="the images first"):
        model.train_batch(x, labels)
    model.layers[-1].params["weights"][0, 0] = np.inf
    with pytest.raises(NonFiniteError, match="the weights of layer 'fc1' first"):
        model.train_batch(images(model, 8, 0)[0], labels)


@pytest.mark.parametrize(
    "scheme",
    [nd.schemes.Stale(), nd.schemes.Quantised(), nd.schemes.Every(2)],
    ids=lambda scheme: type(scheme).__name__,
)
def test_schemes_with_memory_are_refused(scheme):
    with pytest.raises(
        nd.ConfigError, match=r"accumulate: the scheme .* of layer 'conv1' reuses .* leave out accumulate"
    ):
        nd.Convnet(layers(), scheme=scheme, accumulate=2)
    with pytest.raises(nd.ConfigError, match="accumulate"):
        nd.Convnet(layers(), accumulate=0)
