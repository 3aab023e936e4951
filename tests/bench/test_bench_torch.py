"""PyTorch baselines of the benchmark: the same networks."""

import sys

import numpy as np
import pytest

import neondist as nd
from neondist.bench.step import _gradients_without_dropout
from neondist.bench.torch_baseline import TorchBaseline
from neondist.errors import ConfigError, LaunchError
from neondist.models import ModelStep

pytest.importorskip("torch", reason="the baseline needs PyTorch")
relu = nd.ReLU


def build_model(layers, shape, cost=None, optimizer=None):
    model = nd.Convnet(layers, cost=cost, optimizer=optimizer, backend="numpy", dtype="float64")
    model.build(shape, 3)
    return model


def make_twin(model, x, targets):
    from neondist.bench.torch_twin import TorchTwin

    return TorchTwin(type(model)(**model.arguments()), model.state(), list(model.gradients()), x, targets)


def start_baseline(model, threads=1):
    return TorchBaseline(
        model, model.state(), list(model.gradients()), np.ones((3, 6, 6, 1)), np.zeros(3, int), threads
    )


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
    model = build_model(layers(), shape, optimizer=optimizer)
    rng = np.random.default_rng(0)
    x, targets = rng.normal(size=(3, *shape)), np.array([0, 2, 1])
    twin = make_twin(model, x, targets)
    for _ in range(3):
        loss, gradients = _gradients_without_dropout(
            model, lambda: ModelStep(model).compute_gradients(x, targets, 3)[0]
        )
        np.savez(tmp_path / "ours.npz", **(model.state() | gradients))
        reference, worst, worst_name = twin.compare_gradients(str(tmp_path / "ours.npz"))
        assert loss == pytest.approx(reference, rel=1e-12)
        assert worst < 1e-10, worst_name
        for layer in model.leaves:
            vars(layer).update({"rate": 0.0} if hasattr(layer, "rate") else {})
        for part in twin.module.modules():
            vars(part).update({"p": 0.0} if hasattr(part, "p") else {})
        model.train_batch(x, targets)
        twin.step()


def test_cells_as_samples():
    model = build_model([nd.ConvLayer(4, 3, padding=1)], (4, 5, 2), nd.SoftmaxCrossEntropy())
    rng = np.random.default_rng(0)
    x, targets = rng.normal(size=(3, 4, 5, 2)), rng.integers(4, size=(3, 4, 5))
    twin = make_twin(model, x, targets)
    assert model.train_batch(x, targets) == pytest.approx(twin.step(), rel=1e-12)


def test_frozen_layers_are_unchanged():
    layers = [nd.ConvLayer(2, 3, name="kept"), nd.ActivationLayer(relu()), nd.FCLayer(2)]
    model = build_model(layers, (6, 6, 1))
    state, names = model.state(), [name for name in model.gradients() if not name.startswith("kept")]
    from neondist.bench.torch_twin import TorchTwin

    twin = TorchTwin(type(model)(**model.arguments()), state, names, np.ones((3, 6, 6, 1)), np.zeros(3, int))
    twin.step()
    assert [part.inplace for part in twin.module if hasattr(part, "inplace")] == [True]
    assert twin.module[0].weight.grad is None
    assert list(twin.trained) == names == ["fc1/bias", "fc1/weights"]


def test_worst_gradient():
    import torch

    from neondist.bench.torch_twin import worst_gradient

    a = {"x": torch.ones(4), "y": torch.zeros(3)}
    b = {"x": torch.tensor([1, 1, 1, 2.0]), "y": torch.full((3,), 1e-9)}
    assert worst_gradient(a, b) == (pytest.approx(1 / np.sqrt(7)), "x")
    assert worst_gradient({"x": torch.ones(1)}, {"x": torch.ones(1)})[0] == 0


class CustomActivation(nd.Identity):
    """Activation without a counterpart."""


@pytest.mark.long
def test_layers_without_a_counterpart(monkeypatch):
    model = build_model([nd.FCLayer(2)], (6, 6, 1), nd.SumSquared())
    with pytest.raises(ConfigError, match="SumSquared has no counterpart"):
        make_twin(model, np.ones((3, 6, 6, 1)), np.zeros(3, int))
    monkeypatch.setenv("NEONDIST_TESTS_HIDE", "")
    baseline = start_baseline(build_model([nd.FCLayer(2, activation=CustomActivation())], (6, 6, 1)))
    with pytest.raises(ConfigError, match=r"network in PyTorch: .*CustomActivation"):
        baseline.time_steps(1)
    baseline.close()


def test_failed_baseline_process_is_reported(monkeypatch, capfd):
    monkeypatch.setattr(sys, "executable", "false")
    baseline = start_baseline(build_model([nd.FCLayer(2)], (6, 6, 1)))
    with pytest.raises(LaunchError, match="process ended with exit code 1"):
        baseline.time_steps(1)
    baseline.close()
