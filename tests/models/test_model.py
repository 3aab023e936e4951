"""Guarantees of models other than numerical results, and error messages."""

import numpy as np
import pytest

import neondist as nd
from neondist.comm import loopback
from neondist.errors import ConfigError, DataError, GridError, ShapeError
from neondist.halo import Phase


def build_small_model(**options):
    model = nd.Convnet([nd.ConvLayer(2, 3, padding=1), nd.FCLayer(3)], **options)
    model.build((5, 4, 1), batch_size=2)
    return model


class DtypeRecorder(nd.Observer):
    """Observer that records the dtypes of arrays by name."""

    def __init__(self):
        self.dtypes = {}

    def on_value(self, layer, name, array):
        self.dtypes.setdefault(name, set()).add(array.dtype)


def test_layers_are_named_after_their_class():
    layers = [nd.ConvLayer(1, 1), nd.MaxPoolingLayer(1), nd.ConvLayer(1, 1), nd.FCLayer(2), nd.L2PoolingLayer(1)]
    names = [layer.name for layer in nd.Convnet(layers).layers]
    assert names == ["conv1", "max_pooling1", "conv2", "fc1", "l2_pooling1"]
    assert nd.ConvnetDist([nd.ConvLayerDist(1, 1)]).layers[0].name == "conv1"


def test_layers_without_a_serial_class_are_named_after_their_own_class():
    class OnlyTiledLayerDist(nd.Dist, Untwinned):
        """Distributed layer of a serial one."""

    class BareLayerDist(nd.Dist, nd.Layer):
        """Distributed layer without a serial one."""

        forward, backward = Untwinned.forward, Untwinned.backward

    model = nd.ConvnetDist([OnlyTiledLayerDist(), BareLayerDist(), BareLayerDist()])
    assert [layer.name for layer in model.layers] == ["untwinned1", "bare1", "bare2"]


def test_assigning_a_parameter_copies_it():
    model = build_small_model()
    model.layers[0].params["bias"] = np.array([7.0, 8.0])
    assert (model.parameters.values == 7.0).sum() == 1
    with pytest.raises(ShapeError, match="expected"):
        model.layers[0].params["bias"] = np.zeros(3)


def test_state_is_copied_and_restored():
    model, other = build_small_model(seed=1), build_small_model(seed=2)
    state = model.state()
    assert not np.array_equal(state["conv1/weights"], other.state()["conv1/weights"])
    other.load_state(state)
    state["conv1/weights"][...] = 0
    np.testing.assert_array_equal(other.state()["conv1/weights"], model.state()["conv1/weights"])


def test_mismatched_state_changes_nothing():
    model = build_small_model()
    before = model.state()
    invalid = dict(before, **{"conv1/weights": np.zeros((3, 3, 1, 9))})
    with pytest.raises(ShapeError, match="'conv1/weights' has shape"):
        model.load_state(invalid)
    del invalid["fc1/bias"]
    with pytest.raises(ShapeError, match="missing fc1/bias"):
        model.load_state(invalid | {"other/bias": np.zeros(1)})
    for name, array in model.state().items():
        np.testing.assert_array_equal(array, before[name])


def test_float32_stays_float32():
    model = nd.Convnet(
        [
            nd.ConvLayer(4, 3, padding=1, activation=nd.Logistic()),
            nd.BatchNormLayer(),
            nd.DropoutLayer(),
            nd.AvgPoolingLayer(2),
            nd.L2PoolingLayer(2),
            nd.MaxPoolingLayer(1),
            nd.GlobalAvgPoolingLayer(),
            nd.FCLayer(3),
        ]
    )
    model.build((9, 9, 1), batch_size=2)
    recorder = DtypeRecorder()
    with model.grid.observers.add_temporarily(recorder):
        y = model.fprop(np.ones((2, 9, 9, 1), np.float32))
        model.bprop(y)
    assert set(recorder.dtypes) == {"weights", "output", "gradients of the weights", "gradient of the input"}
    assert all(dtypes == {np.dtype("float32")} for dtypes in recorder.dtypes.values())
    assert all(array.dtype == np.float32 for array in model.state().values())


