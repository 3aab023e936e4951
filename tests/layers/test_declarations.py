"""Custom layers whose declarations are invalid, or disagree with their `forward` and `backward`."""

from functools import partial

import numpy as np
import pytest

import neondist as nd
from neondist import loopback
from neondist.errors import PlanMismatchError, ShapeError

ONE = nd.Parameter((1,), nd.Constant(1.0))
SUMS = {
    "reductions_for": lambda layer, shape: [nd.Reduction("forward", "tiles", shape[-1])],
    "reduce": lambda layer, ctx, view: ctx.kernels.sample_sum(ctx.owned(view)),
}
SAME_SHAPE = {"output_shape_for": lambda layer, shape: shape}
TWO = {"parameters_for": lambda layer, shape: {"a": ONE, "b": ONE}, "state_for": lambda layer, shape: {"s": ONE}}


def declare_reduction(**fields):
    reduction = nd.Reduction("forward", "tiles", 2)._replace(**fields)
    return SUMS | {"reductions_for": lambda layer, shape: [reduction]}


def declare_parameter(*arguments, **options):
    return {"parameters_for": lambda layer, shape: {"a": nd.Parameter(*arguments, **options)}}


def assign(name, make):
    def backward(layer, ctx, dy):
        ctx.grads[name] = make(ctx)
        return dy

    return {"backward": backward}


class PlainLayerDist(nd.Dist, nd.Layer):
    def forward(self, ctx, view):
        return 2 * view

    def backward(self, ctx, dy):
        return 2 * dy


