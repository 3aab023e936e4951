"""Inputs and outputs of a pass belong to the caller, and bprop goes back through the right fprop or raises."""

import numpy as np
import pytest
from present import NAMES

import neondist as nd
from neondist.comm import loopback
from neondist.errors import PassError, ShapeError
from neondist.models import ModelStep, optimal_stimulus

SHAPE = (6, 5, 2)


def networks():
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
        "passes on": [nd.DropoutLayer(0.0)],
    }


def built(name, backend="numpy"):
    model = nd.Convnet(networks()[name], cost=nd.SumSquared(), dtype="float64", backend=backend, seed=1)
    model.build(SHAPE, 3)
    return model


def arrays(model, seed, samples=3):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(samples, *SHAPE)), rng.normal(size=(samples, *model.output_shape))


def check(found, expected):
    assert found.keys() == expected.keys()
    for key in expected:
        np.testing.assert_array_equal(found[key], expected[key], err_msg=key)


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("name", networks())
def test_nothing_returned_changes_later_and_nothing_given_is_needed_or_changed(name, backend):
    model = built(name, backend)
    x, dy = arrays(model, 0)
    y = model.fprop(x)
    expected = {"y": y.copy(), "dx": model.bprop(dy).copy(), **model.gradients()}

    model = built(name, backend)
    given, gradient = x.copy(), dy.copy()
    y, seen = model.fprop(given), None
    kept = y.copy()
    given[...], y[...] = np.nan, np.nan
    dx, state = model.bprop(gradient), model.gradients()
    check({"y": kept, "dx": dx, **state}, expected)
    np.testing.assert_array_equal(gradient, dy)
    gradient[...] = dx[...] = np.nan
    seen, other = model.bprop(-2 * dy), model.bprop(dy)  # the first one is not overwritten by the second
    check({"y": kept, "dx": other, **model.gradients()}, expected)
    np.testing.assert_array_equal(seen, -2 * expected["dx"])

    x.flags.writeable = dy.flags.writeable = False
    model.train_batch(x, dy)
    model.fprop(x, training=False)
    np.testing.assert_array_equal(other, expected["dx"])
    check(state, {key: value for key, value in expected.items() if "/" in key})


LAYOUTS = {
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
}


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("name", ["conv last", "no halo first", "containers", "passes on"])
def test_any_layout_and_kind_of_numbers(name, backend):
    for dtype in ("float64", "float32"):
        model = nd.Convnet(networks()[name], cost=nd.SumSquared(), dtype=dtype, backend=backend)
        model.build(SHAPE, 3)
        x, dy = (np.rint(3 * array) for array in arrays(model, 0))
        for change in LAYOUTS.values():
            given, gradient = change(x), change(dy)
            plain = [np.array(array).astype(dtype) for array in (given, gradient)]
            expected = {"y": model.fprop(plain[0]), "dx": model.bprop(plain[1]), **model.gradients()}
            for array in (given, gradient):
                if isinstance(array, np.ndarray):
                    array.flags.writeable = False
            found = {"y": model.fprop(given), "dx": model.bprop(gradient), **model.gradients()}
            check(found, expected)
            assert {array.dtype for array in found.values()} == {np.dtype(dtype)}


@pytest.mark.parametrize("wrong", [1j, "cat", None])
def test_what_is_no_real_number_is_refused(wrong):
    model = built("conv last")
    x, dy = arrays(model, 0)
    bad = np.full(x.shape, wrong)
    with pytest.raises(ShapeError, match=r"x of dtype .*: give real numbers"):
        model.fprop(bad)
    model.fprop(x)
    with pytest.raises(ShapeError, match=r"dy of dtype .*: give real numbers"):
        model.bprop(bad)
    with pytest.raises(ShapeError, match="x of dtype"):
        model.train_batch(bad, dy)


def other_size(model, x, dy):
    model.fprop(x)
    model.fprop(x[:1])


def evaluation(model, x, dy):
    model.fprop(x)
    model.fprop(-x, training=False)


def evaluations(model, x, dy):
    model.fprop(x)
    model.bprop(dy)
    model.fprop(-x[:2], training=False)
    model.fprop(-x, training=False)


def no_pass(model, x, dy):
    pass


def step(model, x, dy):
    model.fprop(x)
    model.train_batch(x, dy)


def update(model, x, dy):
    model.fprop(x)
    model.bprop(dy)
    ModelStep(model).update()


def load(model, x, dy):
    model.fprop(x)
    model.load_state(model.state())


def build(model, x, dy):
    model.fprop(x)
    model.build(SHAPE, 3)


def failure(model, x, dy):
    model.fprop(x)
    with pytest.raises(ShapeError):
        model.fprop(np.zeros((3, 2, 2, 2)))


BETWEEN = {
    other_size: (ShapeError, "dy has 3 samples, but the forward pass had 1"),
    evaluation: (PassError, "training=False followed the one with training=True"),
    evaluations: (PassError, "training=False followed the one with training=True"),
    no_pass: (PassError, "no fprop to differentiate"),
    step: (PassError, "no fprop to differentiate: .*train_batch was called since"),
    update: (PassError, "the weights have changed"),
    load: (PassError, "the weights have changed"),
    build: (PassError, "no fprop to differentiate"),
    failure: (PassError, "no fprop to differentiate: .* it failed"),
}


