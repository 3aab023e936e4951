"""Scripts that cannot be distributed are refused with file and line, on every rank."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_runs import captured_once

import neondist as nd

X, LABELS = torch.zeros(4, 1, 6, 6), torch.zeros(4, 6, 6, dtype=torch.long)


@pytest.fixture(autouse=True, scope="module")
def once():
    with captured_once():
        yield


class Eigenvalues(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return torch.linalg.eigvals(x * self.scale).abs()


def trained(d, model, optimizer=None, made_in_scope=True):
    """Train a step of a model; return its loss."""
    with d.scope():
        found = model() if made_in_scope else None
    found = found or model()
    optimizer = optimizer and optimizer(found.parameters())

    @d.function
    def step(x, y):
        loss = F.cross_entropy(found(x), y)
        loss.backward()
        if optimizer:
            optimizer.step(*[lambda: loss] * isinstance(optimizer, torch.optim.LBFGS))
        return loss

    return step(X, LABELS)


def small():
    return nn.Conv2d(1, 2, 3, padding=1)


def before_a_scope(d):
    return d.function(lambda x: x)


def generator(d):
    with d.scope():
        pass

    @d.function
    def steps():
        yield 1


def optimizers(kind):
    return lambda d: trained(d, small, lambda parameters: kind(parameters, lr=0.1))


HERE = r"test_autodist_mistakes\.py:\d+: "
MISTAKES = {
    "model outside": (lambda d: trained(d, small, made_in_scope=False), HERE + "step calls a Conv2d .*outside the"),
    "operator": (lambda d: trained(d, Eigenvalues), HERE + "aten.linalg_eigvals"),
    "function first": (before_a_scope, HERE + r"<lambda>: function\(\) outside of a scope"),
    "generator": (generator, HERE + "steps: expected a function that returns"),
    "closure": (optimizers(torch.optim.LBFGS), "strategy: PS partitions the update, but LBFGS.step got a closure"),
    "whole parameters": (optimizers(torch.optim.Adafactor), "PS partitions the update, but Adafactor needs whole"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_of_scripts(name):
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
        ({"grid": {"replicas": 2, "rows": 2}}, "grid 2 replicas x 2 rows x any cols does not match 1 ranks"),
        ({"resource_spec": {"nodes": []}}, "nodes: is empty"),
        (
            {"resource_spec": {"nodes": [{"address": "localhost", "cpus": [0, 1]}]}, "grid": {"rows": 3}},
            "grid 1 replicas x 3 rows x any cols does not match 2 ranks",
        ),
        (
            {"resource_spec": {"nodes": [{"address": "localhost", "cpus": [0, 1]}]}},
            "a job is started from a file|this process has no script",  # by pytest; by a worker of xdist
        ),
    ],
)
def test_mistakes_of_arguments(arguments, message):
    with pytest.raises(nd.UserError, match=message):
        nd.AutoDist(**arguments)


@pytest.mark.parametrize("strategy", ["AllReduce(compressor='fp16')", "PS(sync=False)", "PS(staleness=2)"])
def test_strategies_that_a_script_cannot_have(strategy):
    with pytest.raises(nd.ConfigError, match="strategy: "):
        trained(nd.AutoDist(strategy=strategy), small)


def test_resources_and_strategy():
    d = nd.AutoDist({"nodes": [{"address": "localhost"}]}, "PSLoadBalancing")
    assert (d.resources.replicas, type(d.strategy)) == (1, nd.strategies.PSLoadBalancing)
    with d.scope():
        model = small()
    assert list(d.strategy.parameters) == ["module/weight", "module/bias"]
    assert type(model) is nn.Conv2d
