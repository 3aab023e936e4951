"""Steps in micro-batches equal steps on the full batch."""

import numpy as np
import pytest
from common_checks import max_relative_difference
from every_layer import build_every_layer, draw_batch, make_every_layer, run_steps
from gb_runs import KINDS, build_gb

import neondist as nd
from neondist.comm import loopback
from neondist.data import Synthetic
from neondist.errors import NonFiniteError
from neondist.geometry import part_range
from neondist.train import evaluate


@pytest.mark.parametrize("grid", [(1, 1), (3, 3), (4, 1), (4, 2)], ids=str)
@pytest.mark.long
def test_every_layer_in_micro_batches(every_layer_steps, grid):
    ranks, replicas = grid

    def job(comm):
        results = []
        for parts in (1, 2, 3, 5):
            model = build_every_layer("Dist", nd.ProcessGrid(comm, replicas=replicas), batch=8, accumulate=parts)
            results.append((run_steps(model), model.executor.blocks.block_count))
        return results

    for rank, results in enumerate(loopback.run(ranks, job)):
        for parts, (actual, workspaces) in zip((1, 2, 3, 5), results, strict=True):
            assert max_relative_difference(actual, every_layer_steps) < 1e-10
            lo, hi = part_range(8, replicas, rank // (ranks // replicas))
            assert workspaces == min(parts, hi - lo)  # all at once, for batch statistics


def build_small_model(**options):
    model = nd.Convnet(
        [
            nd.ConvLayer(4, 3, activation=nd.ReLU(), padding=1),
            nd.MaxPoolingLayer(2),
            nd.DropoutLayer(0.4),
            nd.FCLayer(4),
        ],
        dtype="float64",
        **options,
    )
    model.build((8, 8, 2), 8)
    return model


def test_memory_is_that_of_one_micro_batch():
    expected, model = run_steps(build_small_model()), build_small_model(accumulate=4)
    assert max_relative_difference(run_steps(model), expected) < 1e-10
    assert model.executor.blocks.block_count == 1
    blocks = model.executor.blocks
    (block,) = blocks._blocks.values()
    assert block.size == 2 * blocks.elements_per_sample  # two samples of eight
    plans = model.plan((8, 8, 2), batch_size=8)
    assert plans.peak_arena_bytes == 2 * (
        8 * model.executor.blocks.elements_per_sample + sum(plans.sections[0].saved_bytes(0, 8))
    )


def test_evaluation_runs_in_micro_batches():
    model = build_small_model(accumulate=3)
    data = Synthetic((8, 8, 2), classes=4, train=9, test=1)
    data.open(nd.ProcessGrid.serial())
    actual, expected = (evaluate(model, data.splits["train"], 8) for model in (model, build_small_model()))
    assert actual == pytest.approx(expected)
    model.last_pass = None
    assert list(model.executor.blocks._blocks) == [(0, 3)]


@pytest.mark.parametrize("ranks", [1, 4])
def test_costs_over_whole_images(ranks):
    def job(comm, parts=3):
        network = [nd.BatchNormLayerDist(), nd.ConvLayerDist(3, 3, padding=1)]
        model = nd.ConvnetDist(network, cost=nd.Dice(), dtype="float64", accumulate=parts)
        model.build((6, 6, 2), 5, nd.ProcessGrid(comm))
        rng = np.random.default_rng(3)
        x, labels = rng.normal(size=(5, 6, 6, 2)), rng.integers(0, 3, (5, 6, 6))
        return {"loss": np.array([model.train_batch(model.scatter(x), labels)])} | model.gradients() | model.state()

    expected = loopback.run(1, lambda comm: job(comm, 1))[0]
    for actual in loopback.run(ranks, job):
        assert max_relative_difference(actual, expected) < 1e-10


@pytest.mark.parametrize("kind", KINDS)
def test_pretraining_and_head_training(kind):
    def train(parts):
        model, x = build_gb(kind, batch=4, accumulate=parts)
        labels = draw_batch(model, 4, 0)[1]
        arrays = {}
        for index, stage in enumerate(model.stages):
            stage.begin_epoch(0)
            arrays[f"stage {index}"] = np.array([stage.train_batch(x)])
        for epoch in (0, 1):
            model.begin_epoch(epoch)
            arrays[f"loss {epoch}"] = np.array([model.train_batch(x, labels)])
        return arrays | model.state()

    assert max_relative_difference(train(3), train(1)) < 1e-9


def test_non_finite_micro_batches():
    model = build_small_model(accumulate=3)
    x, labels = draw_batch(model, 8, 0)
    x[7, 0, 0, 0] = np.nan
    with pytest.raises(NonFiniteError, match="first non-finite value: the images"):
        model.train_batch(x, labels)
    model.layers[-1].params["weights"][0, 0] = np.inf
    with pytest.raises(NonFiniteError, match="first non-finite value: the weights of layer 'fc1'"):
        model.train_batch(draw_batch(model, 8, 0)[0], labels)


@pytest.mark.parametrize("scheme", ["every(j=2, between=zeros)", "every(j=3, between=reflect)", "every(j=1)"])
def test_scheme_that_depends_on_the_step_only(scheme):
    """All micro-batches of a step exchange, or none does."""

    def job(comm, parts):
        layers = [nd.ConvLayerDist(3, 3, padding=1), nd.ConvLayerDist(2, 3, padding=1), nd.FCLayerDist(4)]
        model = nd.ConvnetDist(layers, dtype="float64", scheme=scheme, accumulate=parts)
        model.build((7, 6, 2), 5, nd.ProcessGrid(comm))
        draws = [draw_batch(model, 5, step) for step in range(4)]
        losses = [model.train_batch(model.scatter(x), labels) for x, labels in draws]
        return {"losses": np.array(losses)} | model.state(), model.bytes_sent

    for (actual, sent), (expected, sent_at_once) in zip(
        loopback.run(3, lambda comm: job(comm, 2)), loopback.run(3, lambda comm: job(comm, 1)), strict=True
    ):
        assert max_relative_difference(actual, expected) < 1e-10
        assert sent == sent_at_once


@pytest.mark.parametrize(
    "scheme",
    [nd.schemes.Stale(), nd.schemes.Quantised(feedback=True), nd.schemes.Every(2)],
    ids=lambda scheme: type(scheme).__name__,
)
def test_stateful_schemes_are_rejected(scheme):
    with pytest.raises(
        nd.ConfigError, match=r"accumulate: the scheme .* of layer 'conv1' reuses .* leave out accumulate"
    ):
        nd.Convnet(make_every_layer(), scheme=scheme, accumulate=2)
    with pytest.raises(nd.ConfigError, match="accumulate"):
        nd.Convnet(make_every_layer(), accumulate=0)
