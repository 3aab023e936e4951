"""GB: decoder, cost, gradient and training phases, on every grid."""

from math import prod

import numpy as np
import pytest
from common_checks import max_relative_difference
from gb_runs import KINDS, SHAPE, build_gb, make_gb, pretrain_and_fit, run_pretraining_steps

import neondist as nd
from neondist.comm import loopback
from neondist.errors import ConfigError

GRIDS = [(2, 1, 1), (6, 1, 2), (6, 2, 3)]
ROWS_AND_COLS_BY_RANK_COUNT = {1: (1, 1), 4: (2, 2), 6: (3, 2)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.long
def test_pretraining_matches_on_every_grid(kind):
    expected = run_pretraining_steps(kind)
    for ranks, replicas, rows in (GRIDS[0], GRIDS[1 + list(KINDS).index(kind) % 2]):

        def job(comm, replicas=replicas, rows=rows):
            return run_pretraining_steps(kind, nd.ProcessGrid(comm, replicas=replicas, rows=rows))

        for actual in loopback.run(ranks, job):
            assert max_relative_difference(actual, expected) < 1e-9, (ranks, replicas)


@pytest.mark.long
def test_runs_match_on_every_grid():
    expected = pretrain_and_fit()
    assert expected["pretraining"][2, 0] < expected["pretraining"][0, 0]
    for ranks, replicas in ((4, 1), (6, 2)):
        for actual in loopback.run(
            ranks, lambda comm, replicas=replicas: pretrain_and_fit(nd.ProcessGrid(comm, replicas=replicas))
        ):
            assert max_relative_difference(actual, expected) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.long
def test_decoder_is_the_adjoint_of_the_encoder(kind):
    def job(comm):
        model, x = build_gb(kind, nd.ProcessGrid(comm))
        stage = model.stages[0]
        z = stage.encode(x)
        dz = np.random.default_rng(comm.rank).normal(size=z.shape)
        decoded = stage.decode(dz)
        sums = np.array([np.sum(z * dz), np.sum(x * decoded), np.sum(np.abs(x * decoded))])
        return stage.output.sum_over_ranks(sums, replicas=True)

    for ranks in (1, 4, 6):
        for left, right, scale in loopback.run(ranks, job):
            assert abs(left - right) < 1e-12 * scale


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_matches_finite_differences(kind):
    model, x = build_gb(kind, batch=2)
    model.sparsity = 0.7
    for stage in model.stages:
        stage.compute_cost_and_gradient(x)
        gradient, weights = stage.layer.grads["weights"].copy(), stage.layer.params["weights"]
        direction = np.random.default_rng(0).normal(size=weights.shape)
        step = 1e-5 * direction
        weights += step
        up = stage.cost.local_sum(stage.fprop(x))
        weights -= 2 * step
        down = stage.cost.local_sum(stage.fprop(x))
        weights += step
        assert (up - down) / 2e-5 == pytest.approx(np.sum(gradient * direction), rel=1e-7)


def test_cost_matches_the_published_formula():
    """Compare with a dense matrix obtained by encoding unit vectors."""
    model, x = build_gb("padded", batch=2)
    stage = model.stages[0]
    y = stage.fprop(x)
    cells = prod(SHAPE)
    model.build(SHAPE, cells)
    encoder = model.stages[0].encode(np.eye(cells).reshape(cells, *SHAPE)).reshape(cells, -1).T
    flat = x.reshape(2, cells)
    z = flat @ encoder.T
    pooled, _ = model.stages[0].pool.window_sums_of_squares_with_view(
        z.reshape(2, *model.layers[0].output_shape), nd.halo.Phase()
    )
    residual = flat - z @ encoder
    expected = 0.5 * np.sum(residual**2) + 0.1 * np.sum(np.sqrt(0.01 + pooled))
    assert stage.cost.local_sum(y) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", ["unshared", "padded", "blocks"])
def test_pretraining_traffic_matches_the_plan(kind):
    model, batch = make_gb(kind, dist=True), 6

    def job(comm):
        grid = nd.ProcessGrid(comm)
        rank_model, x = build_gb(kind, grid, batch)
        sums, sent = [], {}
        for group in (grid.world, grid.tile_comm):
            group.allreduce = lambda a, *op, add=group.allreduce: (sums.append(a.size), add(a, *op))
        for stage in rank_model.stages:
            before = rank_model.bytes_sent
            stage.begin_epoch(0)
            stage.train_batch(x, None, batch)
            sent[stage.name] = rank_model.bytes_sent - before
        return sent, sums, rank_model.layers[0].params["weights"].size

    for ranks in (1, 4, 6):
        plans = model.plan(SHAPE, nd.GridShape(1, *ROWS_AND_COLS_BY_RANK_COUNT[ranks]))
        planned = plans.pretraining_elements_sent
        assert all(sum(counts) > 0 for counts in planned.values()) or ranks == 1
        for tile, (sent, sums, size) in enumerate(loopback.run(ranks, job)):
            assert sent == {name: 8 * batch * counts[tile] for name, counts in planned.items()}
            assert sums == ([size, 17, 17] if kind == "blocks" else [17, 17])  # shared weights; cost and flags


def test_ranks_hold_only_their_filters():
    total = build_gb("unshared")[0].layers[0].params["weights"].size

    def job(comm):
        return build_gb("unshared", nd.ProcessGrid(comm))[0].layers[0].params["weights"].size

    held = loopback.run(4, job)
    assert sum(held) == total
    assert max(held) < 0.4 * total
    assert held == make_gb("unshared", dist=True).plan(SHAPE, nd.GridShape(1, 2, 2))[0].num_parameters_by_tile


def test_initial_epochs_train_only_the_head():
    model, x = build_gb("unshared", num_initial_epochs=1)
    labels = np.arange(6) % 4
    initial = model.state()
    model.begin_epoch(0)
    for _ in range(2):
        model.train_batch(x, labels)
    middle = model.state()
    changed = {name.split("/")[0] for name in initial if not np.array_equal(initial[name], middle[name])}
    assert changed == {"fc1", "fc2"}
    model.begin_epoch(1)
    assert all(np.all(slot == 0) for slot in model.slots.values())
    model.train_batch(x, labels)
    final = model.state()
    assert all(np.any(middle[name] != final[name]) for name in middle)
    # Adam's first step has the size of the learning rate if its step count is reset
    step = np.abs(final["local_filtering1/weights"] - middle["local_filtering1/weights"])
    assert np.median(step) == pytest.approx(0.01, rel=1e-3)
    model.fprop(x)
    assert model.bprop(np.ones((6, 4))).shape == x.shape  # the full model is differentiated again


def test_schedule_applies_to_pretraining():
    """The rate is almost zero from the second epoch of each stage on."""
    data = nd.Synthetic((12, 10, 1), classes=4, train=16, test=4)
    data.open(nd.ProcessGrid.serial())
    weights = []
    for epochs in (0, 1, 3):
        optimizer = nd.SGD(1e-3, schedule=nd.StepDecay(1, 1e-30))
        model = make_gb("unshared", dist=False, num_pretrain_epochs=epochs, pretrain_optimizer=optimizer)
        model.build(data.sample_shape, 8)
        nd.pretrain(model, data, 8)
        weights.append([layer.params["weights"].copy() for layer in model.leaves if layer.is_pretrained_as_autoencoder])
    for untrained, after_one, after_three in zip(*weights, strict=True):
        np.testing.assert_array_equal(after_one, after_three)
        assert not np.array_equal(untrained, after_one)


def test_stage_inputs_use_inference_mode():
    """Dropout is off; running statistics are used and not updated."""
    layers = [
        nd.BatchNormLayer(name="norm"),
        nd.DropoutLayer(0.5),
        nd.LocalFilteringLayer(2, 3),
        nd.L2PoolingLayer(2, 1),
        nd.FCLayer(3),
    ]
    model = nd.GB(layers, backend="numpy", dtype="float64")
    model.build(SHAPE, 4)
    model.load_state(model.state() | {"norm/mean": np.array([1.0, -2.0]), "norm/var": np.array([4.0, 0.25])})
    x, stage = np.random.default_rng(0).normal(size=(4, *SHAPE)), model.stages[0]
    stage.begin_epoch(0)
    stage.train_batch(x)
    output = stage.fprop(x, training=True)
    np.testing.assert_allclose(output.x, (x - [1.0, -2.0]) * [0.5, 2.0], rtol=1e-4)
    np.testing.assert_array_equal(model.state()["norm/mean"], [1.0, -2.0])


@pytest.mark.parametrize("name", ["overlapping tiles", "following segment", "segment across pooling"])
def test_segments_around_a_stage(name):
    """Segments before a stage read overlapping tiles; segments after it pool cells of other tiles, counted once."""

    def make_layers(scheme):
        preceding, stage, pool = [], nd.LocalFilteringLayerDist(2, 3), nd.L2PoolingLayerDist(2, 1)
        following = [nd.FCLayerDist(4)]
        if name == "overlapping tiles":
            preceding = [nd.ConvLayerDist(2, 3, padding=1, activation=nd.Tanh(), scheme=scheme) for _ in range(2)]
        else:
            pool = nd.L2PoolingLayerDist(2, 1, scheme=scheme)
            following = [nd.ConvLayerDist(2, 3, padding=1, scheme=scheme), *following]
        if name == "following segment":
            following.insert(0, nd.MaxPoolingLayerDist(2, 1, scheme=scheme))
        return [*preceding, stage, pool, *following]

    def job(comm, scheme):
        data, grid = nd.Synthetic((11, 10, 1), classes=4, train=16, test=8), nd.ProcessGrid(comm)
        model = nd.GBDist(make_layers(scheme), dtype="float64", backend="numpy", seed=2)
        data.open(grid.with_tiles(model.plan(data.sample_shape, grid.shape).overlapping_tiles))
        model.build(data.sample_shape, 8, grid)
        losses = [record["test_loss"] for record in nd.pretrain(model, data, 8)]
        losses += [record["test_loss"] for record in nd.fit(model, data, epochs=2, batch_size=8)]
        layer = model.stages[0].end_layer_index - 1
        x, values = nd.models.optimal_stimulus(model, layer, [(1, 1, 0), (5, 4, 1)], steps=3)
        return np.array(losses), values, model.gather_input(x)

    (expected,) = loopback.run(1, lambda comm: job(comm, "halo"))
    scheme = "overlap_tile" if name == "overlapping tiles" else "deep_halo(layers=3)"
    for actual in loopback.run(4, lambda comm: job(comm, scheme)):
        for actual_array, expected_array in zip(actual, expected, strict=True):
            np.testing.assert_allclose(actual_array, expected_array, rtol=1e-9, atol=1e-12)


def test_orthonormal_filters():
    model, _ = build_gb("orthonormal")
    layer = model.layers[0]
    layer.orthonormalise()
    filters = layer.params["weights"].reshape(-1, 18, 4)
    length = np.sqrt(min(1, prod(SHAPE) / prod(layer.output_shape)))
    np.testing.assert_allclose(
        filters.swapaxes(1, 2) @ filters, length**2 * np.eye(4)[None] + 0 * filters[:, :4], atol=1e-12
    )


def test_shared_filters_equal_a_convolution():
    x = np.random.default_rng(0).normal(size=(2, *SHAPE))
    local = nd.Convnet([nd.LocalFilteringLayer(3, 3, 2, padding=1, shared=True)], dtype="float64")
    conv = nd.Convnet([nd.ConvLayer(3, 3, 2, padding=1, bias=False)], dtype="float64")
    for model in (local, conv):
        model.build(SHAPE, 2)
    conv.layers[0].params["weights"] = local.layers[0].params["weights"][0, 0]
    y = local.fprop(x)
    np.testing.assert_allclose(y, conv.fprop(x), atol=1e-12)
    np.testing.assert_allclose(local.bprop(y), conv.bprop(y), atol=1e-12)
    np.testing.assert_allclose(local.layers[0].grads["weights"][0, 0], conv.layers[0].grads["weights"], atol=1e-11)


def test_distribute_keeps_the_filters():
    model, x = build_gb("blocks")
    stage = model.stages[0]
    expected = stage.fprop(x).residual

    def job(comm):
        twin = nd.distribute(model)
        twin.build(SHAPE, 6, nd.ProcessGrid(comm))
        stage = twin.stages[0]
        return stage.output.gather(stage.fprop(twin.scatter(x)).residual)

    for actual in loopback.run(4, job):
        np.testing.assert_allclose(actual, expected, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nd.GB([nd.FCLayer(3)]), "pretrains LocalFiltering layers, but there are none"),
        (lambda: make_gb("unshared", False, epsilon=0.0), "epsilon: expected a number above 0, got 0.0"),
        (
            lambda: make_gb("unshared", False, num_pretrain_epochs=-1),
            "num_pretrain_epochs: expected an integer of at least 0, got -1",
        ),
        (lambda: nd.LocalFilteringLayer(2, 3, shared=0), "shared: expected true, false, or block sizes of at least 1"),
        (
            lambda: nd.GB([nd.LocalFilteringLayer(2, 3, shared=(2, 2, 2))]).build((8, 8, 1), 2),
            "expected one number, or 2 numbers, one per spatial axis",
        ),
    ],
)
def test_error_messages(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
