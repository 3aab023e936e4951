"""Custom layers whose declarations are invalid, or disagree with their `forward` and `backward`."""

import numpy as np
import pytest

import neondist as nd
from neondist import loopback
from neondist.errors import PlanMismatchError

ONE = nd.Parameter((1,), nd.Constant(1.0))


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
