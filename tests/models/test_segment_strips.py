"""Strip-wise execution of segments equals execution of full tiles."""

import numpy as np
import pytest
from common_checks import max_relative_difference
from every_layer import build_every_layer, run_steps

import neondist as nd
from neondist.comm import loopback
from neondist.errors import PassOrderError
from neondist.models import optimal_stimulus


@pytest.mark.parametrize(("ranks", "replicas", "rows"), [(1, 1, 8), (3, 1, 1), (4, 2, 3), (6, 2, "auto")])
@pytest.mark.long
def test_every_layer(every_layer_steps, ranks, replicas, rows):

    def job(comm):
        model = build_every_layer("Dist", nd.ProcessGrid(comm, replicas=replicas), batch=8, strips=rows)
        assert model.compiled.segments
        sent = model.bytes_sent
        actual = run_steps(model)
        assert model.bytes_sent - sent == sum(model.compiled.bytes(comm.rank, batch) for batch in (8, 5))
        return actual

    for actual in loopback.run(ranks, job):
        assert max_relative_difference(actual, every_layer_steps) < 1e-10


def make_chain_model(scheme, **options):
    """Return layers that form one segment if nothing is exchanged between them, followed by others."""
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
    return nd.ConvnetDist(
        layers, cost=nd.SumSquared(), seed=2, dtype="float64", backend="numpy", scheme=scheme, **options
    )


def train(model, grid, shape=(23, 17, 2)):
    model.build(shape, 4, grid)
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(4, *shape)), rng.normal(size=(4, *model.output_shape))
    runs = [model.forward(model.scatter(x * factor)) for factor in (1, 2)]  # their strips alternate
    arrays = {f"dx {index}": model.gather_input(runs[index].backward(model.scatter_output(dy))) for index in (1, 0)}
    arrays |= {f"y {index}": model.gather(run.output) for index, run in enumerate(runs)}
    del runs
    model.train_batch(model.scatter(x), model.scatter_output(dy))
    arrays["evaluated"] = model.gather(model.fprop(model.scatter(x), training=False))
    return arrays | model.gradients() | model.state()


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("scheme", ["halo", "deep_halo(layers=3)", "overlap_tile(statistics=global)"])
@pytest.mark.long
def test_long_segments(ranks, scheme):
    def job(comm):
        expected = train(make_chain_model(scheme), nd.ProcessGrid(comm))
        for options in (
            {"strips": 1},
            {"strips": 2, "recompute": True},
            {"strips": 3, "accumulate": 2},
            {"strips": "auto"},
        ):
            model = make_chain_model(scheme, **options)
            assert max_relative_difference(train(model, nd.ProcessGrid(comm)), expected) < 1e-10, options
            lengths = [len(segment.plans) for segment in model.compiled.segments]
            longest = {"halo": 2, "deep_halo(layers=3)": 5}.get(scheme, 7) if comm.size > 1 else 7
            assert max(lengths) == longest or options.get("recompute")
        return True

    assert all(loopback.run(ranks, job))


def test_strips_of_padding_only():
    """Compute rows of padding only, on ranks without cells of the preceding map."""

    def job(comm, **options):
        conv = nd.ConvLayerDist(2, (4, 2), padding=((2, 2), (2, 0)), padding_mode="wrap")
        layers = [conv, nd.ConvLayerDist(2, 1, padding=2)]
        model = nd.ConvnetDist(layers, cost=nd.SumSquared(), seed=2, dtype="float64", scheme="deep_halo", **options)
        return train(model, nd.ProcessGrid(comm, rows=comm.size, cols=1), (1, 5, 1))

    (expected,) = loopback.run(1, job)
    for actual in loopback.run(3, lambda comm: job(comm, strips=2)):
        assert max_relative_difference(actual, expected) < 1e-10


def test_segments_keep_no_intermediate_arrays():
    def build_model(**options):
        layers = [nd.ConvLayer(8, 3, padding=1, activation=nd.Tanh()) for _ in range(8)]
        model = nd.Convnet([*layers, nd.GlobalAvgPoolingLayer(), nd.FCLayer(4)], **options)
        model.build((96, 64, 8), 2)
        return model

    full, strips = build_model(), build_model(strips=4)
    assert [len(segment.plans) for segment in strips.compiled.segments] == [8]
    assert strips.compiled.memory(0) < 0.5 * full.compiled.memory(0)
    x, labels = np.ones((2, 96, 64, 8), np.float32), np.zeros(2, int)
    assert strips.train_batch(x, labels) == pytest.approx(full.train_batch(x, labels), rel=1e-5)


def test_passes_cannot_end_in_a_segment():
    model = nd.Convnet([nd.ConvLayer(2, 3), nd.ConvLayer(2, 3)], strips=2)
    model.build((9, 9, 1), 1)
    with pytest.raises(PassOrderError, match="leave out strips"):
        optimal_stimulus(model, 0, [(0, 0, 0)])
    for invalid in (0, "all", 1.5):
        with pytest.raises(nd.ConfigError, match="strips"):
            nd.Convnet([nd.ConvLayer(2, 3)], strips=invalid)


@pytest.mark.parametrize("ranks", [1, 2])
def test_halo_guard_covers_segments(ranks):

    def job(comm):
        model = make_chain_model("halo", strips=3)
        model.build((23, 17, 2), 4, nd.ProcessGrid(comm))
        nd.DebugHalo(seed=0).guard(model)
        x = np.random.default_rng(0).normal(size=(4, 23, 17, 2))
        return model.train_batch(model.scatter(x), np.zeros((4, *model.output_shape)))

    plain = loopback.run(1, job)[0]
    assert loopback.run(ranks, job) == [pytest.approx(plain)] * ranks


def test_execution_options_of_experiments():
    def make_experiment(**options):
        model = nd.Convnet([nd.ConvLayer(4, 3, padding=1), nd.ConvLayer(4, 3), nd.FCLayer(4)], accumulate=2)
        data = nd.Synthetic(shape=(9, 8, 1), classes=4, train=8, test=4)
        return nd.FitExperiment(data, model, batch_size=4, dist_flag=False, **options)

    model = make_experiment(recompute=True, strips=3, sync="bucketed").model
    assert (model.accumulate, model.recompute, model.strips) == (2, True, 3)
    plain, other = (
        make_experiment(**options).run(hooks=[]).history[-1]["train_loss"]
        for options in ({}, {"strips": 2, "accumulate": 3})
    )
    assert other == pytest.approx(plain, rel=1e-5)
    for invalid in ({"strips": 0}, {"recompute": "no"}, {"sync": "never"}, {"accumulate": 0}):
        with pytest.raises(nd.ConfigError, match=next(iter(invalid))):
            make_experiment(**invalid)
    filters = nd.GB([nd.LocalFilteringLayer(2, 3), nd.FCLayer(4)])
    with pytest.raises(
        nd.ConfigError, match="strips: not supported by GB, which trains its stages one by one; leave out strips"
    ):
        nd.FitExperiment(nd.Synthetic(shape=(9, 8, 1), classes=4, train=8, test=4), filters, strips=2)