@pytest.mark.parametrize("between", BETWEEN)
def test_bprop_of_another_pass_is_refused(between):
    model = built("conv last")
    x, dy = arrays(model, 0)
    between(model, x, dy)
    kind, words = BETWEEN[between]
    with pytest.raises(kind, match=words):
        model.bprop(dy)
    with pytest.raises((PassError, ShapeError), match="run fprop of the batch right before bprop"):
        model.bprop(dy)  # asked again, it does not go back through the other one
    model.fprop(x)
    model.bprop(dy)


def test_an_evaluation_has_gradients_too():
    model = built("normalised")
    x, dy = arrays(model, 0)
    model.train_batch(x, dy)
    model.fprop(x, training=False)
    first = model.bprop(dy)
    step, direction = 1e-5, arrays(model, 1)[0]
    ahead, behind = (model.fprop(x + sign * step * direction, training=False) for sign in (1, -1))
    np.testing.assert_allclose(np.sum(first * direction), np.sum((ahead - behind) * dy) / (2 * step), rtol=1e-6)
    model.forward(x)  # nobody wants gradients of this one
    model.fprop(x, training=False)
    model.bprop(dy)


def test_a_gradient_of_another_shape_is_refused():
    model = built("conv last")
    x, dy = arrays(model, 0)
    model.fprop(x)
    with pytest.raises(ShapeError, match=r"dy of shape \(3, 6, 5, 1\)"):
        model.bprop(dy[..., :1])


def test_pretraining_leaves_a_pass_alone():
    model = nd.GB([nd.LocalFilteringLayer(2, 3), nd.L2PoolingLayer(2, 1), nd.FCLayer(3)], backend="numpy")
    model.build(SHAPE, 2)
    x, dy = np.ones((2, *SHAPE)), np.ones((2, 3))
    for other in (lambda: model.stages[0].fprop(x), lambda: optimal_stimulus(model, 0, [(1, 1, 0)], steps=1)):
        model.fprop(x)
        expected = model.bprop(dy)
        other()
        np.testing.assert_array_equal(model.bprop(dy), expected)


def test_on_tiles_all_ranks_raise_and_go_on():
    def job(comm):
        layers = [nd.ConvLayerDist(3, 3, padding=1, activation=nd.Tanh()) for _ in range(3)]
        model = nd.ConvnetDist(layers, dtype="float64", backend="numpy")
        model.build(SHAPE, 2, nd.ProcessGrid(comm, rows=2, cols=2))
        rng = np.random.default_rng(0)
        x, dy = model.scatter(rng.normal(size=(2, *SHAPE))), model.scatter_output(rng.normal(size=(2, 6, 5, 3)))
        model.fprop(x)
        expected = model.bprop(dy)
        model.fprop(x, training=False)
        with pytest.raises(PassError):
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
            whole = np.arange(2.0 * 6 * 5 * 3).reshape(2, 6, 5, 3)
            whole.flags.writeable = False
            tile = array.scatter(whole)
            assert not np.shares_memory(tile, whole)
            tile.flags.writeable = False
            view = array.get_fprop_view(tile)
            back = array.get_bprop_view(view)
            total = np.ones(3)
            array.total(total)
            assert (total == 1).all()
            if reuse:
                continue
            kept = view.copy(), back.copy()
            for change in LAYOUTS.values():
                other = np.asarray(change(-tile))
                other.flags.writeable = False
                again = array.get_fprop_view(other)
                expected = array.get_fprop_view(np.array(other).astype("float64"))
                np.testing.assert_array_equal(again, expected)
                assert again.dtype == array.get_bprop_view(np.asarray(change(view))).dtype == np.float64
                assert not np.shares_memory(again, other)
            np.testing.assert_array_equal(view, kept[0])
            np.testing.assert_array_equal(back, kept[1])
            with pytest.raises(ShapeError, match="give real numbers"):
                array.get_fprop_view(tile * 1j)

    loopback.run(parts[0] * parts[1], job)


class OneWay(nd.ActivationLayer):
    """Cannot be gone back through."""

    def backward(self, ctx, dy):
        raise AssertionError("nobody needs the gradient of what has nothing to train before it")


def test_a_step_leaves_out_first_layers_that_have_nothing_to_train():
    x, targets = np.random.default_rng(0).random((2, *SHAPE)), np.array([0, 1])
    model = nd.Convnet([OneWay(nd.Tanh()), nd.L2PoolingLayer(2), nd.ConvLayer(3, 1), nd.FCLayer(2)], seed=1)
    model.build(SHAPE, len(x))
    assert model.train_batch(x, targets) > 0
    with pytest.raises(AssertionError, match="nobody needs"):
        model.bprop(model.fprop(x, training=True))


def test_evaluation_leaves_running_statistics_alone():
    model = nd.Convnet([nd.ConvLayer(3, 3), nd.BatchNormLayer(), nd.FCLayer(4)], seed=1)
    model.build(SHAPE, 5)
    x, labels = np.random.default_rng(0).normal(size=(5, *SHAPE)), np.arange(5) % 4
    model.train_batch(x, labels)
    before = model.state()
    model.evaluate_batch(x, labels, 5)
    for name, array in model.state().items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)
