"""Vectors that stay sharded between layers."""

import numpy as np
import pytest
from common_checks import max_relative_difference

import neondist as nd
from neondist.comm import loopback
from neondist.models.stimulus import optimal_stimulus
from neondist.runtime.observers.current_activity import CurrentActivity

SHAPE, BATCH = (5, 4, 2), 6


class MeanFree(nd.Tanh):
    """Activation over all channels, derived from an elementwise one."""

    def fprop(self, z):
        return z - z.mean(axis=-1, keepdims=True)

    def bprop(self, y, dy):
        return dy - dy.mean(axis=-1, keepdims=True)


class FlippedFC(nd.FCLayer):
    """FC layer whose forward reads all features."""

    def forward(self, ctx, view):
        return super().forward(ctx, view)[:, ::-1]

    def backward(self, ctx, dy):
        return super().backward(ctx, dy[:, ::-1])


class FlippedFCDist(nd.Dist, FlippedFC):
    pass


class Mirror(nd.Layer):
    """Layer that declares no shards, and so receives full vectors."""

    def forward(self, ctx, view):
        return 2 * view[:, ::-1]

    def backward(self, ctx, dy):
        return 2 * dy[:, ::-1]


class MirrorDist(nd.Dist, Mirror):
    pass


class Doubling(nd.Layer):
    """Layer that takes shards, writes its gradient in place, and returns full vectors."""

    layout = nd.Shard

    def reductions_for(self, input_shape):
        return [nd.Reduction("forward", "tiles", result_elements_per_sample=input_shape[0])]

    def reduce(self, ctx, view):
        full, (lo, hi) = np.zeros((len(view), *self.input_shape)), self.range
        full[:, lo:hi] = 2 * view
        return full

    def forward(self, ctx, view):
        return ctx.reduced

    def backward(self, ctx, dy):
        lo, hi = self.range
        ctx.out[...] = 2 * dy[:, lo:hi]
        return ctx.accessed_out

    @property
    def range(self):
        grid = self.context.grid
        return next(nd.Shard(self.input_shape).input_box(grid.shape, grid.tile).axes())


class DoublingDist(nd.Dist, Doubling):
    pass


def make_fc(features, activation=None):
    return nd.FCLayerDist(features, activation=activation)


# layers, and the number of vectors that stay sharded
LAYER_CHAINS = {
    "fully connected chain": (
        lambda: [make_fc(7, nd.Tanh()), make_fc(3, nd.ReLU()), make_fc(5, nd.Logistic()), make_fc(4)],
        3,
    ),
    "pooled": (lambda: [nd.ConvLayerDist(3, 3), nd.GlobalAvgPoolingLayerDist(), make_fc(4)], 1),
    "custom layer of shards": (
        lambda: [make_fc(5), DoublingDist(), make_fc(5), MirrorDist(), DoublingDist(), make_fc(4)],
        3,
    ),
    "other layers between": (
        lambda: [
            make_fc(6, nd.Tanh()),
            nd.BatchNormLayerDist(),
            make_fc(5),
            nd.DropoutLayerDist(0.3),
            make_fc(5),
            MirrorDist(),
            make_fc(4),
            nd.ActivationLayerDist(nd.Tanh()),
            make_fc(4),
        ],
        0,
    ),
    "functions of all channels": (
        lambda: [make_fc(5, nd.Softmax()), make_fc(5, MeanFree()), FlippedFCDist(3), make_fc(4)],
        0,
    ),
    "read twice": (lambda: [make_fc(5), nd.Sum([make_fc(4), [make_fc(3), make_fc(4)]]), make_fc(4)], 2),
    "also read in full": (lambda: [make_fc(4), nd.Sum([make_fc(4), MirrorDist(), []]), make_fc(4)], 0),
}
GRID_OPTIONS_BY_RANK_COUNT = {3: {}, 4: {"replicas": 2}, 6: {"rows": 2, "cols": 3}}


def make_model(name, **arguments):
    layers = LAYER_CHAINS[name][0]()
    return nd.ConvnetDist(layers, optimizer=nd.Adam(0.01), seed=2, dtype="float64", backend="numpy", **arguments)


def draw_batch(model, batch=BATCH):
    x = np.random.default_rng(1).normal(size=(batch, *SHAPE))
    return model.scatter(x), np.arange(batch) % 4


def train(grid, name, guarded=False, **arguments):
    model = make_model(name, **arguments)
    model.build(SHAPE, BATCH, grid)
    if guarded:
        nd.DebugHalo(1).guard(model)
    x, targets = draw_batch(model)
    losses = [model.train_batch(x, targets) for _ in range(3)]
    y = model.fprop(x, training=False)
    arrays = model.state() | model.gradients() | {"losses": np.array(losses), "y": model.gather(y)}
    return arrays | {"dx": model.gather_input(model.bprop(np.cos(y)))}


