"""Scripts with a DistributedOptimizer under each strategy: single-process results, and parts of parameters."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from builders import SYNCHRONOUS_STRATEGIES
from hypothesis import given, settings
from hypothesis import strategies as st
from strategy_training import BATCH, GRIDS, OPTIMIZERS, SHAPE, Net, compute_first_loss
from torch import nn
from torch_runs import share_captures

import neondist as nd
import neondist.torch as ndt


@pytest.fixture(autouse=True, scope="module")
def shared_module_captures():
    with share_captures():
        yield


class SmallNet(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.side, self.last = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(5, 5), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.last(self.first(x).relu().mean((2, 3)) * self.scale)


def train_script(module, optimizer, model=None, steps=range(4)):
    """Train with accumulation, clipping and a schedule, on a distributed model or, with model=None, in one process."""
    call = model or module
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in steps:
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for part in range(1 + step % 2):
            generator = torch.Generator().manual_seed(10 * step + part)
            x = torch.randn(4, 2, 6, 5, generator=generator, dtype=torch.float64)
            labels = torch.randint(3, (4,), generator=generator)
            if model is None:
                nn.functional.cross_entropy(call(x), labels).backward()
            else:
                y = call(model.scatter(x))
                model.loss(nn.functional.cross_entropy, y, model.scatter_target(labels)).backward()
        clip = getattr(optimizer, "clip_grad_norm_", lambda limit: nn.utils.clip_grad_norm_(module.parameters(), limit))
        clip(0.3)
        optimizer.step()
        schedule.step()
    return {name: value.clone() for name, value in module.state_dict().items()}


@settings(max_examples=4)
@given(*map(st.sampled_from, (sorted(OPTIMIZERS), SYNCHRONOUS_STRATEGIES, SYNCHRONOUS_STRATEGIES, GRIDS)))
def test_scripts_with_distributed_optimizer(name, before, after, shape):
    replicas, rows, cols = shape
    arguments, tolerance = OPTIMIZERS[name]
    kind = getattr(torch.optim, name)

    def body(world):
        grid, module = nd.ProcessGrid(world, replicas=replicas, rows=rows, cols=cols), SmallNet().double()
        model = ndt.distribute(module, (4, 2, 6, 5), grid)
        optimizer = ndt.DistributedOptimizer(model, kind, before, **arguments)
        assert isinstance(optimizer, torch.optim.Optimizer)
        train_script(module, optimizer, model, range(2))
        state = optimizer.state_dict()
        with pytest.raises(nd.ConfigError, match="already has a DistributedOptimizer"):
            ndt.DistributedOptimizer(ndt.distribute(module, (4, 2, 6, 5), grid), kind)
        other = SmallNet().double()
        other.load_state_dict(module.state_dict())
        model = ndt.distribute(other, (4, 2, 6, 5), grid)
        optimizer = ndt.DistributedOptimizer(model, kind, after, **arguments)
        optimizer.load_state_dict(state)
        return train_script(other, optimizer, model, range(2, 4)), optimizer.state_dict()

    module = SmallNet().double()
    optimizer = kind(module.parameters(), **arguments)
    train_script(module, optimizer, steps=range(2))
    expected = train_script(module, optimizer, steps=range(2, 4))
    for parameters, state in nd.loopback.run(replicas * rows * cols, body):
        for key, value in expected.items():
            torch.testing.assert_close(parameters[key], value, rtol=tolerance, atol=tolerance)
        for at, slots in optimizer.state_dict()["state"].items():
            for slot, value in slots.items():
                torch.testing.assert_close(state["state"][at][slot], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("strategy", ["AllReduce", "ShardedOptimizer", "PartitionedPS"])
@pytest.mark.parametrize("kind", ["ndim", "reversed", "identity"])
def test_parameter_groups_are_those_of_whole_parameters(kind, strategy):
    """Functions select groups by shape, position or identity, although ranks own flat parts of the parameters."""
    arguments = {"lr": 0.05, "initial_accumulator_value": 0.1}

    def make_creator(module):
        chosen = {id(tensor) for tensor in module.last.parameters()}
        select = {
            "ndim": lambda tensor, at: tensor.ndim > 1,
            "reversed": lambda tensor, at: at >= 3,
            "identity": lambda tensor, at: id(tensor) in chosen,
        }[kind]

        def create_optimizer(tensors, **options):
            groups = [[one for at, one in enumerate(tensors) if select(one, at) == first] for first in (True, False)]
            settings = {"weight_decay": 0.5}, {"lr": 0.02}
            pairs = zip(groups, settings, strict=True)
            return torch.optim.Adagrad([{"params": group, **extra} for group, extra in pairs], **options)

        return create_optimizer

    def body(world):
        module = SmallNet().double()
        model = ndt.distribute(module, (4, 2, 6, 5), nd.ProcessGrid(world))
        optimizer = ndt.DistributedOptimizer(model, make_creator(module), strategy, **arguments)
        train_script(module, optimizer, model, range(2))
        state = optimizer.state_dict()
        optimizer.load_state_dict(copy.deepcopy(state))
        return train_script(module, optimizer, model, range(2, 4)), state

    module = SmallNet().double()
    optimizer = make_creator(module)(list(module.parameters()), **arguments)
    train_script(module, optimizer, steps=range(2))
    expected_state = copy.deepcopy(optimizer.state_dict())
    expected = train_script(module, optimizer, steps=range(2, 4))
    for parameters, state in nd.loopback.run(2, body):
        torch.testing.assert_close(parameters, expected, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(state["state"], expected_state["state"], rtol=1e-8, atol=1e-8)
        assert state["param_groups"][0]["params"] == expected_state["param_groups"][0]["params"]


def test_optimizers_of_other_parameters_are_rejected():
    def body(world):
        module = SmallNet()
        model = ndt.distribute(module, (4, 2, 6, 5), nd.ProcessGrid(world))
        with pytest.raises(nd.ConfigError, match="other parameters; select groups from its first argument"):
            ndt.DistributedOptimizer(model, lambda tensors: torch.optim.SGD(module.parameters(), 0.1))

    nd.loopback.run(2, body)


def test_fused_momentum_with_owners_matches_one_process():
    arguments = {"lr": 0.1, "momentum": 0.9, "fused": True}

    def body(world):
        module = SmallNet().double()
        model = ndt.distribute(module, (4, 2, 6, 5), nd.ProcessGrid(world))
        optimizer = ndt.DistributedOptimizer(model, torch.optim.SGD, "ShardedOptimizer", **arguments)
        return train_script(module, optimizer, model)

    module = SmallNet().double()
    expected = train_script(module, torch.optim.SGD(module.parameters(), **arguments))
    for parameters in nd.loopback.run(3, body):
        torch.testing.assert_close(parameters, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("way", ["optimizer", "experiment", "scope"])
def test_fused_optimizers_update_parts_along_any_axis(way):
    """PyTorch's fused kernels ignore strides, so parts along later axes must be contiguous."""
    strategy, arguments = nd.strategies.RandomAxisPartitionAR(seed=1), {"lr": 0.01, "fused": True, "eps": 1e-3}
    steps, shape = range(4), (4, 2, 6, 5)

    def train_experiment(model):
        for step in steps:
            x = np.random.default_rng(step).normal(size=(BATCH, *SHAPE))
            samples, tile = slice(*model.grid.sample_range(BATCH)), model.grid.tile_box(SHAPE[:-1]).slices
            model.train_batch(x[(samples, *tile)], np.arange(BATCH)[samples])
        return {name: value.clone() for name, value in model.module.state_dict().items()}

    def train(grid, module, strategy):
        if way == "experiment":
            rule = ndt.TorchOptimizer("Adam", arguments)
            model = ndt.TorchModel(Net, loss=ndt.TorchLoss(compute_first_loss), optimizer=rule, dtype="float64")
            model.configure_execution(strategy=strategy)
            model.build(SHAPE, BATCH, grid)
            return train_experiment(model), model.built_parameters.optimizer_parameters.values()
        model = ndt.distribute(module, shape, grid)
        optimizer = ndt.DistributedOptimizer(model, torch.optim.Adam, strategy, **arguments)
        return train_script(module, optimizer, model, steps), optimizer.parameters.optimizer_parameters.values()

    def train_in_scope(grid, strategy):
        distribution = nd.AutoDist(strategy=strategy, grid=grid)
        with distribution.scope():
            module = SmallNet().double()
        optimizer = torch.optim.Adam(module.parameters(), **arguments)

        @distribution.function
        def step(x):
            optimizer.zero_grad()
            nn.functional.mse_loss(module(x), torch.ones(4, 3, dtype=x.dtype)).backward()
            optimizer.step()

        for number in steps:
            step(torch.randn(shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64))
        return {name: value.clone() for name, value in module.state_dict().items()}, []

    def body(world, strategy=strategy):
        grid = nd.ProcessGrid(world, replicas=2 if world.size > 1 else 1, rows=1, cols=1)
        values, parts = train_in_scope(grid, strategy) if way == "scope" else train(grid, SmallNet().double(), strategy)
        assert all(part.is_contiguous() for part in parts)
        return values

    expected = nd.loopback.run(1, partial(body, strategy="AllReduce"))[0]
    for values in nd.loopback.run(2, body):
        for name, value in expected.items():
            torch.testing.assert_close(values[name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("compressor", ["fp16", "topk(0.3)", "powersgd(2)"])
def test_error_feedback_is_part_of_the_state(compressor):
    """A run resumed from its state equals an uninterrupted one."""

    def body(world, interrupted):
        module = SmallNet().double()
        model = ndt.distribute(module, (4, 2, 6, 5), nd.ProcessGrid(world))
        optimizer = ndt.DistributedOptimizer(model, torch.optim.SGD, f"AllReduce(compressor='{compressor}')", lr=0.1)
        train_script(module, optimizer, model, range(2))
        if interrupted:
            state, other = optimizer.state_dict(), SmallNet().double()
            other.load_state_dict(module.state_dict())
            module, model = other, ndt.distribute(other, (4, 2, 6, 5), model.grid)
            arguments = torch.optim.SGD, f"AllReduce(compressor='{compressor}')"
            optimizer = ndt.DistributedOptimizer(model, *arguments, lr=0.1)
            optimizer.load_state_dict(copy.deepcopy(state))
            assert {len(value) for name, value in state["synchronisation"].items() if "feedback" in name} == {2}
        train_script(module, optimizer, model, range(2, 4))
        states = optimizer.parameters.compressed.sync_states()
        return [p.detach().numpy() for p in module.parameters()] + [state.array.copy() for state in states]

    uninterrupted, resumed = (nd.loopback.run(2, partial(body, interrupted=flag)) for flag in (False, True))
    for expected, actual in zip(uninterrupted, resumed, strict=True):
        for a, b in zip(expected, actual, strict=True):
            np.testing.assert_array_equal(a, b)


def test_script_gradients_are_compressed():
    def body(world):
        module = SmallNet().double()
        model = ndt.distribute(module, (4, 2, 6, 5), nd.ProcessGrid(world))
        optimizer = ndt.DistributedOptimizer(model, torch.optim.SGD, "AllReduce(compressor='fp16')", lr=0.1)
        y = model(model.scatter(torch.ones(4, 2, 6, 5, dtype=torch.float64)))
        model.loss(nn.MSELoss(), y, model.scatter_target(torch.ones(4, 3, dtype=torch.float64))).backward()
        optimizer.step()
        return optimizer.parameters.reductions.bytes_reduced, sum(p.numel() for p in module.parameters())

    for sent, numbers in nd.loopback.run(2, body):
        assert 2 * numbers < sent < 4 * numbers