def test_random_numbers_are_independent_per_layer():
    """Weights are keyed by seed, layer and parameter, masks by seed, layer and step; layers count by name."""

    def draw_arrays(seed, *names, step=0):
        layers = [nd.FCLayer(40, bias=False, name=names[0]), nd.FCLayer(40, bias=False, name=names[1])]
        model = nd.MLP([*layers, *(nd.DropoutLayer(0.5, name=name) for name in names[2:])], seed=seed)
        model.build((40,), batch_size=3)
        model.step = step
        run = model.executor.forward(np.ones((3, 40), np.float32), Phase(True, step))
        masks = [context.mask for context in run.last_section_pass.contexts[2:]]
        return [*(layer.params["weights"] for layer in layers), *masks]

    arrays = draw_arrays(1, "a", "b", "c", "d")
    assert not np.array_equal(arrays[0], arrays[1])
    assert not np.array_equal(arrays[2], arrays[3])
    assert not any(map(np.array_equal, arrays, draw_arrays(2, "a", "b", "c", "d")))
    assert not any(map(np.array_equal, arrays[2:], draw_arrays(1, "a", "b", "c", "d", step=1)[2:]))
    for array, reordered in zip(
        arrays, [draw_arrays(1, "b", "a", "d", "c")[index] for index in (1, 0, 3, 2)], strict=True
    ):
        np.testing.assert_array_equal(array, reordered)


def test_inputs_are_not_modified():
    x = np.random.default_rng(0).normal(size=(2, 5, 4, 1)).astype(np.float32)
    before = x.copy()
    model = nd.Convnet([nd.ActivationLayer(nd.ReLU()), nd.FCLayer(3)])
    model.build((5, 4, 1), batch_size=2)
    dy = np.ones((2, 3), np.float32)
    model.fprop(x)
    model.bprop(dy)
    np.testing.assert_array_equal(x, before)
    assert (dy == 1).all()


def test_dropout_rate_and_evaluation():
    model = nd.Convnet([nd.DropoutLayer(0.25)], dtype="float64")
    model.build((100, 100, 1), batch_size=4)
    x = np.ones((4, 100, 100, 1))
    y = model.fprop(x)
    assert abs((y == 0).mean() - 0.25) < 0.01
    assert np.allclose(y[y != 0], 1 / 0.75)
    np.testing.assert_array_equal(model.fprop(x), y)
    model.step += 1
    assert not np.array_equal(model.fprop(x), y)
    np.testing.assert_array_equal(model.fprop(x, training=False), x)


class WithoutContext(nd.Layer):
    """Layer without the argument `ctx`."""

    def forward(self, view):
        return view

    def backward(self, dy):
        return dy


class BackwardWithoutContext(WithoutContext):
    """Layer without the argument `ctx` of `backward`."""

    def forward(self, ctx, view):
        return view


class Untwinned(nd.Layer):
    """Layer without a distributed class."""

    def forward(self, ctx, view):
        return view

    def backward(self, ctx, dy):
        return dy