def train(comm, dtype="float64", **members):
    layer = type("OwnLayerDist", (PlainLayerDist,), members)()
    layers = [nd.ConvLayerDist(2, 3, padding=1), layer, nd.ConvLayerDist(2, 3, padding=1), nd.FCLayerDist(3)]
    model = nd.ConvnetDist(layers, dtype=dtype, seed=1)
    model.build((8, 6, 1), 2, nd.ProcessGrid(comm))
    model.train_batch(model.scatter(np.ones((2, 8, 6, 1))), np.array([0, 2]))


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"window": 3}, "window, or window_for, is 3; expected an nd.Window"),
        ({"window_for": lambda layer, shape: (3, 3)}, r"is \(3, 3\); expected an nd.Window"),
        ({"output_shape_for": lambda layer, shape: 5}, "output shape 5; expected a tuple"),
        ({"output_channels_for": lambda layer, shape: "3"}, r"output shape \(8, 6, '3'\)"),
        ({"output_channels_for": lambda layer, shape: 0}, r"output shape \(8, 6, 0\)"),
        ({"parameters_for": lambda layer, shape: {"a": (1,)}}, "parameters_for returns .*; expected a dict of name"),
        ({"state_for": lambda layer, shape: [ONE]}, "state_for returns .*; expected a dict of name"),
        (
            {"parameters_for": lambda layer, shape: {"a": ONE}, "state_for": lambda layer, shape: {"a": ONE}},
            "both declare 'a'; rename one",
        ),
        ({"reductions_for": lambda layer, shape: {"forward": 1}}, "expected a list of nd.Reduction"),
        ({"reductions_for": lambda layer, shape: [nd.Reduction("forward", "all")]}, "over 'all'; expected"),
        ({"reductions_for": lambda layer, shape: [nd.Reduction("back", "tiles")]}, "direction 'back'"),
        (
            {"reductions_for": lambda layer, shape: [nd.Reduction("forward", "tiles", 2)]},
            "declares a reduction before forward, but OwnLayerDist has no method reduce; define it",
        ),
        (
            {"reductions_for": lambda layer, shape: [nd.Reduction("backward", "tiles", 2)]},
            "before backward, but OwnLayerDist has no method reduce_backward; define it",
        ),
        ({"reduce": lambda layer, ctx, view: view}, "reduce is never called, because OwnLayerDist has no"),
        ({"reduce_backward": lambda layer, ctx, dy: dy}, "reduce_backward is never called"),
        (SUMS | {"reductions_for": lambda layer, shape: [nd.Reduction("forward", "tiles", 2)] * 2}, "declares several"),
        (SUMS | {"reductions_for": lambda layer, shape: None}, "reductions_for returns None; expected a list"),
        (declare_reduction(combine="max"), "combine: expected 'sum' or 'moments', got the text 'max'"),
        (declare_reduction(fixed_elements=-1), "fixed_elements: expected an integer of at least 0, got -1"),
        (declare_reduction(result_elements_per_sample="2"), "result_elements_per_sample: .*got the text '2'"),
        ({"activation": "relu"}, "activation: expected an object .*write ReLU"),
        ({"parameters_for": lambda layer, shape: {1: ONE}}, "parameters_for returns .*; expected a dict of name"),
        (declare_parameter(3), "Parameter: shape: expected a list .*got 3"),
        (declare_parameter((1,), 1.0), "Parameter: initializer: expected an object .*got 1.0"),
        (declare_parameter((1,), nd.Constant), r"initializer: .*got the class Constant; write Constant\(\)"),
        (declare_parameter((1,), layout=nd.Tiled), "Parameter: layout: expected Replicate, got the class Tiled"),
        (declare_parameter((8, 5, 2), layout=nd.Tiled(2)), r"'a': shape \(8, 5, 2\) .*spatial axes, \(8, 6\)"),
        (declare_parameter((8, 6), layout=nd.Tiled(1)), r"'a': shape \(8, 6\) .*spatial axes, \(8, 6\)"),
        (declare_parameter((8, 3), layout=nd.Shard((8, 6, 2))), "the first axis its 96 elements"),
        (declare_parameter((48, 3), layout=nd.Shard((8, 6, 1))), r"must have the input shape \(8, 6, 2\)"),
        ({"parameters_for": lambda layer, shape: {"": ONE}}, "parameters_for: '' contains .*an empty part"),
        ({"state_for": lambda layer, shape: {"a/./b": ONE}}, "state_for: 'a/./b' contains .*rename it"),
        ({"output_shape_for": lambda layer, shape: (16, 12, 2)}, r"extent \(16, 12\), .* gives \(8, 6\)"),
        ({"window": nd.Window(3, padding=0)} | SAME_SHAPE, r"extent \(8, 6\), .* gives \(6, 4\)"),
        ({"output_shape_for": lambda layer, shape: (2,)}, r"the output \(2,\) has no spatial .*return ctx.reduced"),
    ],
)
def test_invalid_declarations(members, message):
    with pytest.raises(nd.ConfigError, match=f"^layer 1 'own1' .*{message}"):
        train(None, **members)


class UnflattenLayer(nd.Layer):
    """Each rank takes its tile of an image from the whole vector (n, 42)."""

    def output_shape_for(self, input_shape):
        return 7, 3, 2

    def forward(self, ctx, view):
        return view.reshape(-1, 7, 3, 2)[(slice(None), *ctx.output_box.slices)]

    def flatten(self, ctx, dy):
        gradient = ctx.xp.zeros((len(dy), 7, 3, 2), dy.dtype)
        gradient[(slice(None), *ctx.output_box.slices)] = dy
        return gradient.reshape(-1, 42)

    def backward(self, ctx, dy):
        return self.flatten(ctx, dy)


class UnflattenLayerDist(nd.Dist, UnflattenLayer): ...


class ReducedUnflattenLayer(UnflattenLayer):
    def reductions_for(self, input_shape):
        return [nd.Reduction("backward", "tiles", result_elements_per_sample=42)]

    def reduce_backward(self, ctx, dy):
        return self.flatten(ctx, dy)

    def backward(self, ctx, dy):
        return ctx.reduced


class ReducedUnflattenLayerDist(nd.Dist, ReducedUnflattenLayer): ...


