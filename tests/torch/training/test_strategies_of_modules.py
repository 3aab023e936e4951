"""Training of PyTorch modules under each strategy: single-process results, planned traffic, slots on owners only."""

import copy
import math
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from builders import SYNCHRONOUS_STRATEGIES
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch_runs import share_captures

import neondist as nd
import neondist.torch as ndt
from neondist.errors import NonFiniteError
from neondist.io.checkpoint import ArrayPart, open_checkpoint, write_checkpoint
from neondist.plan import GRADIENTS

GRIDS = [(1, 1, 1), (2, 1, 1), (3, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)]
SHAPE, BATCH = (7, 9, 2), 7
OPTIMIZERS = {
    "SGD": ({"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}, 1e-12),
    "Adam": ({"lr": 0.01}, 1e-8),
    "Adagrad": ({"lr": 0.05, "weight_decay": 0.02}, 1e-8),
}


class Net(nn.Module):
    """Network with dropout, tied, frozen, unused and scalar parameters, and an unused output."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.twice = nn.Conv2d(6, 6, 3, padding=1, groups=2)
        self.again = self.twice
        self.scale, self.unused = nn.Parameter(torch.tensor(1.5)), nn.Linear(3, 3)
        self.frozen, self.last = nn.Conv2d(6, 6, 1).requires_grad_(False), nn.Linear(6, 10)
        self.side = nn.Linear(6, 2)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        x = self.drop(self.norm(self.first(x)).relu())
        x = self.frozen(self.again(self.twice(x) * self.scale)).mean((2, 3))
        return self.last(x), self.side(x)


def compute_first_loss(output, labels):
    return nn.functional.cross_entropy(output[0], labels)


@pytest.fixture(autouse=True, scope="module")
def shared_module_captures():
    with share_captures():
        yield


def build_model(optimizer, grid, strategy=None, sync=None):
    rule = ndt.TorchOptimizer(optimizer, OPTIMIZERS[optimizer][0])
    model = ndt.TorchModel(Net, loss=ndt.TorchLoss(compute_first_loss), optimizer=rule, dtype="float64")
    model.configure_execution(strategy=strategy, sync=sync)
    model.build(SHAPE, BATCH, grid)
    return model


def train_model(model, steps=range(5)):
    """Train, with fewer samples in step 4; return the losses and the gathered arrays."""
    grid, losses = model.grid, []
    for step in steps:
        rng, samples = np.random.default_rng(step), 5 if step == 4 else BATCH
        x, labels = rng.normal(size=(BATCH, *SHAPE)), rng.integers(0, 10, BATCH)
        own_samples, tile = slice(*grid.sample_range(samples)), grid.tile_box(SHAPE[:-1]).slices
        model.step = step
        losses.append(model.train_batch(x[(own_samples, *tile)], labels[own_samples], batch_size=samples))
    return {"loss": np.array(losses)} | {
        shard.full_name: shard.gather(array) for arrays in model.checkpoint_arrays().values() for shard, array in arrays
    }


@cache
def train_serial(optimizer):
    return train_model(build_model(optimizer, nd.ProcessGrid.serial()))


@settings(max_examples=8)
@given(*map(st.sampled_from, (sorted(OPTIMIZERS), SYNCHRONOUS_STRATEGIES, GRIDS, ("allreduce", "bucketed"))))
@pytest.mark.long
def test_strategies_match_single_process(optimizer, strategy, shape, sync):
    replicas, rows, cols = shape

    def body(world):
        grid = nd.ProcessGrid(world, replicas=replicas, rows=rows, cols=cols)
        model = build_model(optimizer, grid, strategy, sync)
        arrays = train_model(model)
        plan = model.compiled
        sent = sum(account.nbytes * n for account, n in model.ledger().items() if account.layer == GRADIENTS)
        by_kind = plan.reduction_bytes(grid.rank), plan.redistribution_bytes(grid.rank)
        planned = sum(counts.get(GRADIENTS, 0) for counts in by_kind)
        return arrays, sent, 5 * planned

    expected, tolerance = train_serial(optimizer), OPTIMIZERS[optimizer][1]
    for arrays, sent, planned in nd.loopback.run(replicas * rows * cols, body):
        assert sent == planned
        assert arrays.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_allclose(arrays[name], array, rtol=tolerance, atol=tolerance, err_msg=name)


@settings(max_examples=3)
@given(
    st.sampled_from(sorted(OPTIMIZERS)),
    st.lists(st.tuples(*map(st.sampled_from, (SYNCHRONOUS_STRATEGIES, GRIDS))), min_size=3, max_size=3),
)
@pytest.mark.long
def test_checkpoints_resume_under_any_strategy_and_grid(optimizer, stretches):
    bounds = [range(2), range(2, 3), range(3, 5)]
    with TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint.h5")
        for at, (strategy, (replicas, rows, cols)) in enumerate(stretches):

            def body(world, at=at, strategy=strategy, factors=(replicas, rows, cols)):
                model = build_model(optimizer, nd.ProcessGrid(world, *factors), strategy)
                if at:
                    with open_checkpoint(path, world) as file:
                        file.fill_parts(list_pieces(model, file.contents.group("optimizer")))
                arrays = train_model(model, bounds[at])
                write_checkpoint(path, list_pieces(model), {}, world)
                return arrays

            results = nd.loopback.run(replicas * rows * cols, body)
    expected, tolerance = train_serial(optimizer), OPTIMIZERS[optimizer][1]
    for arrays in results:
        for name in expected.keys() - {"loss"}:
            np.testing.assert_allclose(arrays[name], expected[name], rtol=tolerance, atol=tolerance, err_msg=name)


def list_pieces(model, slots=()):
    return [ArrayPart.of(*pair, group) for group, arrays in model.checkpoint_arrays(slots).items() for pair in arrays]


def test_slots_are_on_owners_only():
    def measure_slots(strategy, ranks):
        def body(world):
            model = build_model("Adam", nd.ProcessGrid(world, replicas=ranks), strategy)
            train_model(model, range(1))
            slots = model.checkpoint_arrays()["optimizer"]
            return sum(a.size for shard, a in slots if shard.name.endswith("exp_avg")), model.parameters.values.size

        return nd.loopback.run(ranks, body)

    assert all(owned <= 0.26 * total + 1 for owned, total in measure_slots("ShardedOptimizer", 4))
    sizes = measure_slots("PS", 3)
    without_gradient = 14  # elements of the output that the loss does not use
    assert [owned for owned, _ in sizes] == [sizes[0][1] - without_gradient, 0, 0]


@pytest.mark.parametrize(("optimizer", "strategy", "accepted"), [
    ("Adafactor", "PS", True), ("Adafactor", "ShardedOptimizer", False), ("Adafactor", "PartitionedPS", False),
    ("RMSprop", "ShardedOptimizer", True),
])  # fmt: skip
def test_parts_require_elementwise_optimizers(optimizer, strategy, accepted):
    def body(world):
        model = ndt.TorchModel(Net, optimizer=ndt.TorchOptimizer(optimizer), strategy=strategy)
        model.build(SHAPE, BATCH, nd.ProcessGrid(world))

    if accepted:
        nd.loopback.run(2, body)
    else:
        with pytest.raises(nd.ConfigError, match=f"{optimizer} updates only whole parameters"):
            nd.loopback.run(2, body)


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


@pytest.mark.long
def test_experiments_with_parameter_groups_match_one_process():
    def create_optimizer(tensors, lr):
        matrices = [one for one in tensors if one.ndim > 1]
        others = [one for one in tensors if one.ndim <= 1]
        return torch.optim.SGD([{"params": matrices, "weight_decay": 0.5}, {"params": others}], lr)

    def body(world, strategy="ShardedOptimizer"):
        rule = ndt.TorchOptimizer(create_optimizer, {"lr": 0.05})
        model = ndt.TorchModel(Net, loss=ndt.TorchLoss(compute_first_loss), optimizer=rule, dtype="float64")
        model.configure_execution(strategy=strategy)
        model.build(SHAPE, BATCH, nd.ProcessGrid(world))
        return train_model(model, range(2))

    expected = nd.loopback.run(1, partial(body, strategy=None))[0]
    for arrays in nd.loopback.run(2, body):
        for name, array in expected.items():
            np.testing.assert_allclose(arrays[name], array, rtol=1e-9, atol=1e-9, err_msg=name)


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


def test_models_without_parameters_are_rejected():
    model = ndt.distribute(nn.ReLU(), (1, 1, 4, 4), nd.ProcessGrid.serial())
    with pytest.raises(nd.ConfigError, match="no parameter requires gradients"):
        ndt.DistributedOptimizer(model, torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize("strategy", ["AllReduce", "PS", None])
def test_sparse_gradients_match_dense_ones(strategy):
    """Also with PyTorch's own optimizer (None)."""
    ids, labels = torch.arange(18).reshape(6, 3) * 7 % 11, torch.arange(6) % 3

    def train(call, module, optimizer, loss_of):
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(call()).backward()
            optimizer.step()
        return [p.detach().clone() for p in module.parameters()]

    def build(sparse):
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(11, 4, sparse=sparse), nn.Flatten(), nn.Linear(12, 3)).double()

    def body(world):
        module = build(True)
        model = ndt.distribute(module, (6, 3), nd.ProcessGrid(world, replicas=2), dtype=torch.int64, spatial=0)
        if strategy is None:
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        else:
            optimizer = ndt.DistributedOptimizer(model, torch.optim.SGD, strategy, lr=0.1, momentum=0.9)
        target = model.scatter_target(labels)
        return train(
            lambda: model(model.scatter(ids)),
            module,
            optimizer,
            lambda y: model.loss(nn.functional.cross_entropy, y, target),
        )

    dense = build(False)
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.1, momentum=0.9)
    expected = train(lambda: dense(ids), dense, optimizer, lambda y: nn.functional.cross_entropy(y, labels))
    for parameters in nd.loopback.run(2, body):
        for actual, expected_parameter in zip(parameters, expected, strict=True):
            torch.testing.assert_close(actual, expected_parameter, rtol=1e-12, atol=1e-13)


