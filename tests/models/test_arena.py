"""Memory that arrays share: what lives at one moment never overlaps, and no layer can be hurt by it."""

import tracemalloc
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from present import NAMES
from turns import some

import neondist as nd
from neondist.plan.memory import LiveRange, pack
from neondist.runtime import Arena, LayerTask


@example([LiveRange(3, 5, 5), LiveRange(1, 2, 6), LiveRange(5, 0, 1), LiveRange(4, 0, 3), LiveRange(1, 1, 2)])
@given(st.lists(st.builds(LiveRange, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_what_meets_does_not_overlap(spans):
    spans = [LiveRange(n, min(a, b), max(a, b)) for n, a, b in spans]
    places, length = pack(spans)
    cells = [set(range(place, place + span.numbers)) for place, span in zip(places, spans, strict=True)]
    for at, span in enumerate(spans):
        assert max(cells[at], default=-1) < length
        assert not any(cells[at] & cells[other] for other in range(at) if span.meets(spans[other]))
    most = max((sum(s.numbers for s in spans if s.first <= t <= s.last) for t in range(10)), default=0)
    assert most <= length <= sum(span.numbers for span in spans)


class Keeper(nd.Layer):
    """A naive layer that keeps its view and its output, and returns what it got wherever it can."""

    def forward(self, ctx, view):
        ctx.save(view=view)
        return view

    def backward(self, ctx, dy):
        return dy + 0 * ctx.view


class Squarer(nd.Layer):
    """A naive layer whose gradient is memory that it got in the forward pass."""

    def forward(self, ctx, view):
        ctx.save(view=view, half=view / 2)
        return view * view / 2

    def backward(self, ctx, dy):
        ctx.half *= 2 * dy
        ctx.save(half=ctx.view / 2, given=ctx.half)
        return ctx.given


class Passer(nd.Layer):
    """A naive layer that returns what it got, with an activation that works in place."""

    activation = nd.ReLU()

    def forward(self, ctx, view):
        return view

    def backward(self, ctx, dy):
        return dy


class Liar(nd.Layer):
    """It says that it needs neither its input nor its output, keeps both, and is right all the same."""

    saves_input = saves_output = False

    def forward(self, ctx, view):
        y = ctx.out
        np.sin(view, out=y)
        ctx.save(view=view, y=y)
        return y

    def backward(self, ctx, dy):
        np.testing.assert_allclose(ctx.y, np.sin(ctx.view))
        return dy * np.cos(ctx.view)


def conv(**more):
    return nd.ConvLayer(3, 3, padding=1, activation=nd.ReLU(), **more)


def networks():
    pool, tanh = nd.MaxPoolingLayer, nd.Tanh()
    return {
        "plain": [conv(), conv(stride=2), pool(2), conv(), nd.FCLayer(4)],
        "naive": [conv(), Keeper(), conv(), Keeper(), Squarer(), pool(2), Keeper(), conv(), Squarer()],
        "identity first and last": [Keeper(), conv(), Keeper()],
        "residual": [conv(), nd.Sum([[conv(), Keeper(), conv()], []]), conv(), nd.Sum([[], Keeper()])],
        "two branches": [conv(), nd.Sum([[conv(), conv()], conv()]), conv()],
        "identities": [nd.ConvLayer(3, 3, padding=1, activation=tanh), nd.Sum([[], []]), [], conv()],
        "nested": [
            conv(),
            nd.Sum([[conv(), nd.Sum([conv(), []]), nd.Sum([[], conv()])], []]),
            nd.Concat([[], [nd.Concat([conv(), [], [conv(), Keeper()]])], [[conv()], Squarer()]]),
            nd.Sum([[], []]),
            [nd.Concat([[conv()], conv()])],
            nd.Sum([[nd.Sum([conv(), conv()])], [conv()]]),
        ],
        "repeated shortcut": [
            conv(),
            nd.Sum([[nd.ConvLayer(6, 3, padding=1)], [nd.Concat([[], []])]]),
            nd.ActivationLayer(nd.ReLU()),
        ],
        "containers of identities": [
            conv(),
            nd.Sum([[nd.ConvLayer(6, 3, padding=1)], [nd.Concat([[], []])]]),
            nd.ActivationLayer(tanh),
            nd.Concat([[nd.Sum([[], [[]]]), conv()], nd.Sum([[nd.Sum([[]])]]), []]),
            nd.BatchNormLayer(),
            nd.Concat([[nd.Concat([[], []]), Keeper()], [[], nd.ConvLayer(3, 1, activation=tanh)]]),
            nd.Sum([[], [nd.Concat([[]])]]),
        ],
        "liars": [conv(), Liar(), conv(), nd.Sum([Liar(), [conv(), Liar()]]), Liar(), conv(), pool(2), Liar()],
        "passers": [nd.Sum([Passer(), []]), conv(), nd.Concat([[], Passer(), [Passer(), Passer()]]), Passer()],
        "empty lists first": [[], [[], conv(), [[[]], conv()]], nd.Sequential([nd.Sequential([]), Squarer()]), conv()],
        "branches first": [nd.Concat([conv(), [], [nd.Sum([conv(), conv()])]]), conv()],
        "skip": [conv(), nd.Concat([[pool(2), conv(), nd.UpsampleLayer(2)], [], conv()]), [conv()]],
        "normalised": [conv(), nd.BatchNormLayer(), nd.DropoutLayer(0.3), nd.L2PoolingLayer(2), nd.LCNLayer(3)],
        "pools": [pool(3, 1, 1), nd.ActivationLayer(tanh), nd.GlobalAvgPoolingLayer(), nd.FCLayer(4)],
    }


class Apart(Arena):
    """Nothing shares memory."""

    def __init__(self, *args):
        super().__init__(*args)
        self.places = np.cumsum([0, *(live.numbers for live in self.ranges[:-1])]).tolist() if self.ranges else []
        self.length = sum(live.numbers for live in self.ranges)


class PoisonTask(LayerTask):
    """Before a layer works, all that does not live at that moment is NaN; memory is apart."""

    def _forward(self, runs, inputs):
        for run in runs:
            poison(run, self.at)
        return super()._forward(runs, inputs)

    def _backward(self, runs, dys, needed):
        for run in runs:
            poison(run, 2 * run.workspace.plan.turn - 1 - self.at)
        return super()._backward(runs, dys, needed)


def poison(run, moment):
    arena = run.workspace.arena
    for at, live in enumerate(arena.ranges):
        if not live.first <= moment <= live.last:
            arena.array(at, (run.samples, live.numbers)).fill(np.nan)


def trained(layers, name, arena, task, monkeypatch):
    """Outputs, input gradients, gradients and state of some steps with batches of several sizes."""
    monkeypatch.setattr("neondist.runtime.section.Arena", arena)
    model = nd.Convnet(layers, cost=nd.SumSquared(), seed=3, backend=name, dtype="float64")
    model.build((8, 8, 2), batch_size=4)
    model.executor, model.last_pass = model.executor.with_tasks(task), None
    rng, found = np.random.default_rng(5), []
    for samples, training in ((4, True), (3, False), (4, True), (6, True), (1, False), (4, True)):
        x = rng.normal(size=(samples, 8, 8, 2))
        model.last_pass = None
        y = model.fprop(x, training=training)
        dx = model.bprop(rng.normal(size=y.shape))
        kept = y.copy(), dx.copy()
        found += [*kept, model.gradients()]
        model.train_batch(x, rng.normal(size=y.shape))
        np.testing.assert_array_equal(y, kept[0])  # what a caller holds is not overwritten
        assert not any(model.executor.blocks.owns(array) for array in (y, dx))
    return [*found, model.state()]


@pytest.mark.parametrize(("network", "name"), some(product(networks(), NAMES)))
@pytest.mark.long
def test_sharing_memory_changes_no_number(network, name, monkeypatch):
    expected = trained(networks()[network], name, Apart, LayerTask, monkeypatch)
    for how in ((Arena, LayerTask), (Apart, PoisonTask)):
        found = trained(networks()[network], name, *how, monkeypatch)
        for ours, theirs in zip(found, expected, strict=True):
            for key in ours if isinstance(ours, dict) else [slice(None)]:
                np.testing.assert_array_equal(ours[key], theirs[key])


def test_an_activation_in_place_leaves_the_input_alone():
    model = nd.Convnet([nd.Sum([Passer(), []])], dtype="float64")
    model.build((5, 4, 1), 2)
    x = np.random.default_rng(0).normal(size=(2, 5, 4, 1))
    before = x.copy()
    np.testing.assert_array_equal(model.fprop(x), before + np.maximum(before, 0))
    np.testing.assert_array_equal(x, before)


def test_live_ranges_of_a_chain():
    model = nd.Convnet([conv(), nd.MaxPoolingLayer(2), nd.MaxPoolingLayer(2), conv()])
    model.build((8, 8, 2), 1)
    plan = model.executor.sections[0].plan
    views, gradients = (
        [tuple(plan.ranges[found[at]][1:]) if at in found else None for at in range(4)]
        for found in (plan.views, plan.gradients)
    )
    # conv1 needs its input, but no output: the pooling takes gradients through its ReLU, and needs no input either
    assert views == [(0, 7), None, None, (2, 5)]
    assert gradients == [None, (6, 7), (5, 6), (2, 5)]
    assert plan.views[3] == plan.gradients[3]  # conv2 writes the gradient over its view
    assert [tuple(plan.ranges[plan.values[value]][1:]) for value in (1, 2, 4)] == [(0, 1), (1, 2), (3, 4)]


def test_a_residual_block_adds_gradients_where_the_first_one_lies():
    plain, down = [conv(), nd.ConvLayer(3, 3, padding=1)], [conv(stride=2), nd.ConvLayer(3, 3, padding=1)]
    first, second = nd.ActivationLayer(nd.ReLU()), nd.ActivationLayer(nd.ReLU())
    blocks = [nd.Sum([plain, []]), first, nd.Sum([down, nd.ConvLayer(3, 1, stride=2)]), second]
    model = nd.Convnet([conv(), *blocks, nd.GlobalAvgPoolingLayer(), nd.FCLayer(2)])
    model.build((8, 8, 2), 1)
    section = model.executor.sections[0]
    joins = [at for at, step in enumerate(section.graph.steps) if step.join is not None]
    assert section.plan.begun == {1, 5}
    assert not section.plan.sums
    assert not {at + 1 for at in joins} & section.plan.gradients.keys()  # ReLUs' lie over those of what is behind
    assert 5 not in section.plan.values
    assert joins[-1] - 1 not in section.plan.views  # 1 x 1 of stride 2 looks into the view of 3 x 3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("middle", ["chain", "containers"])
@pytest.mark.long
def test_a_step_allocates_next_to_nothing(name, middle, monkeypatch):
    middles = {
        "chain": [conv(), conv(stride=2), nd.MaxPoolingLayer(2), conv()],
        "containers": [conv(), nd.Sum([conv(), []]), nd.Sum([[conv(), conv()], conv()]), nd.Concat([conv(), []])],
    }
    model = nd.Convnet([*middles[middle], nd.GlobalAvgPoolingLayer(), nd.FCLayer(4)], backend=name)
    model.build((256, 256, 3), batch_size=4)
    monkeypatch.setattr(model.leaves[0].kernels, "strip", 1 << 16)
    x, labels = np.ones((4, 256, 256, 3), np.float32), np.zeros(4, int)
    tracemalloc.start()
    try:
        model.train_batch(x, labels)
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        model.train_batch(x, labels)
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 1 << 16
    # one activation has 3 MiB, a strip a quarter
    assert peak - before < 1 << 20


@pytest.mark.skipif("torch" not in NAMES, reason="PyTorch is not installed")
def test_torch_allocates_strips_alone(monkeypatch):
    from neondist.bench.allocations import PURPOSES, allocations

    layers = [
        conv(),
        conv(stride=2),
        nd.MaxPoolingLayer(2),
        nd.ConvLayer(16, 3, padding=1),
        nd.ConvLayer(16, 3, groups=4),
    ]
    model = nd.Convnet([*layers, nd.GlobalAvgPoolingLayer(), nd.FCLayer(4)], backend="torch")
    model.build((256, 256, 3), batch_size=2)
    strip = 1 << 15
    monkeypatch.setattr(model.leaves[0].kernels, "strip", strip)
    x, labels = np.ones((2, 256, 256, 3), np.float32), np.zeros(2, int)
    model.train_batch(x, labels)
    found = allocations(lambda: model.train_batch(x, labels))
    assert found
    assert {one.operator for one in found} <= PURPOSES.keys()
    assert max(one.largest for one in found) < 3 * 4 * strip  # one activation has four times as much


@pytest.mark.parametrize("network", networks())
def test_check_plans_what_is_built(network):
    model = nd.Convnet(networks()[network], backend="numpy")
    model.build((8, 8, 2), batch_size=4)
    plan = model.plan((8, 8, 2), batch_size=4)
    planned = plan.peak - 4 * sum(plan.sections[0].saved(0, 4))
    rounded = 4 * 4 * 16 * (2 * len(model.leaves) + 9 * len(networks()[network]))  # every span to a cache line
    made = 4 * 4 * model.executor.blocks.length
    assert planned <= made <= planned + rounded


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_ranks_hold_is_what_is_planned(ranks):
    """Within 15 %: views, gradients, parameters and the optimiser's arrays; kernels add a strip while they work."""

    def layers():
        return [conv(), nd.BatchNormLayer(), nd.MaxPoolingLayer(2), nd.Sum([conv(), []]), nd.GlobalAvgPoolingLayer()]

    images, labels = np.ones((2, 96, 128, 3), np.float32), np.zeros(2, int)
    held = []

    def body(world):
        with nd.ProcessGrid(world, replicas=1) as grid:
            model = nd.distribute(nd.Convnet([*layers(), nd.FCLayer(4)], backend="numpy"))
            rows, columns = grid.tile_box((96, 128)).slices
            tile = np.ascontiguousarray(images[:, rows, columns])
            grid.world.allgather(None)
            if grid.rank == 0:
                tracemalloc.start()
            grid.world.allgather(None)
            model.build((96, 128, 3), 2, grid)
            for _ in range(2):
                model.train_batch(tile, labels, batch_size=2)
            grid.world.allgather(None)
            if grid.rank == 0:
                arrays = tracemalloc.DomainFilter(inclusive=True, domain=np.lib.tracemalloc_domain)
                found = tracemalloc.take_snapshot().filter_traces([arrays])
                held.append(sum(one.size for one in found.traces))
                tracemalloc.stop()
            grid.world.allgather(None)
            return model.compiled.memory(grid.rank)

    planned = sum(nd.loopback.run(ranks, body))
    assert held == [pytest.approx(planned, rel=0.15)]
