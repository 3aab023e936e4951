"""Vectors of which each rank has its range alone, since the layers that read them want no more."""

import numpy as np
import pytest
from support import worst

import neondist as nd
from neondist.comm import loopback
from neondist.models.stimulus import optimal_stimulus
from neondist.runtime.observers.whereabouts import Whereabouts

SHAPE, BATCH = (5, 4, 2), 6


class MeanFree(nd.Tanh):
    """Looks at all channels, on the base of an activation that does not."""

    def fprop(self, z):
        return z - z.mean(axis=-1, keepdims=True)

    def bprop(self, y, dy):
        return dy - dy.mean(axis=-1, keepdims=True)


class FlippedFC(nd.FCLayer):
    """Its own forward looks at all features."""

    def forward(self, ctx, view):
        return super().forward(ctx, view)[:, ::-1]

    def backward(self, ctx, dy):
        return super().backward(ctx, dy[:, ::-1])


class FlippedFCDist(nd.Dist, FlippedFC):
    pass


class Mirror(nd.Layer):
    """Says nothing of vectors, and gets whole ones."""

    def forward(self, ctx, view):
        return 2 * view[:, ::-1]

    def backward(self, ctx, dy):
        return 2 * dy[:, ::-1]


class MirrorDist(nd.Dist, Mirror):
    pass


class Doubled(nd.Layer):
    """Takes ranges, writes its gradient where it is wanted, and keeps its vectors whole for others."""

    layout = nd.Shard

    def reductions_for(self, input_shape):
        return [nd.Reduction("forward", "tiles", each=input_shape[0])]

    def reduce(self, ctx, view):
        whole, (lo, hi) = np.zeros((len(view), *self.input_shape)), self.range
        whole[:, lo:hi] = 2 * view
        return whole

    def forward(self, ctx, view):
        return ctx.reduced

    def backward(self, ctx, dy):
        lo, hi = self.range
        ctx.out[...] = 2 * dy[:, lo:hi]
        return ctx.offered

    @property
    def range(self):
        grid = self.context.grid
        return next(nd.Shard(self.input_shape).inputs(grid.shape, grid.tile).axes())


class DoubledDist(nd.Dist, Doubled):
    pass


def fc(n, activation=None):
    return nd.FCLayerDist(n, activation=activation)


# layers, and how many vectors stay cut
CHAINS = {
    "one after the other": (lambda: [fc(7, nd.Tanh()), fc(3, nd.ReLU()), fc(5, nd.Logistic()), fc(4)], 3),
    "pooled": (lambda: [nd.ConvLayerDist(3, 3), nd.GlobalAvgPoolingLayerDist(), fc(4)], 1),
    "a layer of a user's that says so": (lambda: [fc(5), DoubledDist(), fc(5), MirrorDist(), DoubledDist(),
                                                  fc(4)], 3),
    "others between": (lambda: [fc(6, nd.Tanh()), nd.BatchNormLayerDist(), fc(5), nd.DropoutLayerDist(0.3), fc(5),
                                MirrorDist(), fc(4), nd.ActivationLayerDist(nd.Tanh()), fc(4)], 0),
    "over all channels": (lambda: [fc(5, nd.Softmax()), fc(5, MeanFree()), FlippedFCDist(3), fc(4)], 0),
    "read twice": (lambda: [fc(5), nd.Sum([fc(4), [fc(3), fc(4)]]), fc(4)], 2),
    "read by others too": (lambda: [fc(4), nd.Sum([fc(4), MirrorDist(), []]), fc(4)], 0),
}  # fmt: skip
GRIDS = {3: {}, 4: {"replicas": 2}, 6: {"rows": 2, "cols": 3}}


def model_of(name, **arguments):
    layers = CHAINS[name][0]()
    return nd.ConvnetDist(layers, optimizer=nd.Adam(0.01), seed=2, dtype="float64", backend="numpy", **arguments)


def data(model, batch=BATCH):
    x = np.random.default_rng(1).normal(size=(batch, *SHAPE))
    return model.scatter(x), np.arange(batch) % 4