def differentiate_decoder(layer, comm=None, **options):
    layers = [nd.ConvLayer(2, 3, padding=1), nd.FCLayer(42), layer, nd.ConvLayer(1, 3, padding=1)]
    model = nd.Convnet(layers, dtype="float64", seed=1, **options)
    model = model if comm is None else nd.distribute(model)
    model.build((7, 5, 1), 2, None if comm is None else nd.ProcessGrid(comm))
    x, dy = np.random.default_rng(0).normal(size=(2, 2, 7, 3, 5))[..., None]
    model.fprop(model.scatter(x.reshape(2, 7, -1, 1)[:, :, :5]))
    return model.gather_input(model.bprop(model.scatter_output(dy.reshape(2, 7, 15, 1)[:, :, :3])))


def test_gradients_of_vectors_are_sums_over_the_tiles_of_an_image():
    expected = differentiate_decoder(UnflattenLayer())
    for ranks in (1, 2, 4):
        with pytest.raises(nd.ConfigError, match=r"the input \(42,\) has no spatial axes, .*declare the reduction"):
            loopback.run(ranks, lambda comm: differentiate_decoder(UnflattenLayer(), comm))
        for options in ({}, {"strips": 2}, {"recompute": True}):
            differentiate = partial(differentiate_decoder, ReducedUnflattenLayer(), **options)
            for dx in loopback.run(ranks, differentiate):
                np.testing.assert_allclose(dx, expected, rtol=1e-12)


def test_vectors_with_parameters_of_a_range_of_features_declare_their_layout():
    layer = type("RowsLayerDist", (PlainLayerDist,), declare_parameter((4, 3), layout=nd.Shard((4,))))()
    with pytest.raises(nd.ConfigError, match=r"'a': each rank stores .*set layout = nd.Shard in the class"):
        nd.ConvnetDist([nd.FCLayerDist(4), layer]).build((8, 6, 1), 2)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (
            {"forward": lambda layer, ctx, view: view[:1]},
            r"forward returns an array of shape \(1, \d, 6, 2\); expected",
        ),
        ({"forward": lambda layer, ctx, view: view[..., :1]}, r"shape \(2, \d, 6, 1\); expected \(2, \d, 6, 2\)"),
        ({"window": nd.Window(3, padding=1)}, r"shape \(2, \d, 8, 2\); expected \(2, \d, 6, 2\)"),
        ({"forward": lambda layer, ctx, view: view.astype("f4")}, "dtype float32; expected float64"),
        ({"forward": lambda layer, ctx, view: None}, "forward returns an object of type NoneType; return an array"),
        ({"backward": lambda layer, ctx, dy: dy[..., :1]}, r"backward returns an array of shape \(2, \d, 6, 1\)"),
        ({"backward": lambda layer, ctx, dy: dy[:1, :1]}, r"backward returns an array of shape \(1, 1, 6, 2\)"),
        ({"backward": lambda layer, ctx, dy: None}, "backward returns an object of type NoneType"),
        ({"forward": lambda layer, ctx, view: view.astype("i8")}, "forward returns an array of dtype int64"),
        ({"forward": lambda layer, ctx, view: view * 1j}, "forward returns an array of dtype complex128"),
        ({"backward": lambda layer, ctx, dy: dy > 0}, "backward returns an array of dtype bool"),
        (SUMS | {"reduce": lambda layer, ctx, view: [1.0] * len(view)}, "reduce returns a list; return an array"),
        (TWO, r"backward assigns no gradient of 'a'; assign ctx.grads\['a'\]"),
        (TWO | assign("a", lambda ctx: np.ones(1)), "backward assigns no gradient of 'b'"),
        (TWO | assign("b", lambda ctx: np.ones(1)), "backward assigns no gradient of 'a'"),
    ],
)
@pytest.mark.parametrize("method", ["plain", "stream", "recompute"])
def test_invalid_results(members, message, method, monkeypatch):
    options = {"plain": {}, "stream": {"memory": "1TiB", "strips": 1}, "recompute": {"recompute": True}}[method]
    create = nd.ConvnetDist
    monkeypatch.setattr(nd, "ConvnetDist", lambda layers, **fields: create(layers, **fields, **options))

    def job(comm):
        with pytest.raises(PlanMismatchError, match=f"layer 'own1' .*{message}"):
            train(comm, **members)

    loopback.run(2, job)


