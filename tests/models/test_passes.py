"""Inputs and outputs of passes belong to the caller; bprop differentiates the matching fprop or raises."""

import copy
import pickle

import numpy as np
import pytest
from availability import BACKENDS

import neondist as nd
from neondist.comm import loopback
from neondist.errors import ConfigError, PassOrderError, ShapeError
from neondist.models import ModelStep, optimal_stimulus

SHAPE = (6, 5, 2)


def make_networks():
    tanh, relu = nd.Tanh(), nd.ReLU()
    conv, local = nd.ConvLayer, nd.LocalFilteringLayer
    return {
        "conv last": [conv(3, 3, padding=1, activation=tanh), conv(2, 3, padding=1, activation=tanh)],
        "shared memory": [*(conv(3, 3, padding=1, activation=relu) for _ in range(5)), nd.MaxPoolingLayer(2)],
        "no halo first": [nd.LRNLayer(3, alpha=0.5), conv(3, 1, activation=relu), nd.FCLayer(4)],
        "normalised": [nd.BatchNormLayer(), nd.GroupNormLayer(2), nd.LCNLayer(3), nd.DropoutLayer(0.3)],
        "pools": [nd.L2PoolingLayer(2, 1), nd.AvgPoolingLayer(2, 1), nd.ActivationLayer(tanh), nd.UpsampleLayer(2)],
        "filters": [nd.DeconvLayer(3, 2, activation=relu), local(2, 3, activation=tanh), nd.PadLayer(1)],
        "containers": [nd.Sum([[conv(2, 3, padding=1), []], []]), nd.Concat([[], [nd.Concat([[], []])], conv(1, 1)])],
        "vectors": [conv(3, 3, activation=relu), nd.GlobalAvgPoolingLayer(), nd.FCLayer(5, activation=tanh)],
        "identity": [nd.DropoutLayer(0.0)],
    }


def build_model(name, backend="numpy"):
    model = nd.Convnet(make_networks()[name], cost=nd.SumSquared(), dtype="float64", backend=backend, seed=1)
    model.build(SHAPE, 3)
    return model


def draw_arrays(model, seed, samples=3):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(samples, *SHAPE)), rng.normal(size=(samples, *model.output_shape))


def assert_equal_arrays(actual, expected):
    assert actual.keys() == expected.keys()
    for key in expected:
        np.testing.assert_array_equal(actual[key], expected[key], err_msg=key)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", make_networks())
def test_arrays_belong_to_the_caller(name, backend):
    model = build_model(name, backend)
    x, dy = draw_arrays(model, 0)
    y = model.fprop(x)
    expected = {"y": y.copy(), "dx": model.bprop(dy).copy(), **model.gradients()}

    model = build_model(name, backend)
    x_given, dy_given = x.copy(), dy.copy()
    y, first_dx = model.fprop(x_given), None
    y_copy = y.copy()
    x_given[...], y[...] = np.nan, np.nan
    dx, state = model.bprop(dy_given), model.gradients()
    assert_equal_arrays({"y": y_copy, "dx": dx, **state}, expected)
    np.testing.assert_array_equal(dy_given, dy)
    dy_given[...] = dx[...] = np.nan
    first_dx, second_dx = model.bprop(-2 * dy), model.bprop(dy)  # the second does not overwrite the first
    assert_equal_arrays({"y": y_copy, "dx": second_dx, **model.gradients()}, expected)
    np.testing.assert_array_equal(first_dx, -2 * expected["dx"])

    x.flags.writeable = dy.flags.writeable = False
    model.train_batch(x, dy)
    model.fprop(x, training=False)
    np.testing.assert_array_equal(second_dx, expected["dx"])
    assert_equal_arrays(state, {key: value for key, value in expected.items() if "/" in key})


