"""PyTorch's side of the bench is the same network."""

import sys

import numpy as np
import pytest

import neondist as nd
from neondist.bench.network import network, read, write
from neondist.bench.step import _without_dropout, worst_gradient
from neondist.errors import ConfigError, LaunchError
from neondist.models import ModelStep

pytest.importorskip("torch", reason="PyTorch is the other side")
relu = nd.ReLU


def built(layers, shape, cost=None, optimizer=None):
    model = nd.Convnet(layers, cost=cost, optimizer=optimizer, backend="numpy", dtype="float64")
    model.build(shape, 3)
    return model


def twin_of(tmp_path, model, x, targets):
    from neondist.bench.torch_twin import TorchTwin

    write(tmp_path, network(model), (x, targets))
    again, (x, targets) = read(tmp_path)
    return TorchTwin(again, x, targets)


NETWORKS = {
    "all layers": (
        lambda: [
            nd.ConvLayer(6, (3, 2), (2, 1), ((1, 2), (0, 1)), activation=nd.Tanh(), padding_mode="reflect"),
            nd.BatchNormLayer(),
            nd.ActivationLayer(relu()),
            nd.Sum([[nd.ConvLayer(6, 3, padding=1, groups=3, bias=False)], [nd.DropoutLayer(0.5)]]),
            nd.Concat([[nd.MaxPoolingLayer(3, 2, 1)], [nd.AvgPoolingLayer(2, 2, ((0, 1), (0, 1)))]]),
            nd.ConvLayer(4, 3, dilation=2, padding=2, padding_mode="wrap", activation=nd.Logistic()),
            nd.FCLayer(5, activation=nd.Identity()),
        ],
        (13, 10, 4),
        nd.SGD(learning_rate=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    ),
    "volumes": (
        lambda: [nd.ConvLayer(3, 2, activation=relu()), nd.MaxPoolingLayer(2), nd.GlobalAvgPoolingLayer()],
        (5, 6, 7, 2),
        nd.Adam(),
    ),
    "sequences": (lambda: [nd.ConvLayer(3, 3, padding="same"), nd.AvgPoolingLayer(2), nd.FCLayer(4)], (9, 2), None),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_same_losses_gradients_and_weights(name, tmp_path):
    layers, shape, optimizer = NETWORKS[name]
    model = built(layers(), shape, optimizer=optimizer)
    rng = np.random.default_rng(0)
    x, targets = rng.normal(size=(3, *shape)), np.array([0, 2, 1])
    twin = twin_of(tmp_path, model, x, targets)
    for _ in range(3):
        loss, gradients = _without_dropout(model, lambda: ModelStep(model).gradients(x, targets, 3)[0])
        theirs = twin.check(str(tmp_path / "gradients.npz"))
        assert loss == pytest.approx(theirs, rel=1e-12)
        with np.load(tmp_path / "gradients.npz") as expected:
            assert worst_gradient(gradients, dict(expected))[0] < 1e-10
        for layer in model.leaves:
            vars(layer).update({"rate": 0.0} if hasattr(layer, "rate") else {})
        twin.dropout = False
        model.train_batch(x, targets)
        twin.step()


def test_cells_as_samples(tmp_path):
    model = built([nd.ConvLayer(4, 3, padding=1)], (4, 5, 2), nd.SoftmaxCrossEntropy())
    rng = np.random.default_rng(0)
    x, targets = rng.normal(size=(3, 4, 5, 2)), rng.integers(4, size=(3, 4, 5))
    twin = twin_of(tmp_path, model, x, targets)
    assert model.train_batch(x, targets) == pytest.approx(twin.step(), rel=1e-12)


def test_worst_gradient():
    a, b = {"x": np.ones(4), "y": np.zeros(3)}, {"x": np.array([1, 1, 1, 2.0]), "y": np.full(3, 1e-9)}
    assert worst_gradient(a, b) == (1 / np.sqrt(7), "x")
    assert worst_gradient({"x": np.ones(1)}, {"x": np.ones(1)})[0] == 0


def test_what_has_no_counterpart_is_named():
    with pytest.raises(ConfigError, match=r"'lcn1' \(LCNLayer\) has no counterpart; there are ConvLayer, "):
        network(built([nd.LCNLayer(3), nd.FCLayer(2)], (6, 6, 1)))
    with pytest.raises(ConfigError, match=r"Softmax has no counterpart"):
        network(built([nd.FCLayer(2, activation=nd.Softmax())], (6, 6, 1)))


def test_the_end_of_the_other_process_is_told(monkeypatch, capfd):
    from neondist.bench import torch_baseline

    monkeypatch.setattr(sys, "executable", "false")
    other = torch_baseline.TorchBaseline(
        network(built([nd.FCLayer(2)], (2, 2, 1))), np.ones((3, 2, 2, 1)), np.zeros(3), 1
    )
    with pytest.raises(LaunchError, match="process ended with code 1"):
        other.time(1)
    other.close()