@pytest.mark.parametrize("method", ["forward", "backward", "reduce", "reduce_backward"])
def test_results_promoted_to_float64_are_rejected(method):
    """Ranks would exchange twice the planned bytes."""

    def job(comm):
        direction = "backward" if method == "reduce_backward" else "forward"
        members = {method: lambda layer, ctx, array: array.astype("f8")}
        if "reduce" in method:
            members = {
                "reductions_for": lambda layer, shape: [nd.Reduction(direction, "tiles", shape[-1])],
                method: lambda layer, ctx, array: ctx.kernels.sample_sum(array).astype("f8"),
            }
        with pytest.raises(PlanMismatchError, match=f"{method} returns an array of dtype float64; expected float32"):
            train(comm, "float32", **members)

    loopback.run(2, job)


@pytest.mark.parametrize(
    ("members", "error", "message"),
    [
        (TWO | assign("c", lambda ctx: np.ones(1)), nd.ConfigError, r"grads\['c'\]: is not declared; declared: a, b"),
        (TWO | assign("a", lambda ctx: np.ones(2)), ShapeError, r"grads\['a'\]: has shape \(2,\); expected \(1,\)"),
        (TWO | assign("a", lambda ctx: 1.0), ShapeError, r"grads\['a'\]: has shape \(\); expected \(1,\)"),
        (
            TWO | assign("a", lambda ctx: None),
            nd.ConfigError,
            r"grads\['a'\]: is None; assign an array of shape \(1,\)",
        ),
        (TWO | assign("a", lambda ctx: ctx.params["c"]), nd.ConfigError, r"params\['c'\]: is not declared"),
        (TWO | assign("a", lambda ctx: ctx.state["c"]), nd.ConfigError, r"state\['c'\]: is not declared; declared: s"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_mistakes_with_arrays_name_the_layer(members, error, message, ranks):
    def job(comm):
        with pytest.raises(error, match=rf"^layer 'own1' \(OwnLayerDist\): {message}") as caught:
            train(comm, **members)
        assert caught.value.subject.name == "own1"  # the command line adds its file and line

    loopback.run(ranks, job)


def test_errors_of_methods_have_the_layer_as_subject():
    for method in ("forward", "backward", "reduce"):

        def fail(layer, ctx, array):
            raise nd.ConfigError("own message")

        with pytest.raises(nd.ConfigError, match="own message") as caught:
            train(None, **SUMS | {method: fail})
        assert caught.value.subject.name == "own1"


def test_names_that_files_cannot_store_are_rejected():
    for name in ("", "a/", "a//b", ".", "a\0b"):
        with pytest.raises(nd.ConfigError, match=r"^name: .* contains a null character, '\.' or an empty part"):
            nd.Convnet([nd.FCLayer(2, name=name)])


def test_the_mixin_is_listed_before_the_layer_class():
    with pytest.raises(nd.ConfigError, match=r"^class A: list the mixin first: class A\(Dist, FCLayer\)$"):
        type("A", (nd.FCLayer, nd.Dist), {})


def test_constructors_call_that_of_the_base_class():
    layer = type("SilentLayerDist", (PlainLayerDist,), {"__init__": lambda layer: None})()
    with pytest.raises(nd.ConfigError, match=r"^SilentLayerDist: the constructor must call super\(\).__init__"):
        nd.ConvnetDist([layer]).build((8, 6, 1), 2)


def test_gradients_may_be_read_instead_of_assigned():
    def add(layer, ctx, dy):
        for name in ("a", "b"):
            gradient = ctx.grads[name]
            gradient += 1
        return dy

    train(None, **(TWO | {"backward": add}))
