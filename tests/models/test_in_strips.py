"""Segments that are executed a strip at a time give the numbers of whole tiles."""

import numpy as np
import pytest
from support import worst
from test_accumulate import steps
from test_interleaving import built as every_layer

import neondist as nd
from neondist.comm import loopback
from neondist.errors import PassError
from neondist.models import optimal_stimulus


@pytest.fixture(scope="module")
def whole():
    return steps(every_layer(batch=8))


@pytest.mark.parametrize(("ranks", "replicas", "rows"), [(1, 1, 8), (3, 1, 1), (4, 2, 3), (6, 2, "auto")])
@pytest.mark.long
def test_every_layer(whole, ranks, replicas, rows):

    def job(comm):
        model = every_layer("Dist", nd.ProcessGrid(comm, replicas=replicas), batch=8, strips=rows)
        assert model.compiled.segments
        sent = model.bytes_sent
        found = steps(model)
        assert model.bytes_sent - sent == sum(model.compiled.bytes(comm.rank, batch) for batch in (8, 5))
        return found

    for found in loopback.run(ranks, job):
        assert worst(found, whole) < 1e-10


def chain(scheme, **more):
    """Layers that make one segment where nothing is exchanged between them, and others behind."""
    tanh = nd.Tanh()
    layers = [
        nd.ConvLayerDist(4, 5, padding=2, padding_mode="reflect", activation=tanh),
        nd.MaxPoolingLayerDist(3, 2, 1),
        nd.DropoutLayerDist(0.3),
        nd.ConvLayerDist(6, 3, padding="same", padding_mode="replicate", groups=2),
        nd.LRNLayerDist(3, alpha=0.5),
        nd.UpsampleLayerDist(2, "bilinear"),
        nd.AvgPoolingLayerDist(3, 2, 1, count_include_pad=False),
        nd.GroupNormLayerDist(2),
        nd.ConvLayerDist(4, 3, stride=2),
    ]
    return nd.ConvnetDist(layers, cost=nd.SumSquared(), seed=2, dtype="float64", backend="numpy", scheme=scheme, **more)


def trained(model, grid, shape=(23, 17, 2)):
    model.build(shape, 4, grid)
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(4, *shape)), rng.normal(size=(4, *model.output_shape))
    runs = [model.forward(model.scatter(x * factor)) for factor in (1, 2)]  # their strips take turns
    found = {f"dx {at}": model.gather_input(runs[at].backward(model.scatter_output(dy))) for at in (1, 0)}
    found |= {f"y {at}": model.gather(run.output) for at, run in enumerate(runs)}
    del runs
    model.train_batch(model.scatter(x), model.scatter_output(dy))
    found["evaluated"] = model.gather(model.fprop(model.scatter(x), training=False))
    return found | model.gradients() | model.state()


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("scheme", ["halo", "deep_halo(layers=3)", "overlap_tile(statistics=global)"])
@pytest.mark.long
def test_long_segments(ranks, scheme):
    def job(comm):
        expected = trained(chain(scheme), nd.ProcessGrid(comm))
        for more in (
            {"strips": 1},
            {"strips": 2, "recompute": True},
            {"strips": 3, "accumulate": 2},
            {"strips": "auto"},
        ):
            model = chain(scheme, **more)
            assert worst(trained(model, nd.ProcessGrid(comm)), expected) < 1e-10, more
            lengths = [len(segment.plans) for segment in model.compiled.segments]
            longest = {"halo": 2, "deep_halo(layers=3)": 5}.get(scheme, 7) if comm.size > 1 else 7
            assert max(lengths) == longest or more.get("recompute")
        return True

    assert all(loopback.run(ranks, job))


def test_a_strip_that_looks_at_no_cell():
    """Rows that padding alone gives, on ranks that have no cell of the map before."""

    def job(comm, **more):
        conv = nd.ConvLayerDist(2, (4, 2), padding=((2, 2), (2, 0)), padding_mode="wrap")
        layers = [conv, nd.ConvLayerDist(2, 1, padding=2)]
        model = nd.ConvnetDist(layers, cost=nd.SumSquared(), seed=2, dtype="float64", scheme="deep_halo", **more)
        return trained(model, nd.ProcessGrid(comm, rows=comm.size, cols=1), (1, 5, 1))

    (expected,) = loopback.run(1, job)
    for found in loopback.run(3, lambda comm: job(comm, strips=2)):
        assert worst(found, expected) < 1e-10


def test_nothing_is_kept_between_the_layers_of_a_segment():
    def built(**more):
        layers = [nd.ConvLayer(8, 3, padding=1, activation=nd.Tanh()) for _ in range(8)]
        model = nd.Convnet([*layers, nd.GlobalAvgPoolingLayer(), nd.FCLayer(4)], **more)
        model.build((96, 64, 8), 2)
        return model

    whole, strips = built(), built(strips=4)
    assert [len(segment.plans) for segment in strips.compiled.segments] == [8]
    assert strips.compiled.memory(0) < 0.5 * whole.compiled.memory(0)
    x, labels = np.ones((2, 96, 64, 8), np.float32), np.zeros(2, int)
    assert strips.train_batch(x, labels) == pytest.approx(whole.train_batch(x, labels), rel=1e-5)


def test_a_pass_cannot_end_within_a_segment():
    model = nd.Convnet([nd.ConvLayer(2, 3), nd.ConvLayer(2, 3)], strips=2)
    model.build((9, 9, 1), 1)
    with pytest.raises(PassError, match="leave out strips"):
        optimal_stimulus(model, 0, [(0, 0, 0)])
    for wrong in (0, "all", 1.5):
        with pytest.raises(nd.ConfigError, match="strips"):
            nd.Convnet([nd.ConvLayer(2, 3)], strips=wrong)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_guard_of_halos_sees_segments(ranks):

    def job(comm):
        model = chain("halo", strips=3)
        model.build((23, 17, 2), 4, nd.ProcessGrid(comm))
        nd.DebugHalo(seed=0).guard(model)
        x = np.random.default_rng(0).normal(size=(4, 23, 17, 2))
        return model.train_batch(model.scatter(x), np.zeros((4, *model.output_shape)))

    plain = loopback.run(1, job)[0]
    assert loopback.run(ranks, job) == [pytest.approx(plain)] * ranks


def test_an_experiment_says_how_a_step_is_executed():
    def experiment(**how):
        model = nd.Convnet([nd.ConvLayer(4, 3, padding=1), nd.ConvLayer(4, 3), nd.FCLayer(4)], accumulate=2)
        data = nd.Synthetic(shape=(9, 8, 1), classes=4, train=8, test=4)
        return nd.FitExperiment(data, model, batch_size=4, dist_flag=False, **how)

    made = experiment(recompute=True, strips=3, sync="bucketed").model
    assert (made.accumulate, made.recompute, made.strips) == (2, True, 3)
    plain, other = (
        experiment(**how).run(hooks=[]).history[-1]["train_loss"] for how in ({}, {"strips": 2, "accumulate": 3})
    )
    assert other == pytest.approx(plain, rel=1e-5)
    for wrong in ({"strips": 0}, {"recompute": "no"}, {"sync": "never"}, {"accumulate": 0}):
        with pytest.raises(nd.ConfigError, match=next(iter(wrong))):
            experiment(**wrong)
    filters = nd.GB([nd.LocalFilteringLayer(2, 3), nd.FCLayer(4)])
    with pytest.raises(nd.ConfigError, match="strips: GB trains its stages one by one; leave out strips"):
        nd.FitExperiment(nd.Synthetic(shape=(9, 8, 1), classes=4, train=8, test=4), filters, strips=2)
