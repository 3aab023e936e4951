"""Custom layers whose declarations are invalid, or disagree with their `forward` and `backward`."""

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
TWO = {"parameters_for": lambda layer, shape: {"a": ONE, "b": ONE}, "state_for": lambda layer, shape: {"s": ONE}}


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


def train(comm, **members):
    layer = type("OwnLayerDist", (PlainLayerDist,), members)()
    layers = [nd.ConvLayerDist(2, 3, padding=1), layer, nd.ConvLayerDist(2, 3, padding=1), nd.FCLayerDist(3)]
    model = nd.ConvnetDist(layers, dtype="float64", seed=1)
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
    ],
)
def test_invalid_declarations(members, message):
    with pytest.raises(nd.ConfigError, match=f"^layer 1 'own1' .*{message}"):
        train(None, **members)


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


def test_gradients_may_be_read_instead_of_assigned():
    def add(layer, ctx, dy):
        for name in ("a", "b"):
            gradient = ctx.grads[name]
            gradient += 1
        return dy

    train(None, **(TWO | {"backward": add}))