ARRAY_LAYOUTS = {
    "fortran": np.asfortranarray,
    "every other": lambda a: np.repeat(a, 2, axis=1)[:, ::2],
    "backwards": lambda a: a[:, ::-1].copy()[:, ::-1],
    "swapped axes": lambda a: a.swapaxes(0, -1).copy().swapaxes(0, -1),
    "other byte order": lambda a: a.astype(">f8"),
    "int": lambda a: a.astype(np.int16),
    "bool": lambda a: a > 0,
    "half": lambda a: a.astype(np.float16),
    "long double": lambda a: a.astype(np.longdouble),
    "lists": lambda a: a.tolist(),
    "memoryview": lambda a: memoryview(np.ascontiguousarray(a)),
    **({"tensor": lambda a: pytest.importorskip("torch").tensor(a)} if "torch" in BACKENDS else {}),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["conv last", "no halo first", "containers", "identity"])
def test_array_layouts_and_dtypes(name, backend):
    for dtype in ("float64", "float32"):
        model = nd.Convnet(make_networks()[name], cost=nd.SumSquared(), dtype=dtype, backend=backend)
        model.build(SHAPE, 3)
        x, dy = (np.rint(3 * array) for array in draw_arrays(model, 0))
        for apply_layout in ARRAY_LAYOUTS.values():
            x_given, dy_given = apply_layout(x), apply_layout(dy)
            plain = [np.asarray(array).astype(dtype) for array in (x_given, dy_given)]
            expected = {"y": model.fprop(plain[0]), "dx": model.bprop(plain[1]), **model.gradients()}
            for array in (x_given, dy_given):
                if isinstance(array, np.ndarray):
                    array.flags.writeable = False
            actual = {"y": model.fprop(x_given), "dx": model.bprop(dy_given), **model.gradients()}
            assert_equal_arrays(actual, expected)
            assert {array.dtype for array in actual.values()} == {np.dtype(dtype)}


@pytest.mark.parametrize("name", ARRAY_LAYOUTS)
def test_array_layouts_and_dtypes_on_ranks(name):
    def run(comm, apply_layout):
        model = nd.ConvnetDist([nd.ConvLayerDist(2, 3, padding=1)], cost=nd.SumSquared(), dtype="float64", seed=1)
        model.build(SHAPE, 3, nd.ProcessGrid(comm))
        x, targets = (apply_layout(np.rint(3 * array)) for array in draw_arrays(model, 0))
        tile = model.scatter(x)
        losses = [model.train_batch(tile, targets) for _ in range(2)]
        whole = [model.gather_input(apply_layout(tile)), model.gather(apply_layout(model.scatter_output(targets)))]
        state = model.state()
        model.load_state(state | {"conv1/weights": apply_layout(state["conv1/weights"])})
        return losses, np.concatenate(whole, axis=-1), model.state()["conv1/weights"]

    for actual in loopback.run(2, lambda comm: run(comm, ARRAY_LAYOUTS[name])):
        expected = loopback.run(1, lambda comm: run(comm, lambda a: np.asarray(ARRAY_LAYOUTS[name](a)).astype(float)))[
            0
        ]
        np.testing.assert_allclose(actual[0], expected[0], rtol=1e-12)
        np.testing.assert_array_equal(actual[1], expected[1])
        np.testing.assert_allclose(actual[2], expected[2], rtol=1e-12)


NOT_REAL = {
    "complex": lambda a: a * 1j,
    "text": lambda a: a.astype(str),
    "ragged": lambda a: [[0], [0, 1]],
    "masked": lambda a: np.ma.masked_less(a, 0),
}


@pytest.mark.parametrize("name", NOT_REAL)
def test_arrays_of_other_than_real_numbers_are_rejected_everywhere(name):
    model = build_model("conv last")
    x, dy = draw_arrays(model, 0)
    make, state = NOT_REAL[name], model.state()
    message = r": .*(convert it to .*real numbers|replace them, such as with array.filled\(0\))"
    for call, array in ((model.scatter, x), (model.scatter_output, dy), (model.gather, dy), (model.gather_input, x)):
        with pytest.raises(ShapeError, match=message):
            call(make(array))
    with pytest.raises(ShapeError, match="targets" + message):
        model.train_batch(x, make(dy))
    with pytest.raises(ShapeError, match="targets" + message):
        model.evaluate_batch(x, make(dy), 3)
    with pytest.raises(ShapeError, match="weights'" + message):
        model.load_state({name: make(array) if name.endswith("weights") else array for name, array in state.items()})
    assert_equal_arrays(model.state(), state)


