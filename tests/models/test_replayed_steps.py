"""Steps replayed as CUDA graphs equal ordinary steps; see helpers/device_graph.py."""

import warnings
from contextlib import closing

import numpy as np
import pytest
from device import Device
from device_graph import CapturingKernels

import neondist as nd
from neondist.backends.cupy import CupyKernels
from neondist.observer import Observer
from neondist.runtime.replay import MAX_CACHED_PASS_KINDS, WARMUP_PASSES

SHAPE, BATCH = (9, 8, 3), 3
COST = nd.CrossEntropy(class_weights=[1, 2, 1, 0.5])


def make_small_layers(*extra_layers):
    return [
        nd.ConvLayer(4, 3, padding=1),
        nd.BatchNormLayer(),
        nd.ActivationLayer(nd.ReLU()),
        *extra_layers,
        nd.FCLayer(4),
    ]


def make_layers_of_every_kind():
    return [
        nd.ConvLayer(4, 3, padding=1, padding_mode="reflect"),
        nd.BatchNormLayer(),
        nd.ActivationLayer(nd.ReLU()),
        nd.MaxPoolingLayer(3, 2, padding=1),
        nd.Sum([[nd.ConvLayer(4, 3, padding=1, groups=2, activation=nd.Tanh())], []]),
        nd.InstanceNormLayer(affine=True),
        nd.LocalFilteringLayer(4, 3, padding=1),
        nd.UpsampleLayer(2, mode="bilinear"),
        nd.DeconvLayer(4, 2, stride=2),
        nd.GroupNormLayer(2),
        nd.LCNLayer(3),
        nd.Concat([[nd.AvgPoolingLayer(2)], [nd.MaxPoolingLayer(2)]]),
        nd.LRNLayer(3),
        nd.L2PoolingLayer(2),
        nd.FCLayer(5, activation=nd.Logistic()),
        nd.FCLayer(4),
    ]


def build_model(kernels_class, layers, model_class=nd.Convnet, **options):
    device = Device(kernels_class=kernels_class)
    arguments = {"optimizer": nd.Adam(0.01), "cost": COST, "seed": 1} | options
    model = model_class(layers, backend=device.backend, dtype="float64", **arguments)
    model.build(SHAPE, BATCH, nd.ProcessGrid.serial())
    return model, device


def compare_steps(
    layers, count=WARMUP_PASSES + 4, batch_sizes=(BATCH,), prepare_step=lambda model, step: None, **options
):
    """Check that steps with and without graphs are bit-identical, with varying images, labels and rates.

    Returns the launches of each step without and with graphs, and the model with graphs.
    """
    results, launches = [], []
    for kernels_class in (CupyKernels, CapturingKernels):
        (model, device), rng, losses = build_model(kernels_class, layers(), **options), np.random.default_rng(0), []
        launches.append([])
        for step in range(count):
            size = batch_sizes[step % len(batch_sizes)]
            x, labels = rng.normal(size=(size, *SHAPE)), rng.integers(0, 4, size)
            prepare_step(model, step)
            started, waited = device.launches, device.synchronisations
            model.learning_rate_scale = 1 / (1 + step)
            losses.append(model.train_batch(x * (np.inf if model.nonfinite == "skip" and step == 4 else 1), labels))
            launches[-1].append(device.launches - started)
            assert device.synchronisations - waited <= (1 if np.isfinite(losses[-1]) else 50)
        results.append(model.state() | model.optimizer_state() | {"losses": np.array(losses)})
    for name, values in results[0].items():
        np.testing.assert_array_equal(results[1][name], values, err_msg=name)
    return *launches, model


def test_replayed_steps_match_ordinary_steps():
    ordinary, replayed, _ = compare_steps(make_layers_of_every_kind)
    assert replayed[:WARMUP_PASSES] == ordinary[:WARMUP_PASSES]
    assert max(replayed[WARMUP_PASSES + 1 :]) < min(ordinary) / 4


SGD = nd.SGD(0.1, momentum=0.9, weight_decay=0.01, clip_norm=0.5)


@pytest.mark.parametrize(
    "options", [{"optimizer": SGD, "cost": nd.MSE()}, {"sync": "bucketed"}], ids=lambda options: " and ".join(options)
)
def test_replay_of_costs_and_updates(options):
    ordinary, replayed, _ = compare_steps(make_small_layers, **options)
    assert replayed[-1] < ordinary[-1]


def test_changes_between_steps_take_effect():
    def prepare_step(model, step):
        if step >= WARMUP_PASSES + 2:
            model.leaves[1].momentum = 0.5

    ordinary, replayed, _ = compare_steps(make_small_layers, WARMUP_PASSES + 6, prepare_step=prepare_step)
    assert replayed[-1] == replayed[WARMUP_PASSES + 1] < replayed[WARMUP_PASSES + 2] == ordinary[WARMUP_PASSES + 2]


def test_smaller_batches_have_separate_graphs():
    _, replayed, model = compare_steps(make_small_layers, 3 * (WARMUP_PASSES + 2), batch_sizes=(3, 2, 1))
    assert model.executor.pass_graph_cache.is_usable
    assert max(replayed[-3:]) < min(replayed[:3])
    *_, model = compare_steps(make_small_layers, 12, batch_sizes=(1, 2, 3, 4, 5, 6))  # too many to keep
    assert len(model.executor.pass_graph_cache._graphs) == MAX_CACHED_PASS_KINDS