class BagOfWords(nn.Module):
    """Two embedding tables, of which each sample uses a few rows."""

    def __init__(self, rows, sparse):
        super().__init__()
        self.first, self.second = nn.Embedding(rows, 16, sparse=sparse), nn.Embedding(rows, 16, sparse=sparse)
        self.last = nn.Linear(16, 1)

    def forward(self, ids):
        return self.last((self.first(ids).mean(1) + self.second(ids + 1).mean(1)).relu())


@settings(max_examples=6)
@given(
    st.sampled_from(SYNCHRONOUS_STRATEGIES),
    st.sampled_from([(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.Adam, {"lr": 0.01})]),
    st.sampled_from([(2, 1, 1), (3, 1, 1), (2, 1, 2)]),
)
@pytest.mark.long
def test_sparse_embeddings_send_rows_only(strategy, optimizer, shape):
    def train(world, case):
        torch.manual_seed(0)
        module, grid = BagOfWords(*case).double(), nd.ProcessGrid(world, *shape)
        model = ndt.distribute(module, (6, 4), grid, dtype=torch.int64)
        update = ndt.DistributedOptimizer(model, optimizer[0], strategy, **optimizer[1])
        random = torch.Generator().manual_seed(1)
        for _ in range(3):
            ids = torch.randint(0, 200, (6, 4), generator=random)
            y = torch.randn(6, 1, dtype=torch.float64, generator=random)
            update.zero_grad()
            model.loss(nn.MSELoss(), model(model.scatter(ids)), model.scatter_target(y)).backward()
            update.step()
        return update.parameters.reductions.bytes_reduced, [value.clone() for value in module.parameters()]

    cases, ranks = [(300, False), (300, True), (3000, True)], int(np.prod(shape))
    results = {case: nd.loopback.run(ranks, partial(train, case=case)) for case in cases}
    for (_, dense), (_, rows) in zip(results[300, False], results[300, True], strict=True):
        torch.testing.assert_close(rows, dense, rtol=1e-12, atol=1e-12)
    table = 3000 * 16 * 8
    assert all(0 < sent < table / 2 for sent, _ in results[3000, True])


