"""Bytes sent in passes against those planned, by step, kind and direction."""

import copy
from collections import Counter
from itertools import product
from math import prod

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from case_selection import select_cases  # noqa: E402
from torch import nn  # noqa: E402
from torch_runs import GRIDS, count_sent_bytes, share_captures  # noqa: E402

import neondist.torch as ndt  # noqa: E402
from neondist import ProcessGrid  # noqa: E402
from neondist.comm import loopback  # noqa: E402
from neondist.observer import Observer  # noqa: E402
from neondist.torch.lowering.traffic import BackwardSteps  # noqa: E402


class MixedNet(nn.Module):
    """Network with windows, norms, sums, maps of indices, attention, layers over columns and a vector output."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.second = nn.Sequential(nn.MaxPool2d(3, 2, 1), nn.Conv2d(4, 4, 2), nn.GroupNorm(2, 4))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.frozen = nn.Conv2d(4, 4, 1).requires_grad_(False)
        self.last, self.over_columns = nn.Linear(4, 3), nn.Linear(6, 3)

    def forward(self, x):
        y = self.second(self.first(x))
        tokens = y.flatten(2).transpose(1, 2)
        tokens = tokens + self.attention(tokens, tokens, tokens)[0]
        y = self.frozen(tokens.transpose(1, 2).reshape(y.shape)).flip(2)
        y = y / y.detach().amax((1, 2, 3), keepdim=True).clamp(min=1)
        return self.last(y.mean((2, 3))) + self.over_columns(y.mean((1, 2)))


SHAPE = (2, 2, 17, 14)
CAPTURED_PROGRAMS = {}


@pytest.fixture(autouse=True)
def shared_programs():
    with share_captures(CAPTURED_PROGRAMS):
        yield


@pytest.mark.parametrize(
    ("grid", "inputs", "dtype"),
    select_cases(product(GRIDS, [False, True], [torch.float64, torch.bfloat16]), 3),
    ids=str,
)
@pytest.mark.long
def test_traffic_matches_plan(grid, inputs, dtype):
    replicas, rows, cols = grid
    original = MixedNet().to(dtype)

    def body(world):
        with ProcessGrid(world, replicas=replicas, rows=rows, cols=cols) as ranks:
            module = copy.deepcopy(original)
            model = ndt.distribute(module, SHAPE, ranks)
            x = model.scatter(torch.ones(SHAPE, dtype=dtype)).requires_grad_(inputs)
            y = model(x)
            if ranks.size > 1:
                y.backward(torch.ones_like(y))
            trained = [name for name, p in module.named_parameters() if p.requires_grad]
            return count_sent_bytes(model), [model.plan.traffic(rank, trained, inputs) for rank in range(ranks.size)]

    for rank, (sent, plans) in enumerate(loopback.run(replicas * rows * cols, body)):
        assert sent == plans[rank]
        assert sent or replicas * rows * cols == 1


class MaskNorm(nn.Module):
    """Norm with trained weights of an input without gradients."""

    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm2d(2, affine=True)

    def forward(self, x):
        return self.norm((x > 0).to(x.dtype)).mean()


def test_weight_gradients_without_input_gradients():
    original, image = MaskNorm(), torch.randn(SHAPE, dtype=torch.float64)
    original.double()(image).backward()

    def body(world):
        with ProcessGrid(world, rows=3) as ranks:
            module = copy.deepcopy(original)
            module.zero_grad()
            model = ndt.distribute(module, SHAPE, ranks, dtype=torch.float64)
            model(model.scatter(image)).backward()
            trained = ["norm.weight", "norm.bias"]
            assert count_sent_bytes(model) == model.plan.traffic(ranks.rank, trained)
            # the gradient of the input is not needed
            assert ("sum", "norm:aten.instance_norm.default", "backward") not in count_sent_bytes(model)
            return module.norm.weight.grad, module.norm.bias.grad

    for weight, bias in loopback.run(3, body):
        torch.testing.assert_close(weight, original.norm.weight.grad, rtol=0, atol=1e-12)
        torch.testing.assert_close(bias, original.norm.bias.grad, rtol=0, atol=1e-12)


USES_OF_SHAPES = {
    "expand_as": lambda x, p: x.mean().expand_as(p) * 1,
    "expand_as of cells": lambda x, p: x[:1, :1, :1, :1].expand_as(p) * 1,
    "expand_as of ones": lambda x, p: x.mean() * torch.ones(1, dtype=x.dtype).expand_as(p * 2).sum(),
    "view_as": lambda x, p: x.mean().view(1).view_as(p[:1, :1, :1, :1]) * 1,
    "reshape_as": lambda x, p: x.mean().reshape_as(p[:1, :1, :1, :1]) * 1,
    "broadcast_tensors": lambda x, p: torch.broadcast_tensors(x.sum(), p)[0] * 1,
    "broadcast_to": lambda x, p: x.sum().broadcast_to(p.shape) * 1,
    "type_as": lambda x, p: x.type_as(p) + x.sum().float().type_as(p),
    "to": lambda x, p: x.to(p) + x.sum().float().to(p),
    "like": lambda x, p: x.sum() * (torch.zeros_like(p) + torch.ones_like(p * 2) + torch.full_like(p, 3)),
    "new": lambda x, p: x * (p.new_zeros(1) + p.new_ones(1) + p.new_full((1,), 3) + p.new_tensor([2])),
    "numbers": lambda x, p: x / p.numel() * p.shape[2] + p.dim(),
    "detached": lambda x, p: x * p.detach().sum(),
    "masks": lambda x, p: torch.where(p > 0, x.sum(), 0).masked_fill(p > 1, 1),
    "index": lambda x, p: x * p.argmax() * p.flatten().max(0)[1],
    "stacked": lambda x, p: torch.stack([x.sum().expand_as(p), torch.zeros_like(p)]),
    "unused": lambda x, p: x * 1,
}
"""functions of a tensor and a parameter that have no gradient for the parameter"""
USES_OF_VALUES = {
    "sum": lambda x, p: x + p.sum(),
    "sign": lambda x, p: x * p.sign().sum(),
    "no element": lambda x, p: x + p[:0].sum(),
    "times zero": lambda x, p: x + 0 * p.sum(),
    "copysign": lambda x, p: torch.copysign(x.sum(), p),
}


class ManyUses(nn.Module):
    """Module with a parameter for each use."""

    def __init__(self):
        super().__init__()
        self.uses = {**USES_OF_SHAPES, **USES_OF_VALUES}
        self.used = nn.ParameterList([nn.Parameter(torch.randn(1, 2, 3, 4)) for _ in self.uses])
        self.first = nn.Conv2d(2, 2, 1)

    def forward(self, x):
        y = self.first(x)
        return tuple(use(y, p) for use, p in zip(self.uses.values(), self.used, strict=True))


@pytest.mark.parametrize("grid", [{"rows": 1, "cols": 2}, {"replicas": 2, "rows": 2, "cols": 1}])
@pytest.mark.long
def test_only_parameters_with_gradients_are_summed(grid):
    original = ManyUses().double()

    def body(world):
        with ProcessGrid(world, **grid) as ranks:
            module = copy.deepcopy(original)
            model = ndt.distribute(module, SHAPE, ranks, dtype=torch.float64)
            outputs = model(model.scatter(torch.ones(SHAPE, dtype=torch.float64)))
            torch.autograd.backward([y.sum() for y in outputs])
            trained = [name for name, _ in module.named_parameters()]
            reached = BackwardSteps(model.plan, trained).contributing_values
            planned = [
                use for index, use in enumerate(module.uses) if model.plan.parameters.get(f"used.{index}") in reached
            ]
            with_gradient = [use for use, p in zip(module.uses, module.used, strict=True) if p.grad is not None]
            return planned, with_gradient, count_sent_bytes(model), model.plan.traffic(ranks.rank, trained)

    for planned, with_gradient, messages, expected in loopback.run(prod(grid.values()), body):
        assert planned == with_gradient == list(USES_OF_VALUES)
        assert messages == expected


def test_plans_are_equal_on_all_ranks():
    original = MixedNet()

    def body(world):
        with ProcessGrid(world, rows=2, cols=3) as ranks:
            plan = ndt.distribute(copy.deepcopy(original), SHAPE, ranks).plan
            return [plan.traffic(rank) for rank in range(6)], [plan.bytes(rank) for rank in range(6)], plan.describe()

    results = loopback.run(6, body)
    assert all(result[:2] == results[0][:2] for result in results)
    for rank, (plans, count, text) in enumerate(results):
        messages = sum(n for (kind, _, _), n in plans[rank].items() if kind != "sum")
        assert count[rank] == messages > 0
        assert f"rank {rank} sends {messages:,d} bytes" in text
        assert "first.0:aten.conv2d.default" in text
        assert "gradients" in text


def test_observers_see_passes():
    class NameRecorder(Observer):
        def __init__(self):
            self.started, self.values = Counter(), {}

        def on_begin(self, event, name, direction, subject):
            self.started[event, direction] += 1

        def on_value(self, layer, name, array):
            self.values.setdefault((layer.name, name), array)

    original = MixedNet()

    def body(world):
        with ProcessGrid(world, rows=3) as ranks:
            model, names = ndt.distribute(copy.deepcopy(original), SHAPE, ranks), NameRecorder()
            with ranks.observers.add_temporarily(names):
                model(model.scatter(torch.ones(SHAPE))).sum().backward()
            return names

    for names in loopback.run(3, body):
        assert names.started["halo", "forward"] >= names.started["halo", "backward"] > 0
        assert names.started["reduce", "forward"] > 0
        assert names.started["sync", "backward"] == 1
        assert names.started["wait", "backward"] > 0
        recorded = [name for (step, name) in names.values if "conv2d" in step]
        assert "output" in recorded
        assert "gradient of the output" in recorded


def test_unplanned_traffic_raises():
    original = nn.Conv2d(1, 1, 3, padding=1)

    def body(world):
        with ProcessGrid(world, rows=2) as ranks:
            model = ndt.distribute(copy.deepcopy(original), (1, 1, 8, 8), ranks)
            assert model.plan.bytes(ranks.rank) == 8 * 4  # one row in forward; the gradient of the input is not needed
            model.comm.record_traffic = lambda *account: None
            with pytest.raises(RuntimeError, match="were planned"):
                model(model.scatter(torch.ones(1, 1, 8, 8)))

    loopback.run(2, body)


def test_large_gradients_of_weights_are_summed_in_place():
    """Biases may share the memory of a gradient that the user holds, weights of several operators that of a sum."""

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.twice = nn.Conv2d(2, 3, 3), nn.Linear(4, 4)
            self.body = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Dropout(0.0), nn.Linear(5, 4), nn.Dropout(0.0))

        def forward(self, x):
            y = self.twice(self.conv(x))
            return y + self.body(self.twice(y))

    def body(world):
        with ProcessGrid(world, rows=2, cols=1) as ranks:
            plan = ndt.distribute(Network(), (1, 2, 8, 6), ranks).plan
            return {name for name, value in plan.parameters.items() if value in plan.unaliased_gradients}

    assert loopback.run(2, body)[0] == {"conv.weight", "body.0.weight", "body.3.weight"}


def test_integer_inputs_have_no_gradient():
    class Embedded(nn.Conv2d):
        def forward(self, x, times):
            return super().forward(x) * times.double().sin()[:, None, None, None]

    def body(world):
        with ProcessGrid(world, rows=2) as grid:
            module = Embedded(2, 2, 3).requires_grad_(False).double()
            model = ndt.distribute(module, [SHAPE, SHAPE[:1]], grid, dtype=[torch.float64, torch.int64])
            return {direction for kind, _, direction in model.plan.traffic(grid.rank, (), inputs=True) if kind == "sum"}

    assert loopback.run(2, body) == [set(), set()]
