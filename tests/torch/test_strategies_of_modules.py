"""Training PyTorch modules under each strategy: the numbers of one process, bytes as planned, slots on owners alone."""

from functools import cache

import numpy as np
import pytest
import torch
from builders import BUILDERS
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch_runs import captured_once

import neondist as nd
import neondist.torch as ndt
from neondist.plan import GRADIENTS

SYNCHRONOUS = [*sorted({text.partition("(")[0] for text in BUILDERS}), "RandomAxisPartitionAR(seed=5)"]
GRIDS = [(1, 1, 1), (2, 1, 1), (3, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)]
SHAPE, BATCH = (7, 9, 2), 7
OPTIMIZERS = {
    "SGD": ({"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}, 1e-12),
    "Adam": ({"lr": 0.01}, 1e-8),
    "Adagrad": ({"lr": 0.05, "weight_decay": 0.02}, 1e-8),
}


class Net(nn.Module):
    """Convolutions, norms, dropout, a tied weight, one that is frozen, one unused, a number and an unused output."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.twice = nn.Conv2d(6, 6, 3, padding=1, groups=2)
        self.again = self.twice
        self.scale, self.unused = nn.Parameter(torch.tensor(1.5)), nn.Linear(3, 3)
        self.frozen, self.last = nn.Conv2d(6, 6, 1).requires_grad_(False), nn.Linear(6, 10)
        self.beside = nn.Linear(6, 2)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        x = self.drop(self.norm(self.first(x)).relu())
        x = self.frozen(self.again(self.twice(x) * self.scale)).mean((2, 3))
        return self.last(x), self.beside(x)


def first_output(output, labels):
    return nn.functional.cross_entropy(output[0], labels)


@pytest.fixture(autouse=True, scope="module")
def once():
    with captured_once():
        yield


def train(optimizer, grid=None, strategy=None, sync=None):
    """Train five steps, the last of fewer samples; return the model, and whole arrays."""
    arguments, _ = OPTIMIZERS[optimizer]
    made = ndt.TorchOptimizer(optimizer, arguments)
    model = ndt.TorchModel(Net, loss=ndt.TorchLoss(first_output), optimizer=made, dtype="float64")
    model.execute(strategy=strategy, sync=sync)
    grid = grid or nd.ProcessGrid.serial()
    model.build(SHAPE, BATCH, grid)
    rng, losses = np.random.default_rng(4), []
    for samples in (7, 7, 7, 7, 5):
        x, labels = rng.normal(size=(BATCH, *SHAPE)), rng.integers(0, 10, BATCH)
        mine = slice(*grid.sample_range(samples))
        tile = grid.tile_box(SHAPE[:-1]).slices
        losses.append(model.train_batch(x[(mine, *tile)], labels[mine], batch_size=samples))
    found = {"loss": np.array(losses)}
    for arrays in model.kept_arrays().values():
        found |= {shard.full_name: shard.gather(array) for shard, array in arrays}
    return model, found


@cache
def serial(optimizer):
    return train(optimizer)[1]


@settings(max_examples=12)
@given(*map(st.sampled_from, (sorted(OPTIMIZERS), SYNCHRONOUS, GRIDS, ("allreduce", "bucketed"))))
def test_numbers_are_those_of_one_process(optimizer, strategy, shape, sync):
    replicas, rows, cols = shape

    def body(world):
        grid = nd.ProcessGrid(world, replicas=replicas, rows=rows, cols=cols)
        model, found = train(optimizer, grid, strategy, sync)
        plan, sent = model.compiled, 0
        for account, count in model.ledger().items():
            sent += account.nbytes * count * (account.layer == GRADIENTS)
        planned = plan.reduced(grid.rank).get(GRADIENTS, 0) + plan.redistributed(grid.rank).get(GRADIENTS, 0)
        return found, sent, 5 * planned

    expected, tolerance = serial(optimizer), OPTIMIZERS[optimizer][1]
    for found, sent, planned in nd.loopback.run(replicas * rows * cols, body):
        assert sent == planned
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, rtol=tolerance, atol=tolerance, err_msg=name)
