"""Sections that are run again on the way back give the numbers of those that are kept."""

import numpy as np
import pytest
from gb_runs import built as gb
from support import worst
from test_accumulate import steps
from test_interleaving import arrays
from test_interleaving import built as every_layer

import neondist as nd
from neondist.comm import loopback

GRIDS = [(1, 1), (3, 1), (4, 2)]


@pytest.fixture(scope="module")
def kept():
    return steps(every_layer(batch=8))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.long
def test_every_layer(kept, grid):
    ranks, replicas = grid

    def job(comm):
        found = []
        for more in ({}, {"accumulate": 3}, {"sync": "bucketed"}):
            model = every_layer("Dist", nd.ProcessGrid(comm, replicas=replicas), batch=8, recompute=True, **more)
            assert len(model.executor.sections) > 2
            sent = model.bytes_sent
            found.append(steps(model))
            planned = sum(model.compiled.bytes(comm.rank, batch) for batch in (8, 5))
            assert model.bytes_sent - sent == planned
        return found

    for results in loopback.run(ranks, job):
        for found in results:
            assert worst(found, kept) < 1e-10


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.long
def test_passes_interleave_and_are_gone_back_through_again(ranks):
    def job(comm):
        found = []
        for recompute in (False, True):
            model = every_layer("Dist", nd.ProcessGrid(comm), recompute=recompute)
            both = [arrays(model, seed) for seed in (0, 1)]
            runs = [model.forward(model.scatter(x)) for x, _ in both]
            found.append([model.gather_input(runs[at].backward(both[at][1])) for at in (1, 0, 1)])
        return found

    for kept_, again in loopback.run(ranks, job):
        for one, other in zip(kept_, again, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


def test_memory_is_that_of_a_section():
    def model(recompute):
        layers = [nd.ConvLayer(8, 3, padding=1, activation=nd.Tanh()) for _ in range(34)]
        found = nd.Convnet([*layers, nd.GlobalAvgPoolingLayer(), nd.FCLayer(4)], recompute=recompute)
        found.build((32, 32, 8), 2)
        return found

    whole, sections = model(False), model(True)
    assert len(sections.executor.sections) == 6
    assert sections.compiled.memory(0) < 0.45 * whole.compiled.memory(0)
    x, labels = np.ones((2, 32, 32, 8), np.float32), np.zeros(2, int)
    assert sections.train_batch(x, labels) == pytest.approx(whole.train_batch(x, labels))
    assert sections.executor.blocks.count == 1
    (block,) = sections.executor.blocks._blocks.values()
    assert block.nbytes <= sections.compiled.memory(0)


@pytest.mark.parametrize(
    "scheme",
    [nd.schemes.Stale(), nd.schemes.Quantised(feedback=True), nd.schemes.Every(2)],
    ids=lambda scheme: type(scheme).__name__,
)
def test_schemes_with_memory_are_refused(scheme):
    told = "recompute: the scheme .* of layer 'conv1' reuses .* leave out recompute"
    with pytest.raises(nd.ConfigError, match=told):
        nd.Convnet([nd.ConvLayer(2, 3)], scheme=scheme, recompute=True)


def test_the_top_alone_and_all_layers_of_gb():
    found = []
    for recompute in (False, True):
        model, x = gb("unshared", num_initial_epochs=1, recompute=recompute)
        for epoch in (0, 1):
            model.begin_epoch(epoch)
            model.train_batch(x, np.arange(6) % 4)
        model.stages[0].begin_epoch(0)
        model.stages[0].train_batch(x)
        found.append(model.state())
    assert worst(*found) < 1e-12