def test_update_of_parameters_copies_into_the_buffers():
    model = build_model("conv last")
    layer = next(layer for layer in model.layers if layer.params)
    weights = np.ones_like(layer.params["weights"])
    layer.params.update(weights=weights)
    layer.params.update({"bias": weights[0, 0, 0]})
    layer.params |= [("weights", 2 * weights)]
    state = model.state()
    np.testing.assert_array_equal(state[f"{layer.name}/weights"], 2 * weights)
    np.testing.assert_array_equal(state[f"{layer.name}/bias"], weights[0, 0, 0])
    assert not any(np.shares_memory(array, weights) for array in layer.params.values())
    with pytest.raises(ConfigError, match="is not declared"):
        layer.params.update(weight=weights)


BUILT_OBJECTS = {
    "model": lambda model: model,
    "layer": lambda model: model.layers[0],
    "params": lambda model: model.layers[0].params,
    "plan": lambda model: model.compiled,
    "pass": lambda model: model.forward(draw_arrays(model, 0)[0]),
}


@pytest.mark.parametrize("name", BUILT_OBJECTS)
@pytest.mark.parametrize("copy_value", [copy.deepcopy, pickle.dumps])
def test_built_models_can_be_neither_copied_nor_pickled(name, copy_value):
    model = build_model("conv last")
    value = BUILT_OBJECTS[name](model)
    with pytest.raises(ConfigError, match=r"neither copied nor pickled; copy model.state\(\), and load"):
        copy_value(value)
    copy_value(nd.Convnet(make_networks()["conv last"]))  # before it is built


@pytest.mark.parametrize("value", [1j, "cat", None])
def test_non_real_arrays_are_rejected(value):
    model = build_model("conv last")
    x, dy = draw_arrays(model, 0)
    invalid = np.full(x.shape, value)
    with pytest.raises(ShapeError, match=r"x: has dtype .*; convert it to real numbers"):
        model.fprop(invalid)
    model.fprop(x)
    with pytest.raises(ShapeError, match=r"dy: has dtype .*; convert it to real numbers"):
        model.bprop(invalid)
    with pytest.raises(ShapeError, match=r"x: has dtype .*; convert it to real numbers"):
        model.train_batch(invalid, dy)


def run_other_size(model, x, dy):
    model.fprop(x)
    model.fprop(x[:1])


def run_evaluation(model, x, dy):
    model.fprop(x)
    model.fprop(-x, training=False)


def run_evaluations(model, x, dy):
    model.fprop(x)
    model.bprop(dy)
    model.fprop(-x[:2], training=False)
    model.fprop(-x, training=False)


def run_no_fprop(model, x, dy):
    pass


def run_step(model, x, dy):
    model.fprop(x)
    model.train_batch(x, dy)


def update_weights(model, x, dy):
    model.fprop(x)
    model.bprop(dy)
    ModelStep(model).update_parameters()


def load_state(model, x, dy):
    model.fprop(x)
    model.load_state(model.state())


def rebuild(model, x, dy):
    model.fprop(x)
    model.build(SHAPE, 3)


def run_invalid_fprop(model, x, dy):
    model.fprop(x)
    with pytest.raises(ShapeError):
        model.fprop(np.zeros((3, 2, 2, 2)))


INTERVENING_CALLS = {
    run_other_size: (ShapeError, "dy has 3 samples, but the forward pass had 1"),
    run_evaluation: (PassOrderError, "training=False followed the one with training=True"),
    run_evaluations: (PassOrderError, "training=False followed the one with training=True"),
    run_no_fprop: (PassOrderError, "no fprop to differentiate"),
    run_step: (PassOrderError, "no fprop to differentiate: .*train_batch was called since"),
    update_weights: (PassOrderError, "the weights have changed"),
    load_state: (PassOrderError, "the weights have changed"),
    rebuild: (PassOrderError, "no fprop to differentiate"),
    run_invalid_fprop: (PassOrderError, "no fprop to differentiate: .* the last one failed"),
}