@pytest.mark.parametrize("strategy", [None, "AllReduce", "ShardedOptimizer"])
def test_penalties_of_parameters_count_once(strategy):
    image, penalty = torch.randn(2, 1, 6, 5, dtype=torch.float64), 0.1

    def compute_squared_norm(module):
        return sum(p.square().sum() for p in module.parameters())

    def train(world=None):
        torch.manual_seed(0)
        module, losses = nn.Conv2d(1, 1, 3, padding=1).double(), []
        model = module if world is None else ndt.distribute(module, image.shape, nd.ProcessGrid(world, 1, 1, 3))
        if world is None or strategy is None:
            update = torch.optim.SGD(module.parameters(), lr=0.1)
        else:
            update = ndt.DistributedOptimizer(model, torch.optim.SGD, strategy, lr=0.1)

        def compute_penalised_loss(y, t):
            return torch.nn.functional.mse_loss(y, t) + penalty * compute_squared_norm(module)

        for criterion in (nn.MSELoss(), compute_penalised_loss, compute_penalised_loss):
            update.zero_grad()
            if world is None:
                loss = criterion(module(image), image)
            else:
                loss = model.loss(criterion, model(model.scatter(image)), model.scatter_target(image))
            loss = loss + 2 * penalty * compute_squared_norm(module)
            loss.backward()
            update.step()
            losses.append(loss.item())
        return losses + [p.detach().clone() for p in module.parameters()]

    for actual in nd.loopback.run(3, train):
        torch.testing.assert_close(actual, train(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("strategy", ["AllReduce", "ShardedOptimizer"])
@pytest.mark.parametrize("value", [1.0, 1e-12, torch.inf, torch.nan])
def test_norms_are_clipped_as_in_one_process(strategy, value):
    slopes = torch.tensor([0.5, value, -0.25], dtype=torch.float64)

    def body(world):
        module = nn.Conv2d(2, 3, 1).double()
        nn.init.zeros_(module.weight.requires_grad_(False))
        nn.init.zeros_(module.bias)
        model = ndt.distribute(module, (1, 2, 6, 5), nd.ProcessGrid(world))
        optimizer = ndt.DistributedOptimizer(model, torch.optim.SGD, strategy, lr=1.0)
        x = model.scatter(torch.zeros(1, 2, 6, 5, dtype=torch.float64))
        model.loss(lambda y, t: (y.mean((0, 2, 3)) * slopes).sum(), model(x), x).backward()
        if not math.isfinite(value):
            with pytest.raises(NonFiniteError, match=r"norm of the gradients is (inf|nan)"):
                optimizer.clip_grad_norm_(0.5, error_if_nonfinite=True)
        norm = optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        return norm, -module.bias.detach()

    parameter = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    parameter.grad = slopes.clone()
    expected = nn.utils.clip_grad_norm_([parameter], 0.5), parameter.grad
    for actual in nd.loopback.run(2, body):
        torch.testing.assert_close(actual, expected, equal_nan=True, rtol=1e-12, atol=0)