def trained(grid, name, guarded=False, **arguments):
    model = model_of(name, **arguments)
    model.build(SHAPE, BATCH, grid)
    if guarded:
        nd.DebugHalo(1).guard(model)
    x, targets = data(model)
    losses = [model.train_batch(x, targets) for _ in range(3)]
    y = model.fprop(x, training=False)
    found = model.state() | model.gradients() | {"losses": np.array(losses), "y": model.gather(y)}
    return found | {"dx": model.gather_input(model.bprop(np.cos(y)))}


def on(ranks, job):
    return loopback.run(ranks, lambda comm: job(nd.ProcessGrid(comm, **GRIDS.get(ranks, {}))))


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.long
def test_which_vectors_stay_cut_and_that_it_changes_no_number(name):
    assert len(model_of(name).plan(SHAPE).graph.shards) == CHAINS[name][1]
    expected = on(1, lambda grid: trained(grid, name))[0]
    for ranks in GRIDS:
        for found in on(ranks, lambda grid: trained(grid, name)):
            assert worst(found, expected) < 1e-10, ranks


@pytest.mark.parametrize(
    "arguments", [{"accumulate": 2}, {"guarded": True}, {"sync": "bucketed"}, {"recompute": True}], ids=str
)
@pytest.mark.parametrize("name", ["one after the other", "a layer of a user's that says so"])
def test_with_all_else(name, arguments):
    plain = {"guarded": arguments.get("guarded", False)} if "accumulate" not in arguments else arguments
    expected = on(1, lambda grid: trained(grid, name, **plain))[0]
    for found in on(4, lambda grid: trained(grid, name, **arguments)):
        assert worst(found, expected) < 1e-10


def test_interleaved_passes_have_their_own_ranges():
    def body(grid):
        model = model_of("one after the other")
        model.build(SHAPE, BATCH, grid)
        x = data(model)[0]
        first, second = model.forward(x), model.forward(-x[:2])
        found = [model.gather_input(run.backward(np.cos(run.output))) for run in (first, second, first)]
        return dict(enumerate(found))

    expected = on(1, body)[0]
    np.testing.assert_array_equal(expected[0], expected[2])
    for found in on(3, body):
        assert worst(found, expected) < 1e-10


def test_who_waits_says_for_what():
    class Notes(Whereabouts):
        def begin(self, what, name, direction, subject):
            super().begin(what, name, direction, subject)
            said.extend([str(self)] * (what == "wait"))

    def body(grid):
        model = model_of("pooled")
        model.build(SHAPE, BATCH, grid)
        with grid.observers.watched_by(Notes(grid)):
            model.train_batch(*data(model))

    said = []
    on(3, body)
    for way in ("forward", "backward"):
        where = f"{way} pass of layer 'global_avg_pooling1': waits in a redistribution over the tiles of replica 0"
        assert said.count(where) == 3
    assert said.count("forward pass of layer 'fc1': waits in a sum over the tiles of replica 0") == 3


def test_whoever_stops_at_a_vector_has_all_of_it():
    def body(grid):
        model = model_of("one after the other")
        model.build(SHAPE, BATCH, grid)
        x, values = optimal_stimulus(model, 1, [(0,), (2,)], steps=5)
        return {"x": model.gather_input(x)[:2], "values": values}

    expected = on(1, body)[0]
    for ranks in GRIDS:
        for found in on(ranks, body):
            assert worst(found, expected) < 1e-10


def test_a_network_for_digits_sends_less():
    """A shard goes to each other rank, there and back: half of what two sums over rings take."""
    sizes, tiles, batch = (512, 512, 10), 4, 100
    model = nd.MLPDist([fc(512, nd.ReLU()), fc(512, nd.ReLU()), fc(10)], dtype="float32")
    plan = model.plan((28, 28, 1), nd.GridShape(1, 2, 2), batch)
    assert plan.redistributed(0) == {f"fc{at}": 2 * (tiles - 1) * batch * sizes[at - 1] // tiles * 4 for at in (1, 2)}
    assert {name: count for name, count in plan.reduced(0).items() if name.startswith("fc")} == {"fc3": batch * 10 * 4}