def run_on_grid(ranks, job):
    return loopback.run(ranks, lambda comm: job(nd.ProcessGrid(comm, **GRID_OPTIONS_BY_RANK_COUNT.get(ranks, {}))))


@pytest.mark.parametrize("name", LAYER_CHAINS)
@pytest.mark.long
def test_sharded_vectors_keep_results(name):
    assert len(make_model(name).plan(SHAPE).graph.sharded_vectors) == LAYER_CHAINS[name][1]
    expected = run_on_grid(1, lambda grid: train(grid, name))[0]
    for ranks in GRID_OPTIONS_BY_RANK_COUNT:
        for actual in run_on_grid(ranks, lambda grid: train(grid, name)):
            assert max_relative_difference(actual, expected) < 1e-10, ranks


@pytest.mark.parametrize(
    "arguments", [{"accumulate": 2}, {"guarded": True}, {"sync": "bucketed"}, {"recompute": True}], ids=str
)
@pytest.mark.parametrize("name", ["fully connected chain", "custom layer of shards"])
def test_shards_with_other_options(name, arguments):
    plain = {"guarded": arguments.get("guarded", False)} if "accumulate" not in arguments else arguments
    expected = run_on_grid(1, lambda grid: train(grid, name, **plain))[0]
    for actual in run_on_grid(4, lambda grid: train(grid, name, **arguments)):
        assert max_relative_difference(actual, expected) < 1e-10


def test_interleaved_passes_have_separate_shards():
    def body(grid):
        model = make_model("fully connected chain")
        model.build(SHAPE, BATCH, grid)
        x = draw_batch(model)[0]
        first, second = model.forward(x), model.forward(-x[:2])
        actual = [model.gather_input(run.backward(np.cos(run.output))) for run in (first, second, first)]
        return dict(enumerate(actual))

    expected = run_on_grid(1, body)[0]
    np.testing.assert_array_equal(expected[0], expected[2])
    for actual in run_on_grid(3, body):
        assert max_relative_difference(actual, expected) < 1e-10


def test_waits_name_the_layer_and_the_operation():
    class WaitRecorder(CurrentActivity):
        def on_begin(self, event, name, direction, subject):
            super().on_begin(event, name, direction, subject)
            waits.extend([str(self)] * (event == "wait"))

    def body(grid):
        model = make_model("pooled")
        model.build(SHAPE, BATCH, grid)
        with grid.observers.add_temporarily(WaitRecorder(grid)):
            model.train_batch(*draw_batch(model))

    waits = []
    run_on_grid(3, body)
    for direction in ("forward", "backward"):
        message = (
            f"{direction} pass of layer 'global_avg_pooling1': waiting in a redistribution over the tiles of replica 0"
        )
        assert waits.count(message) == 3
    assert waits.count("forward pass of layer 'fc1': waiting in a sum over the tiles of replica 0") == 3


def test_passes_ending_at_a_vector_gather_it():
    def body(grid):
        model = make_model("fully connected chain")
        model.build(SHAPE, BATCH, grid)
        x, values = optimal_stimulus(model, 1, [(0,), (2,)], steps=5)
        return {"x": model.gather_input(x)[:2], "values": values}

    expected = run_on_grid(1, body)[0]
    for ranks in GRID_OPTIONS_BY_RANK_COUNT:
        for actual in run_on_grid(ranks, body):
            assert max_relative_difference(actual, expected) < 1e-10


def test_traffic_of_a_digits_network():
    """Shards go to every other rank in both directions: half the traffic of two ring all-reduces."""
    sizes, tiles, batch = (512, 512, 10), 4, 100
    model = nd.MLPDist([make_fc(512, nd.ReLU()), make_fc(512, nd.ReLU()), make_fc(10)], dtype="float32")
    plan = model.plan((28, 28, 1), nd.GridShape(1, 2, 2), batch)
    assert plan.redistribution_bytes(0) == {
        f"fc{index}": 2 * (tiles - 1) * batch * sizes[index - 1] // tiles * 4 for index in (1, 2)
    }
    assert {name: count for name, count in plan.reduction_bytes(0).items() if name.startswith("fc")} == {
        "fc3": batch * 10 * 4
    }


class WholeOutputs(Doubling):
    """Layer of shards whose forward broadcasts this rank's feature to all features."""

    layout = nd.Shard

    def forward(self, ctx, view):
        return ctx.reduced + np.zeros(self.output_shape)


class WholeOutputsDist(nd.Dist, WholeOutputs):
    pass


def test_outputs_that_are_no_shard_are_rejected():
    def job(comm):
        model = nd.MLPDist([WholeOutputsDist(), DoublingDist()], dtype="float64", backend="numpy")
        model.build((3,), BATCH, nd.ProcessGrid(comm))
        model.fprop(np.ones((BATCH, 3)))

    message = r"layer 'whole_outputs1' .*: forward returns an array of shape \(6, 3\); expected \(6, 1\)"
    with pytest.raises(nd.UserError, match=message):
        loopback.run(3, job)