MISTAKES = {
    "kernel": (
        lambda: nd.Convnet([nd.ConvLayer(1, 9)]).build((5, 5, 1), 1),
        ShapeError,
        r"layer 0 'conv1' \(ConvLayer\): kernel_size \(9, 9\)",
    ),
    "groups": (
        lambda: nd.Convnet([nd.ConvLayer(4, 1, groups=2)]).build((5, 5, 3), 1),
        ConfigError,
        r"layer 0 'conv1'.*groups 2 must divide the input's 3 channels",
    ),
    "reflect": (
        lambda: nd.Convnet([nd.ConvLayer(1, 3, padding=5, padding_mode="reflect")]).build((5, 5, 1), 1),
        ConfigError,
        "layer 0 'conv1'.*reflect",
    ),
    "padding word": (lambda: nd.ConvLayer(1, 3, padding="valid"), ConfigError, "padding 'valid'"),
    "scheme": (lambda: nd.ConvLayer(1, 3, scheme="towr"), ConfigError, "did you mean 'tower'"),
    "pool padding": (
        lambda: nd.Convnet([nd.MaxPoolingLayer(2, padding=2)]).build((5, 5, 1), 1),
        ConfigError,
        "layer 0 'max_pooling1'.*padding 2 must be less",
    ),
    "names": (
        lambda: nd.Convnet([nd.FCLayer(1, name="a"), nd.FCLayer(1, name="a")]),
        ConfigError,
        "'a' is given twice",
    ),
    "dtype": (lambda: nd.Convnet([nd.FCLayer(1)], dtype="float16"), ConfigError, "dtype 'float16'"),
    "backend": (
        lambda: nd.Convnet([nd.FCLayer(1)], backend="tensor").build((5, 5, 1), 1),
        ConfigError,
        "backend 'tensor'",
    ),
    "empty": (lambda: nd.Convnet([]), ConfigError, "at least one layer"),
    "vector": (lambda: nd.Convnet([nd.FCLayer(1)]).build((5,), 1), ShapeError, "use an MLP for vectors"),
    "mlp": (lambda: nd.MLP([nd.ConvLayer(1, 1)]).build((5, 5, 1), 1), ConfigError, "use Convnet"),
    "not built": (lambda: nd.Convnet([nd.FCLayer(1)]).fprop(np.zeros((1, 2, 2, 1))), ConfigError, "not built yet"),
    "not built for scatter": (lambda: nd.Convnet([nd.FCLayer(1)]).scatter(np.zeros(1)), ConfigError, "not built yet"),
    "not built for gather": (lambda: nd.Convnet([nd.FCLayer(1)]).gather(np.zeros(1)), ConfigError, "not built yet"),
    "not built for gradients of the output": (
        lambda: nd.Convnet([nd.FCLayer(1)]).scatter_output(np.zeros(1)),
        ConfigError,
        "not built yet",
    ),
    "not built for gradients of the input": (
        lambda: nd.Convnet([nd.FCLayer(1)]).gather_input(np.zeros(1)),
        ConfigError,
        "not built yet",
    ),
    "not built for messages": (lambda: nd.Convnet([nd.FCLayer(1)]).ledger(), ConfigError, "not built yet"),
    "not built for guards": (
        lambda: nd.DebugHalo().guard(nd.Convnet([nd.FCLayer(1)])),
        ConfigError,
        "not built yet",
    ),
    "forward without context": (
        lambda: nd.Convnet([WithoutContext()]).plan((5, 5, 1)),
        ConfigError,
        r"layer 0 'without_context1'.*: forward\(view\): .*; define forward\(self, ctx, view\)",
    ),
    "backward without context": (
        lambda: nd.Convnet([BackwardWithoutContext()]).plan((5, 5, 1)),
        ConfigError,
        r"backward\(dy\): .*; define backward\(self, ctx, dy\)",
    ),
    "a layer in two places": (
        lambda: (
            (layer := nd.ActivationLayer(nd.RectLin())) and nd.Convnet([layer, [layer, nd.FCLayer(1)]]).plan((5, 5, 1))
        ),
        ConfigError,
        "layers: layer 'activation1' is used twice; create a layer for each place",
    ),
    "no state": (lambda: build_small_model().load_state(None), ConfigError, "state: expected a mapping, got None"),
    "state without numbers": (
        lambda: (model := build_small_model()).load_state(model.state() | {"fc1/bias": [None] * 3}),
        ShapeError,
        "state: 'fc1/bias': has dtype object; convert it to real numbers",
    ),
    "no distributed class": (
        lambda: nd.distribute(nd.Convnet([Untwinned()])),
        ConfigError,
        r"Untwinned has no distributed class; define one.*class UntwinnedDist\(nd.Dist, Untwinned\)",
    ),
    "mixed": (
        lambda: nd.ConvnetDist([nd.FCLayer(1)]).build((5, 5, 1), 1, nd.ProcessGrid.serial()),
        ConfigError,
        r"'fc1' \(FCLayer\) is serial",
    ),
    "label": (
        lambda: build_small_model().train_batch(np.zeros((2, 5, 4, 1), np.float32), np.array([0, 9])),
        DataError,
        "9",
    ),
    "targets": (
        lambda: build_small_model().train_batch(np.zeros((2, 5, 4, 1), np.float32), np.zeros(5, int)),
        ShapeError,
        "5 targets for a batch",
    ),
    "image": (lambda: build_small_model().fprop(np.zeros((2, 5, 5, 1), np.float32)), ShapeError, "x of shape"),
}


