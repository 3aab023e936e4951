"""Scripts that cannot be distributed are rejected with file and line, on every rank."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_runs import share_captures

import neondist as nd

X, LABELS = torch.zeros(4, 1, 6, 6), torch.zeros(4, 6, 6, dtype=torch.long)


@pytest.fixture(autouse=True, scope="module")
def module_captures():
    with share_captures():
        yield


class Eigenvalues(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return torch.linalg.eigvals(x * self.scale).abs()


def train_one_step(d, model, optimizer=None, build_in_scope=True):
    """Train a model for one step; return its loss."""
    with d.scope():
        network = model() if build_in_scope else None
    network = network or model()
    optimizer = optimizer and optimizer(network.parameters())

    @d.function
    def step(x, y):
        loss = F.cross_entropy(network(x), y)
        loss.backward()
        if optimizer:
            optimizer.step(*[lambda: loss] * isinstance(optimizer, torch.optim.LBFGS))
        return loss

    return step(X, LABELS)


def make_small_model():
    return nn.Conv2d(1, 2, 3, padding=1)


def decorate_outside_a_scope(d):
    return d.function(lambda x: x)


def decorate_a_generator(d):
    with d.scope():
        pass

    @d.function
    def steps():
        yield 1


def train_with_optimizer(optimizer_type):
    return lambda d: train_one_step(d, make_small_model, lambda parameters: optimizer_type(parameters, lr=0.1))


HERE = r"test_autodist_mistakes\.py:\d+: "
MISTAKES = {
    "model outside": (
        lambda d: train_one_step(d, make_small_model, build_in_scope=False),
        HERE + "step calls a Conv2d .*outside the",
    ),
    "operator": (lambda d: train_one_step(d, Eigenvalues), HERE + "aten.linalg_eigvals"),
    "function first": (decorate_outside_a_scope, HERE + r"<lambda>: function\(\) called outside a scope"),
    "generator": (decorate_a_generator, HERE + "steps: expected a function, not a generator"),
    "closure": (
        train_with_optimizer(torch.optim.LBFGS),
        "strategy: PS partitions the update, but LBFGS.step got a closure",
    ),
    "whole parameters": (
        train_with_optimizer(torch.optim.Adafactor),
        "PS partitions the update, but Adafactor needs whole",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_invalid_scripts(name):
    call, message = MISTAKES[name]

    def body(world):
        with nd.ProcessGrid(world, rows=2) as grid, pytest.raises(nd.UserError, match=message):
            call(nd.AutoDist(strategy="PS", grid=grid))
        return True

    assert nd.loopback.run(2, body) == [True, True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "PSs"}, "strategy: unknown builder 'PSs'; did you mean 'PS'"),
        ({"strategy": 3}, "strategy: expected a builder, its name or a strategy, got 3"),
        ({"grid": {"row": 2}}, "grid: unknown key 'row'; did you mean 'rows'"),
        ({"grid": 4}, "grid: expected a ProcessGrid or a mapping"),
        ({"grid": {"replicas": 2, "rows": 2}}, r"grid \(replicas: 2, rows: 2, cols: any\) does not match 1 rank"),
        ({"resource_spec": {"nodes": []}}, "nodes: is empty"),
        (
            {"resource_spec": {"nodes": [{"address": "localhost", "cpus": [0, 1]}]}, "grid": {"rows": 3}},
            r"grid \(replicas: 1, rows: 3, cols: any\) does not match 2 ranks",
        ),
        (
            {"resource_spec": {"nodes": [{"address": "localhost", "cpus": [0, 1]}]}},
            "only be started from a resource file|this process has no script",  # under pytest; in a worker of xdist
        ),
    ],
)
def test_invalid_arguments(arguments, message):
    with pytest.raises(nd.UserError, match=message):
        nd.AutoDist(**arguments)


@pytest.mark.parametrize(
    "strategy",
    [
        "AllReduce(compressor='fp16')",
        "AllReduce(compressor='topk(0.5)')",
        "AllReduce(compressor='powersgd(9)')",
        "PS(sync=False)",
        "PS(staleness=2)",
    ],
)
def test_unsupported_strategies(strategy):
    with pytest.raises(nd.ConfigError, match="strategy: "):
        train_one_step(nd.AutoDist(strategy=strategy), make_small_model)


def test_resources_and_strategy():
    d = nd.AutoDist({"nodes": [{"address": "localhost"}]}, "PSLoadBalancing")
    assert (d.resources.replicas, type(d.strategy)) == (1, nd.strategies.PSLoadBalancing)
    with d.scope():
        model = make_small_model()
    assert list(d.strategy.parameters) == ["module/weight", "module/bias"]
    assert type(model) is nn.Conv2d
