"""Training of PyTorch modules under each strategy: single-process results, planned traffic, slots on owners only."""

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
from strategy_training import BATCH, GRIDS, OPTIMIZERS, SHAPE, Net, compute_first_loss
from torch import nn
from torch_runs import share_captures

import neondist as nd
import neondist.torch as ndt
from neondist.errors import NonFiniteError
from neondist.io.checkpoint import ArrayPart, open_checkpoint, write_checkpoint
from neondist.plan import GRADIENTS


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
