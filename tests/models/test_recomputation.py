"""Recomputed sections give the results of stored ones."""

import numpy as np
import pytest
from common_checks import max_relative_difference
from every_layer import build_every_layer, draw_arrays, run_steps
from gb_runs import build_gb

import neondist as nd
from neondist.comm import loopback

GRIDS = [(1, 1), (3, 1), (4, 2)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.long
def test_every_layer(every_layer_steps, grid):
    ranks, replicas = grid

    def job(comm):
        results = []
        for options in ({}, {"accumulate": 3}, {"sync": "bucketed"}):
            model = build_every_layer(
                "Dist", nd.ProcessGrid(comm, replicas=replicas), batch=8, recompute=True, **options
            )
            assert len(model.executor.sections) > 2
            sent = model.bytes_sent
            results.append(run_steps(model))
            planned = sum(model.compiled.bytes(comm.rank, batch) for batch in (8, 5))
            assert model.bytes_sent - sent == planned
        return results

    for results in loopback.run(ranks, job):
        for actual in results:
            assert max_relative_difference(actual, every_layer_steps) < 1e-10


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.long
def test_interleaved_and_repeated_backward_passes(ranks):
    def job(comm):
        results = []
        for recompute in (False, True):
            model = build_every_layer("Dist", nd.ProcessGrid(comm), recompute=recompute)
            inputs = [draw_arrays(model, seed) for seed in (0, 1)]
            runs = [model.forward(model.scatter(x)) for x, _ in inputs]
            results.append([model.gather_input(runs[index].backward(inputs[index][1])) for index in (1, 0, 1)])
        return results

    for stored, recomputed in loopback.run(ranks, job):
        for stored_array, recomputed_array in zip(stored, recomputed, strict=True):
            np.testing.assert_allclose(stored_array, recomputed_array, rtol=0, atol=1e-12)


def test_memory_is_that_of_a_section():
    def build_model(recompute):
        layers = [nd.ConvLayer(8, 3, padding=1, activation=nd.Tanh()) for _ in range(34)]
        built = nd.Convnet([*layers, nd.GlobalAvgPoolingLayer(), nd.FCLayer(4)], recompute=recompute)
        built.build((32, 32, 8), 2)
        return built

    full, sections = build_model(False), build_model(True)
    assert len(sections.executor.sections) == 6
    assert sections.compiled.memory(0) < 0.45 * full.compiled.memory(0)
    x, labels = np.ones((2, 32, 32, 8), np.float32), np.zeros(2, int)
    assert sections.train_batch(x, labels) == pytest.approx(full.train_batch(x, labels))
    assert sections.executor.blocks.block_count == 1
    (block,) = sections.executor.blocks._blocks.values()
    assert block.nbytes <= sections.compiled.memory(0)


@pytest.mark.parametrize(
    "scheme",
    ["stale", "stale(steps=2)", "every(j=2)", "every(j=3, between=zeros)", "quantised(bits=8, feedback=true)"],
)
@pytest.mark.long
def test_stateful_schemes(scheme):
    """Recomputed passes use the cells that the first pass received, also if other passes were run in between."""

    def job(comm):
        models = []
        for recompute in (False, True):
            layers = [nd.ConvLayerDist(3, 3, padding=1), nd.LCNLayerDist(3), nd.DeconvLayerDist(4, 3, stride=2)]
            layers += [nd.L2PoolingLayerDist(2, 2)] + [nd.ConvLayerDist(3, 3, padding=1) for _ in range(5)]
            model = nd.ConvnetDist(layers, dtype="float64", backend="numpy", scheme=scheme, recompute=recompute)
            model.build((11, 9, 2), 4, nd.ProcessGrid(comm, rows=2, cols=2))
            models.append(model)
        assert len(models[1].executor.sections) > 2
        images = np.random.default_rng(0).normal(size=(6, 4, 11, 9, 2))
        for number in range(6):
            labels = np.full((4, *models[0].output_shape[:-1]), number % 3)
            sent = [model.bytes_sent for model in models]
            losses = [model.train_batch(model.scatter(images[number]), labels) for model in models]
            sent = [model.bytes_sent - before for model, before in zip(models, sent, strict=True)]
            assert losses[0] == pytest.approx(losses[1], rel=1e-12)
            assert sent[0] == sent[1]
        dy, gradients = np.random.default_rng(1).normal(size=(4, *models[0].output_shape)), []
        for model in models:
            runs = [model.forward(model.scatter(x)) for x in images[:2]]
            gradients.append([model.gather_input(runs[at].backward(model.scatter_output(dy))) for at in (1, 0, 1)])
        return [*gradients, *(model.state() for model in models)]

    for stored, recomputed, state, other in loopback.run(4, job):
        for stored_array, recomputed_array in zip(stored, recomputed, strict=True):
            np.testing.assert_allclose(stored_array, recomputed_array, rtol=0, atol=1e-12)
        assert max_relative_difference(state, other) < 1e-12


def test_head_and_full_training_of_gb():
    states = []
    for recompute in (False, True):
        model, x = build_gb("unshared", num_initial_epochs=1, recompute=recompute)
        for epoch in (0, 1):
            model.begin_epoch(epoch)
            model.train_batch(x, np.arange(6) % 4)
        model.stages[0].begin_epoch(0)
        model.stages[0].train_batch(x)
        states.append(model.state())
    assert max_relative_difference(*states) < 1e-12


class DampedLayerDist(nd.Dist, nd.Layer):
    """Division by a count of training steps, kept as state and updated in `forward`."""

    def state_for(self, input_shape):
        return {"steps": nd.Parameter((1,), nd.Constant(0.0))}

    def forward(self, ctx, view):
        steps = self.state["steps"] if self.uses_attribute else ctx.state["steps"]
        if ctx.training:
            steps += 1
        ctx.save(factor=1 / (1 + float(steps[0])))
        return view * ctx.factor

    def backward(self, ctx, dy):
        return dy * ctx.factor


class MeanSquareLayerDist(nd.Dist, nd.Layer):
    """Division by a running mean square of the whole batch, before its update."""

    saves_input = saves_output = False

    def state_for(self, input_shape):
        return {"mean": nd.Parameter((1,), nd.Constant(1.0)), "steps": nd.Parameter((1,), nd.Constant(0.0))}

    def reductions_for(self, input_shape):
        return [nd.Reduction("forward", "world", fixed_elements=1)]

    def reduce(self, ctx, view):
        return ((ctx.owned(view) - ctx.state["steps"]) ** 2).sum().reshape(1)

    def forward(self, ctx, view):
        ctx.save(factor=1 / (1 + self.state["mean"][0]))
        ctx.state["mean"] += ctx.reduced
        ctx.state["steps"] += 1
        return view * ctx.factor

    def backward(self, ctx, dy):
        return dy * ctx.factor


STREAM = {"memory": "1TiB", "strips": 2}


@pytest.mark.parametrize(
    "mode", [{"recompute": True}, STREAM, {**STREAM, "recompute": True}], ids=["recompute", "stream", "both"]
)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("uses_attribute", [False, True])
def test_custom_state_is_updated_once(uses_attribute, accumulate, mode):
    def job(comm):
        models = []
        for options in ({}, mode):
            damped = [DampedLayerDist(), DampedLayerDist()]
            for layer in damped:
                layer.uses_attribute = uses_attribute
            layers = [
                nd.ConvLayerDist(2, 3, padding=1),
                damped[0],
                MeanSquareLayerDist(),
                nd.ConvLayerDist(2, 3),
                damped[1],
            ]
            options = {**options, "accumulate": accumulate, "dtype": "float64", "seed": 1}
            model = nd.ConvnetDist([*layers, nd.FCLayerDist(3)], **options)
            model.build((7, 5, 1), 2, nd.ProcessGrid(comm))
            for step in range(3):
                x = model.scatter(np.random.default_rng(step).normal(size=(2, 7, 5, 1)))
                model.train_batch(x, np.array([0, 2]))
            models.append(model.state())
        assert models[0]["damped1/steps"] == 3 * accumulate
        assert models[0]["mean_square1/steps"] == 3
        return models

    for states in loopback.run(2, job):
        assert max_relative_difference(*states) < 1e-12