class StepScaling(nd.ActivationLayer):
    """Custom layer that depends on the step."""

    def forward(self, ctx, view):
        return view * (1 + ctx.step)

    def backward(self, ctx, dy):
        return dy * (1 + ctx.step)


LAYERS_AND_OPTIONS_NOT_REPLAYED = {
    "dropout": (lambda: make_small_layers(nd.DropoutLayer(0.3)), {}),
    "custom layer": (lambda: make_small_layers(StepScaling(nd.Tanh())), {}),
    "micro-batches": (make_small_layers, {"accumulate": 2}),
    "recomputation": (lambda: [*make_small_layers()[:2], *make_small_layers()], {"recompute": True}),
}


@pytest.mark.parametrize("name", LAYERS_AND_OPTIONS_NOT_REPLAYED)
def test_varying_steps_are_not_replayed(name):
    layers, options = LAYERS_AND_OPTIONS_NOT_REPLAYED[name]
    with warnings.catch_warnings(action="error"):
        ordinary, replayed, _ = compare_steps(layers, **options)
    assert replayed == ordinary


def test_uncapturable_steps_are_not_replayed():
    """Embeddings copy ids to the host; there is one warning."""
    layers = [nd.ConvLayer(1, 3, weights_init=nd.Constant(0.0)), nd.EmbeddingLayer(3, 2), nd.FCLayer(4)]
    model, device = build_model(CapturingKernels, layers)
    x, labels = np.zeros((BATCH, *SHAPE)), np.zeros(BATCH, int)
    warning = "CUDA graph capture failed; steps may be slower: RuntimeError: .*D2H"
    with pytest.warns(UserWarning, match=warning) as warned:
        losses = [model.train_batch(x, labels) for _ in range(2 * WARMUP_PASSES + 2)]
    assert len(warned) == 1
    assert losses[-1] < losses[WARMUP_PASSES] < losses[0]
    assert device.capturing is None


def test_skipped_steps_leave_no_trace():
    """Running statistics are restored, and an ordinary pass locates the non-finite value."""

    def prepare_step(model, step):
        model.nonfinite = "skip"

    *_, model = compare_steps(make_small_layers, prepare_step=prepare_step)
    assert model.nonfinite_monitor.nonfinite_value == "the images"
    assert model.executor.pass_graph_cache.is_usable


def test_pending_passes_and_observers_disable_replay():
    """Pending passes occupy the memory of graphs, and observers need the values."""
    pending_passes = []

    def prepare_step(model, step):
        if step == WARMUP_PASSES + 2:
            run = model.forward(np.ones((BATCH, *SHAPE)))
            pending_passes.append((run, run.backward(model.scatter_output(np.ones((BATCH, 4))))))
        elif step == WARMUP_PASSES + 3:
            pending_passes.pop()[0].close()

    ordinary, replayed, _ = compare_steps(make_small_layers, prepare_step=prepare_step)
    assert replayed[WARMUP_PASSES + 2] == ordinary[WARMUP_PASSES + 2]
    assert replayed[WARMUP_PASSES + 3] < ordinary[WARMUP_PASSES + 3]

    names = []

    class ValueRecorder(Observer):
        def on_value(self, layer, name, array):
            names.append(name)

    model, _ = build_model(CapturingKernels, make_small_layers())
    for step in range(WARMUP_PASSES + 3):
        with model.grid.observers.add_temporarily(ValueRecorder()):
            model.train_batch(np.ones((BATCH, *SHAPE)), np.zeros(BATCH, int))
        assert names.count("cost") == step + 1


def test_head_training_then_full_training():
    """The trained layers change with the epoch, and so do the graphs."""

    def make_layers():
        return [nd.LocalFilteringLayer(2, 3), nd.L2PoolingLayer(2, 1), nd.FCLayer(4)]

    def prepare_step(model, step):
        model.begin_epoch(step // (WARMUP_PASSES + 2))

    ordinary, replayed, _ = compare_steps(
        make_layers, 2 * (WARMUP_PASSES + 2), prepare_step=prepare_step, model_class=nd.GB, num_initial_epochs=1
    )
    assert replayed[WARMUP_PASSES + 1] < ordinary[WARMUP_PASSES + 1]
    assert replayed[-1] < ordinary[-1]


def test_graphs_keep_their_launch_tables():
    """Shared tables may be evicted from the cache."""
    device = Device(kernels_class=CapturingKernels)
    kernels, x = device.backend.kernels, device.xp.ones((2, 3, 4))
    with closing(kernels):
        expected = kernels.channel_sum(x)
        output, graph = kernels.capture_graph(lambda: kernels.channel_sum(x))
        assert len(graph.kept_arrays) == 1
        kernels._cached_upload.cache_clear()
        x[...] = 2.0
        graph.replay()
        np.testing.assert_array_equal(device.xp.asnumpy(output), 2 * device.xp.asnumpy(expected))
        with pytest.raises(RuntimeError, match="H2D"):
            kernels.capture_graph(lambda: kernels.channel_sum(x))
        kernels.channel_sum(x)
        assert kernels._captured_tables == []