@pytest.mark.parametrize("run_between", INTERVENING_CALLS)
def test_bprop_of_another_pass_is_rejected(run_between):
    model = build_model("conv last")
    x, dy = draw_arrays(model, 0)
    run_between(model, x, dy)
    error, message = INTERVENING_CALLS[run_between]
    with pytest.raises(error, match=message):
        model.bprop(dy)
    with pytest.raises((PassOrderError, ShapeError), match=r"(run fprop|repeat the forward pass) of the batch"):
        model.bprop(dy)  # the second call does not use the other pass either
    model.fprop(x)
    model.bprop(dy)


def test_evaluation_passes_have_gradients():
    model = build_model("normalised")
    x, dy = draw_arrays(model, 0)
    model.train_batch(x, dy)
    model.fprop(x, training=False)
    dx = model.bprop(dy)
    step, direction = 1e-5, draw_arrays(model, 1)[0]
    ahead, behind = (model.fprop(x + sign * step * direction, training=False) for sign in (1, -1))
    np.testing.assert_allclose(np.sum(dx * direction), np.sum((ahead - behind) * dy) / (2 * step), rtol=1e-6)
    model.forward(x)  # not differentiated
    model.fprop(x, training=False)
    model.bprop(dy)


def test_gradients_of_another_shape_are_rejected():
    model = build_model("conv last")
    x, dy = draw_arrays(model, 0)
    model.fprop(x)
    with pytest.raises(ShapeError, match=r"dy of shape \(3, 6, 5, 1\)"):
        model.bprop(dy[..., :1])


def train_network(grid, by_hand, strategy=None):
    cls, layers = (nd.Convnet, make_networks()["vectors"]) if grid is None else (nd.ConvnetDist, [])
    layers = layers or [layer.distributed_counterpart() for layer in make_networks()["vectors"]]
    optimizer = nd.AdamW(0.02, weight_decay=0.1, clip_norm=0.5, ema=0.9)
    model = cls(layers, cost=nd.SumSquared(), optimizer=optimizer, dtype="float64", seed=1, strategy=strategy)
    model.build(SHAPE, 4, grid)
    for seed in range(4):
        images, targets = draw_arrays(model, seed, 4)
        x = model.scatter(images)
        if by_hand:
            y = model.gather(model.fprop(x))
            model.bprop(model.scatter_output((y - targets) / 4))
            model.update()
        else:
            model.train_batch(x, targets)
    return {"step": model.step, **model.state(), **model.optimizer_state()}


@pytest.mark.parametrize(("ranks", "replicas", "strategy"), [
    (1, 1, None), (3, 1, None), (4, 2, None), (2, 2, "ShardedOptimizer"),
])  # fmt: skip
def test_update_after_bprop_equals_train_batch(ranks, replicas, strategy):
    expected = train_network(None, by_hand=False)
    for arrays in loopback.run(
        ranks, lambda comm: train_network(nd.ProcessGrid(comm, replicas=replicas), True, strategy)
    ):
        assert arrays.keys() == expected.keys()
        for name in expected:
            np.testing.assert_allclose(arrays[name], expected[name], rtol=1e-9, atol=1e-12, err_msg=name)


def test_update_without_gradients_is_rejected():
    model = build_model("conv last")
    x, dy = draw_arrays(model, 0)

    def update_once():
        model.fprop(x)
        model.bprop(dy)
        model.update()

    for run in (lambda: None, update_once, lambda: model.train_batch(x, dy)):
        run()
        with pytest.raises(PassOrderError, match=r"no gradients: .* run fprop and bprop first"):
            model.update()


def test_pretraining_does_not_affect_passes():
    model = nd.GB([nd.LocalFilteringLayer(2, 3), nd.L2PoolingLayer(2, 1), nd.FCLayer(3)], backend="numpy")
    model.build(SHAPE, 2)
    x, dy = np.ones((2, *SHAPE)), np.ones((2, 3))
    for run_other in (lambda: model.stages[0].fprop(x), lambda: optimal_stimulus(model, 0, [(1, 1, 0)], steps=1)):
        model.fprop(x)
        expected = model.bprop(dy)
        run_other()
        np.testing.assert_array_equal(model.bprop(dy), expected)


