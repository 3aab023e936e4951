"""Arena: arrays with overlapping lifetimes are disjoint, and sharing memory changes no result."""

import tracemalloc
from itertools import product

import numpy as np
import pytest
from availability import BACKENDS
from case_selection import select_cases
from hypothesis import example, given
from hypothesis import strategies as st

import neondist as nd
from neondist.plan.memory import LiveRange, pack_ranges
from neondist.runtime import Arena, LayerTask


@example([LiveRange(3, 5, 5), LiveRange(1, 2, 6), LiveRange(5, 0, 1), LiveRange(4, 0, 3), LiveRange(1, 1, 2)])
@given(st.lists(st.builds(LiveRange, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_overlapping_lifetimes_are_disjoint(spans):
    spans = [LiveRange(n, min(a, b), max(a, b)) for n, a, b in spans]
    offsets, length = pack_ranges(spans)
    cells = [set(range(offset, offset + span.elements_per_sample)) for offset, span in zip(offsets, spans, strict=True)]
    for index, span in enumerate(spans):
        assert max(cells[index], default=-1) < length
        assert not any(cells[index] & cells[other] for other in range(index) if span.overlaps(spans[other]))
    lower_bound = max(
        (sum(span.elements_per_sample for span in spans if span.first_time <= t <= span.last_time) for t in range(10)),
        default=0,
    )
    assert lower_bound <= length <= sum(span.elements_per_sample for span in spans)


class OutputSavingLayer(nd.Layer):
    """Layer that saves its view and returns it as its output."""

    def forward(self, ctx, view):
        ctx.save(view=view)
        return view

    def backward(self, ctx, dy):
        return dy + 0 * ctx.view


class SquaringLayer(nd.Layer):
    """Layer whose gradient is memory saved in the forward pass."""

    def forward(self, ctx, view):
        ctx.save(view=view, half=view / 2)
        return view * view / 2

    def backward(self, ctx, dy):
        ctx.half *= 2 * dy
        ctx.save(half=ctx.view / 2, gradient=ctx.half)
        return ctx.gradient


class ViewReturningLayer(nd.Layer):
    """Layer that returns its input, with an activation computed in place."""

    activation = nd.ReLU()

    def forward(self, ctx, view):
        return view

    def backward(self, ctx, dy):
        return dy


class UndeclaredSavingLayer(nd.Layer):
    """Layer that declares no need for its input and output, but saves both."""

    saves_input = saves_output = False

    def forward(self, ctx, view):
        y = ctx.out
        np.sin(view, out=y)
        ctx.save(view=view, y=y)
        return y

    def backward(self, ctx, dy):
        np.testing.assert_allclose(ctx.y, np.sin(ctx.view))
        return dy * np.cos(ctx.view)


def make_conv(**options):
    return nd.ConvLayer(3, 3, padding=1, activation=nd.ReLU(), **options)


def make_networks():
    pool, tanh = nd.MaxPoolingLayer, nd.Tanh()
    return {
        "plain": [make_conv(), make_conv(stride=2), pool(2), make_conv(), nd.FCLayer(4)],
        "naive": [
            make_conv(),
            OutputSavingLayer(),
            make_conv(),
            OutputSavingLayer(),
            SquaringLayer(),
            pool(2),
            OutputSavingLayer(),
            make_conv(),
            SquaringLayer(),
        ],
        "identity first and last": [OutputSavingLayer(), make_conv(), OutputSavingLayer()],
        "residual": [
            make_conv(),
            nd.Sum([[make_conv(), OutputSavingLayer(), make_conv()], []]),
            make_conv(),
            nd.Sum([[], OutputSavingLayer()]),
        ],
        "two branches": [make_conv(), nd.Sum([[make_conv(), make_conv()], make_conv()]), make_conv()],
        "identities": [nd.ConvLayer(3, 3, padding=1, activation=tanh), nd.Sum([[], []]), [], make_conv()],
        "nested": [
            make_conv(),
            nd.Sum([[make_conv(), nd.Sum([make_conv(), []]), nd.Sum([[], make_conv()])], []]),
            nd.Concat(
                [
                    [],
                    [nd.Concat([make_conv(), [], [make_conv(), OutputSavingLayer()]])],
                    [[make_conv()], SquaringLayer()],
                ]
            ),
            nd.Sum([[], []]),
            [nd.Concat([[make_conv()], make_conv()])],
            nd.Sum([[nd.Sum([make_conv(), make_conv()])], [make_conv()]]),
        ],
        "repeated shortcut": [
            make_conv(),
            nd.Sum([[nd.ConvLayer(6, 3, padding=1)], [nd.Concat([[], []])]]),
            nd.ActivationLayer(nd.ReLU()),
        ],
        "containers of identities": [
            make_conv(),
            nd.Sum([[nd.ConvLayer(6, 3, padding=1)], [nd.Concat([[], []])]]),
            nd.ActivationLayer(tanh),
            nd.Concat([[nd.Sum([[], [[]]]), make_conv()], nd.Sum([[nd.Sum([[]])]]), []]),
            nd.BatchNormLayer(),
            nd.Concat([[nd.Concat([[], []]), OutputSavingLayer()], [[], nd.ConvLayer(3, 1, activation=tanh)]]),
            nd.Sum([[], [nd.Concat([[]])]]),
        ],
        "undeclared saves": [
            make_conv(),
            UndeclaredSavingLayer(),
            make_conv(),
            nd.Sum([UndeclaredSavingLayer(), [make_conv(), UndeclaredSavingLayer()]]),
            UndeclaredSavingLayer(),
            make_conv(),
            pool(2),
            UndeclaredSavingLayer(),
        ],
        "pass-through": [
            nd.Sum([ViewReturningLayer(), []]),
            make_conv(),
            nd.Concat([[], ViewReturningLayer(), [ViewReturningLayer(), ViewReturningLayer()]]),
            ViewReturningLayer(),
        ],
        "empty lists first": [
            [],
            [[], make_conv(), [[[]], make_conv()]],
            nd.Sequential([nd.Sequential([]), SquaringLayer()]),
            make_conv(),
        ],
        "branches first": [nd.Concat([make_conv(), [], [nd.Sum([make_conv(), make_conv()])]]), make_conv()],
        "skip": [make_conv(), nd.Concat([[pool(2), make_conv(), nd.UpsampleLayer(2)], [], make_conv()]), [make_conv()]],
        "normalised": [make_conv(), nd.BatchNormLayer(), nd.DropoutLayer(0.3), nd.L2PoolingLayer(2), nd.LCNLayer(3)],
        "pools": [pool(3, 1, 1), nd.ActivationLayer(tanh), nd.GlobalAvgPoolingLayer(), nd.FCLayer(4)],
    }


class DisjointArena(Arena):
    """Arena in which no arrays share memory."""

    def __init__(self, *args):
        super().__init__(*args)
        self.offsets = (
            np.cumsum([0, *(live_range.elements_per_sample for live_range in self.live_ranges[:-1])]).tolist()
            if self.live_ranges
            else []
        )
        self.num_elements = sum(live_range.elements_per_sample for live_range in self.live_ranges)


class PoisoningLayerTask(LayerTask):
    """Task that fills dead arrays with NaN before each layer."""

    def _forward(self, passes, inputs):
        for run in passes:
            poison_dead_arrays(run, self.index)
        return super()._forward(passes, inputs)

    def _backward(self, passes, dys, needed):
        for run in passes:
            poison_dead_arrays(run, 2 * run.workspace.plan.backward_start - 1 - self.index)
        return super()._backward(passes, dys, needed)


def poison_dead_arrays(run, time):
    arena = run.workspace.arena
    for index, live_range in enumerate(arena.live_ranges):
        if not live_range.first_time <= time <= live_range.last_time:
            arena.array(index, (run.samples, live_range.elements_per_sample)).fill(np.nan)


def train(layers, backend, arena, task, monkeypatch):
    """Return the outputs, gradients and state of some steps with batches of several sizes."""
    monkeypatch.setattr("neondist.runtime.section.Arena", arena)
    model = nd.Convnet(layers, cost=nd.SumSquared(), seed=3, backend=backend, dtype="float64")
    model.build((8, 8, 2), batch_size=4)
    model.executor, model.last_pass = model.executor.with_layer_tasks(task), None
    rng, results = np.random.default_rng(5), []
    for samples, training in ((4, True), (3, False), (4, True), (6, True), (1, False), (4, True)):
        x = rng.normal(size=(samples, 8, 8, 2))
        model.last_pass = None
        y = model.fprop(x, training=training)
        dx = model.bprop(rng.normal(size=y.shape))
        copies = y.copy(), dx.copy()
        results += [*copies, model.gradients()]
        model.train_batch(x, rng.normal(size=y.shape))
        np.testing.assert_array_equal(y, copies[0])  # arrays held by the caller are not overwritten
        assert not any(model.executor.blocks.owns(array) for array in (y, dx))
    return [*results, model.state()]


@pytest.mark.parametrize(("network", "backend"), select_cases(product(make_networks(), BACKENDS)))
@pytest.mark.long
def test_sharing_memory_keeps_results(network, backend, monkeypatch):
    expected = train(make_networks()[network], backend, DisjointArena, LayerTask, monkeypatch)
    for implementation in ((Arena, LayerTask), (DisjointArena, PoisoningLayerTask)):
        actual = train(make_networks()[network], backend, *implementation, monkeypatch)
        for actual_part, expected_part in zip(actual, expected, strict=True):
            for key in actual_part if isinstance(actual_part, dict) else [slice(None)]:
                np.testing.assert_array_equal(actual_part[key], expected_part[key])


def test_in_place_activation_keeps_the_input():
    model = nd.Convnet([nd.Sum([ViewReturningLayer(), []])], dtype="float64")
    model.build((5, 4, 1), 2)
    x = np.random.default_rng(0).normal(size=(2, 5, 4, 1))
    before = x.copy()
    np.testing.assert_array_equal(model.fprop(x), before + np.maximum(before, 0))
    np.testing.assert_array_equal(x, before)


def test_live_ranges_of_a_chain():
    model = nd.Convnet([make_conv(), nd.MaxPoolingLayer(2), nd.MaxPoolingLayer(2), make_conv()])
    model.build((8, 8, 2), 1)
    plan = model.executor.sections[0].plan
    views, gradients = (
        [tuple(plan.ranges[arrays[index]][1:]) if index in arrays else None for index in range(4)]
        for arrays in (plan.view_ranges, plan.gradient_ranges)
    )
    # conv1 needs its input, but no output: the pooling differentiates its ReLU, and needs no input either
    assert views == [(0, 7), None, None, (2, 5)]
    assert gradients == [None, (6, 7), (5, 6), (2, 5)]
    assert plan.view_ranges[3] == plan.gradient_ranges[3]  # conv2 writes the gradient over its view
    assert [tuple(plan.ranges[plan.value_ranges[value]][1:]) for value in (1, 2, 4)] == [(0, 1), (1, 2), (3, 4)]


def test_residual_blocks_accumulate_gradients_in_place():
    plain, down = [make_conv(), nd.ConvLayer(3, 3, padding=1)], [make_conv(stride=2), nd.ConvLayer(3, 3, padding=1)]
    first, second = nd.ActivationLayer(nd.ReLU()), nd.ActivationLayer(nd.ReLU())
    blocks = [nd.Sum([plain, []]), first, nd.Sum([down, nd.ConvLayer(3, 1, stride=2)]), second]
    model = nd.Convnet([make_conv(), *blocks, nd.GlobalAvgPoolingLayer(), nd.FCLayer(2)])
    model.build((8, 8, 2), 1)
    section = model.executor.sections[0]
    joins = [index for index, step in enumerate(section.graph.steps) if step.join is not None]
    assert section.plan.gradients_summed_in_place == {1, 5}
    assert not section.plan.gradient_sum_ranges
    # ReLUs reuse the gradients of the next step
    assert not {index + 1 for index in joins} & section.plan.gradient_ranges.keys()
    assert 5 not in section.plan.value_ranges
    assert (
        joins[-1] - 1 not in section.plan.view_ranges
    )  # the strided 1 x 1 convolution reads the view of the 3 x 3 one


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("middle", ["chain", "containers"])
@pytest.mark.long
def test_steps_allocate_little_memory(backend, middle, monkeypatch):
    middles = {
        "chain": [make_conv(), make_conv(stride=2), nd.MaxPoolingLayer(2), make_conv()],
        "containers": [
            make_conv(),
            nd.Sum([make_conv(), []]),
            nd.Sum([[make_conv(), make_conv()], make_conv()]),
            nd.Concat([make_conv(), []]),
        ],
    }
    model = nd.Convnet([*middles[middle], nd.GlobalAvgPoolingLayer(), nd.FCLayer(4)], backend=backend)
    model.build((256, 256, 3), batch_size=4)
    monkeypatch.setattr(model.leaves[0].kernels, "strip_elements", 1 << 16)
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


# purposes of the large blocks of each operator, which are unavoidable: the operator writes only to new memory
PURPOSE_BY_OPERATOR = {
    "conv2d": "outputs of a strip, before the activation writes them into the next layer's view",
    "conv3d": "the same, of volumes",
    "mkldnn_convolution": "outputs of a strip, by oneDNN",
    "mkldnn::_convolution_transpose_pointwise": "gradient of a strip's view, by oneDNN",
    "convolution": "gradient of a strip's view, before it is added to the gradient of the view",
    "convolution_backward": "gradient of weights, by oneDNN",
    "reshape": "windows of some rows, gathered for the gradient of weights by GEMM",
    "empty": "gradient of a strip before the ReLU",
    "contiguous": "a strip or weights in the memory order of a kernel",
    "max_pool2d_with_indices": "maxima of a strip; their places, kept for the backward pass",
    "max_pool2d_with_indices_backward": "contiguous gradient of a strip's outputs, where it is part of a larger array",
    "addmm_": "a factor of a product in the memory order of BLAS",
    "zeros": "accumulators",
    "matmul": "products of a fully connected layer",
}


@pytest.mark.skipif("torch" not in BACKENDS, reason="PyTorch is not installed")
def test_torch_allocates_only_strips(monkeypatch):
    from neondist.bench.kernel_allocations import measure_allocations

    layers = [
        make_conv(),
        make_conv(stride=2),
        nd.MaxPoolingLayer(2),
        nd.ConvLayer(16, 3, padding=1),
        nd.ConvLayer(16, 3, groups=4),
    ]
    model = nd.Convnet([*layers, nd.GlobalAvgPoolingLayer(), nd.FCLayer(4)], backend="torch")
    model.build((256, 256, 3), batch_size=2)
    strip = 1 << 15
    monkeypatch.setattr(model.leaves[0].kernels, "strip_elements", strip)
    x, labels = np.ones((2, 256, 256, 3), np.float32), np.zeros(2, int)
    model.train_batch(x, labels)
    report = measure_allocations(lambda: model.train_batch(x, labels))
    assert report
    assert {allocation.operator for allocation in report} <= PURPOSE_BY_OPERATOR.keys()
    largest = max(allocation.largest_bytes for allocation in report)
    assert largest < 3 * 4 * strip  # one activation has four times as much


@pytest.mark.parametrize("network", make_networks())
def test_plan_matches_the_built_arena(network):
    model = nd.Convnet(make_networks()[network], backend="numpy")
    model.build((8, 8, 2), batch_size=4)
    plan = model.plan((8, 8, 2), batch_size=4)
    planned = plan.peak_arena_bytes - 4 * sum(plan.sections[0].saved_bytes(0, 4))
    # every range is rounded up to a cache line
    rounded = 4 * 4 * 16 * (2 * len(model.leaves) + 9 * len(make_networks()[network]))
    actual = 4 * 4 * model.executor.blocks.elements_per_sample
    assert planned <= actual <= planned + rounded


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_memory_of_ranks_matches_the_plan(ranks):
    """Allow 15 % beyond views, gradients, parameters and optimiser arrays, for strips in kernels."""

    def make_layers():
        return [
            make_conv(),
            nd.BatchNormLayer(),
            nd.MaxPoolingLayer(2),
            nd.Sum([make_conv(), []]),
            nd.GlobalAvgPoolingLayer(),
        ]

    images, labels = np.ones((2, 96, 128, 3), np.float32), np.zeros(2, int)
    held = []

    def body(world):
        with nd.ProcessGrid(world, replicas=1) as grid:
            model = nd.distribute(nd.Convnet([*make_layers(), nd.FCLayer(4)], backend="numpy"))
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
                snapshot = tracemalloc.take_snapshot().filter_traces([arrays])
                held.append(sum(trace.size for trace in snapshot.traces))
                tracemalloc.stop()
            grid.world.allgather(None)
            return model.compiled.memory(grid.rank)

    planned = sum(nd.loopback.run(ranks, body))
    assert held == [pytest.approx(planned, rel=0.15)]
