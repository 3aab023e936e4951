"""Interleaved passes keep separate state and equal separate passes."""

import gc

import numpy as np
import pytest
from availability import BACKENDS
from every_layer import build_every_layer, draw_arrays

import neondist as nd
from neondist.comm import loopback
from neondist.errors import PassOrderError


def run_separately(model, seeds):
    """Return the outputs and gradients of consecutive passes."""
    results = {}
    for seed in seeds:
        x, dy = draw_arrays(model, seed)
        run = model.forward(model.scatter(x))
        y, dx = model.gather(run.output), model.gather_input(run.backward(model.scatter_output(dy)))
        results[seed] = model.gradients() | {"y": y, "dx": dx}
    return results


def run_interleaved(model, seeds, order):
    """Run all forward passes first, then the backward passes in another order."""
    runs, results = {seed: model.forward(model.scatter(draw_arrays(model, seed)[0])) for seed in seeds}, {}
    for seed in order:
        dx = model.gather_input(runs[seed].backward(model.scatter_output(draw_arrays(model, seed)[1])))
        results[seed] = model.gradients() | {"y": model.gather(runs[seed].output), "dx": dx}
    return results


@pytest.mark.parametrize(
    ("ranks", "backend"), [*((ranks, BACKENDS[0]) for ranks in (1, 6)), *((4, name) for name in BACKENDS[1:])]
)
@pytest.mark.long
def test_interleaved_passes_match_separate_passes(ranks, backend):
    expected = run_separately(build_every_layer(backend=backend), (0, 1, 2))

    def job(comm):
        return [
            run_interleaved(build_every_layer("Dist", nd.ProcessGrid(comm), backend), (0, 1, 2), order)
            for order in BACKWARD_ORDERS
        ]

    for actual in loopback.run(ranks, job)[-1]:
        for seed, expected_arrays in expected.items():
            for name, array in expected_arrays.items():
                np.testing.assert_allclose(actual[seed][name], array, rtol=0, atol=1e-12 * max(1, np.abs(array).max()))


BACKWARD_ORDERS = ((0, 1, 2), (2, 1, 0), (1, 2, 0))


def test_passes_do_not_modify_layers():
    model = build_every_layer()
    before = {layer.name: dict(vars(layer)) for layer in model.leaves}
    run = model.forward(draw_arrays(model, 0)[0])
    run.backward(draw_arrays(model, 0)[1])
    for layer in model.leaves:
        assert vars(layer).keys() == before[layer.name].keys()
        assert all(value is before[layer.name][name] for name, value in vars(layer).items())


def test_memory_is_reused():
    model = build_every_layer()
    x, dy = draw_arrays(model, 0)
    for _ in range(3):
        runs = [model.forward(x) for _ in range(3)]
        runs[1].backward(dy)
        del runs
    assert model.executor.blocks.block_count == 3
    kept = model.forward(x)
    model.train_batch(x, np.zeros(4, int))
    assert model.executor.blocks.block_count == 3
    kept.close()
    gc.collect()
    assert len(model.executor.blocks.free_blocks) == 3


def test_backward_after_weight_changes_is_rejected():
    model = build_every_layer()
    x, dy = draw_arrays(model, 0)
    run = model.forward(x)
    model.train_batch(x, np.zeros(4, int))
    with pytest.raises(PassOrderError, match="the weights have changed"):
        run.backward(dy)
    run = model.forward(x)
    run.close()
    with pytest.raises(PassOrderError, match="the pass is closed"):
        run.backward(dy)