@pytest.mark.parametrize(("make", "error", "message"), MISTAKES.values(), ids=MISTAKES)
def test_error_messages(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_targets_and_state_may_be_lists():
    model, x = build_small_model(), np.ones((2, 5, 4, 1))
    before = model.state()
    loss = model.train_batch(x, np.array([0, 2]))
    model.load_state({name: array.tolist() for name, array in before.items()})
    assert model.train_batch(x, [0, 2]) == loss


def test_models_do_not_share_layers():
    shared, x = nd.ConvLayer(2, 3), np.ones((1, 5, 5, 1))
    first, second = nd.Convnet([shared]), nd.Convnet([shared, nd.FCLayer(2)])
    first.build((5, 5, 1), 1)
    run = first.forward(x)
    second.build((5, 5, 1), 1)
    second.train_batch(x, [0])
    for use in (lambda: first.fprop(x), lambda: run.backward(run.output), first.state, lambda: first.load_state({})):
        with pytest.raises(ConfigError, match="layer 'conv1' has since been built into another model"):
            use()
    first.build((5, 5, 1), 1)
    assert np.array_equal(first.fprop(x), run.output)


def test_rank_error_messages():
    def build_serial_model(comm):
        nd.Convnet([nd.FCLayer(1)]).build((5, 5, 1), 4, nd.ProcessGrid(comm))

    def build_small_batch(comm):
        nd.ConvnetDist([nd.FCLayerDist(1)]).build((5, 5, 1), 1, nd.ProcessGrid(comm, replicas=2))

    with pytest.raises(GridError, match="Convnet is serial, but the grid has 2 ranks"):
        loopback.run(2, build_serial_model)
    with pytest.raises(ConfigError, match="batch_size 1 is less than replicas 2"):
        loopback.run(2, build_small_batch)


def test_distribute_keeps_weights_loaded_before_the_build():
    state = {name: array + 1 for name, array in build_small_model().state().items()}
    model = nd.Convnet([nd.ConvLayer(2, 3, padding=1), nd.FCLayer(3)])
    model.load_state(state)
    twin = nd.distribute(model)
    twin.build((5, 4, 1), 2, nd.ProcessGrid.serial())
    for name, array in twin.state().items():
        np.testing.assert_array_equal(array, state[name])


def test_representations_of_models():
    model = nd.Convnet([nd.ConvLayer(4, 3), nd.FCLayer(2)])
    assert "not built" in model._repr_html_()
    assert repr(model) == str(model) == "Convnet (not built)"
    with pytest.raises(nd.UserError, match="summary: the model is not built; give the shape of its input"):
        model.summary()
    summary = model.summary((8, 8, 1))
    assert "conv1" in summary
    assert repr(summary) == str(summary)
    model.build((8, 8, 1), 2)
    assert str(model.summary()) == model.compiled.describe()
    for item in (model, model.compiled, model.grid, summary):
        assert item._repr_html_().startswith("<pre>")


def test_repr_of_a_built_model_is_its_table():
    model = nd.Convnet([nd.ConvLayer(4, 3), nd.FCLayer(2)])
    model.build((8, 8, 1), 2)
    assert repr(model) == str(model.summary())
    assert "conv1" in repr(model)
    assert str(model) == repr(model)  # as print shows it