def test_all_ranks_raise_and_continue():
    def job(comm):
        layers = [nd.ConvLayerDist(3, 3, padding=1, activation=nd.Tanh()) for _ in range(3)]
        model = nd.ConvnetDist(layers, dtype="float64", backend="numpy")
        model.build(SHAPE, 2, nd.ProcessGrid(comm, rows=2, cols=2))
        rng = np.random.default_rng(0)
        x, dy = model.scatter(rng.normal(size=(2, *SHAPE))), model.scatter_output(rng.normal(size=(2, 6, 5, 3)))
        model.fprop(x)
        expected = model.bprop(dy)
        model.fprop(x, training=False)
        with pytest.raises(PassOrderError):
            model.bprop(dy)
        model.fprop(x)
        model.bprop(-dy)
        np.testing.assert_array_equal(model.bprop(dy), expected)

    loopback.run(4, job)


@pytest.mark.parametrize("window", [None, nd.Window(3, padding=1)])
@pytest.mark.parametrize("parts", [(1, 1), (2, 2)])
def test_views_belong_to_the_caller(window, parts):
    def job(comm):
        grid = nd.ProcessGrid(comm, rows=parts[0], cols=parts[1])
        for reuse in (False, True):
            array = nd.GlobalArray(grid, (2, 6, 5, 3), window, dtype="float64", reuse=reuse)
            full = np.arange(2.0 * 6 * 5 * 3).reshape(2, 6, 5, 3)
            full.flags.writeable = False
            tile = array.scatter(full)
            assert not np.shares_memory(tile, full)
            tile.flags.writeable = False
            view = array.get_fprop_view(tile)
            gradient = array.get_bprop_view(view)
            total = np.ones(3)
            array.sum_over_ranks(total)
            assert (total == 1).all()
            if reuse:
                continue
            copies = view.copy(), gradient.copy()
            for apply_layout in ARRAY_LAYOUTS.values():
                other_tile = np.asarray(apply_layout(-tile))
                other_tile.flags.writeable = False
                repeated = array.get_fprop_view(other_tile)
                expected = array.get_fprop_view(np.array(other_tile).astype("float64"))
                np.testing.assert_array_equal(repeated, expected)
                assert repeated.dtype == array.get_bprop_view(np.asarray(apply_layout(view))).dtype == np.float64
                assert not np.shares_memory(repeated, other_tile)
            np.testing.assert_array_equal(view, copies[0])
            np.testing.assert_array_equal(gradient, copies[1])
            with pytest.raises(ShapeError, match="convert it to real numbers"):
                array.get_fprop_view(tile * 1j)

    loopback.run(parts[0] * parts[1], job)


class NoBackwardActivation(nd.ActivationLayer):
    """Activation without a backward pass."""

    def backward(self, ctx, dy):
        raise AssertionError("unneeded gradient: nothing before it is trained")


def test_steps_skip_backward_of_untrained_first_layers():
    x, targets = np.random.default_rng(0).random((2, *SHAPE)), np.array([0, 1])
    model = nd.Convnet(
        [NoBackwardActivation(nd.Tanh()), nd.L2PoolingLayer(2), nd.ConvLayer(3, 1), nd.FCLayer(2)], seed=1
    )
    model.build(SHAPE, len(x))
    assert model.train_batch(x, targets) > 0
    with pytest.raises(AssertionError, match="unneeded gradient"):
        model.bprop(model.fprop(x, training=True))


def test_evaluation_keeps_running_statistics():
    model = nd.Convnet([nd.ConvLayer(3, 3), nd.BatchNormLayer(), nd.FCLayer(4)], seed=1)
    model.build(SHAPE, 5)
    x, labels = np.random.default_rng(0).normal(size=(5, *SHAPE)), np.arange(5) % 4
    model.train_batch(x, labels)
    before = model.state()
    model.evaluate_batch(x, labels, 5)
    for name, array in model.state().items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)
