"""Random sequences of public calls on virtual ranks: results and generator states against a single process.

NEONDIST_ROUNDS=200 tries more.
"""

import contextlib
import copy
import os
import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch_runs import share_captures  # noqa: E402
from torch_training import SerialModel  # noqa: E402

import neondist as nd  # noqa: E402
import neondist.torch as ndt  # noqa: E402

SEED, ROUNDS = int(os.environ["NEONDIST_SEED"]), int(os.environ.get("NEONDIST_ROUNDS", "8"))
SHAPE = (2, 2, 7, 6)
WINDOW, KERNEL = nd.Window(3, padding=1), torch.arange(18.0, dtype=torch.float64).view(1, 2, 3, 3)
STRATEGIES = (
    "AllReduce",
    "ShardedOptimizer",
    "PS",
    "PSLoadBalancing",
    "PartitionedPS",
    "PartitionedAllReduce",
    "UnevenPartitionedPS",
)
GRIDS = {"cols": 2}, {"rows": 3}, {"rows": 2, "cols": 2}, {"replicas": 2, "rows": 2}, {"replicas": 2}, {"cols": 1}


def build_seeded():
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 1)).double()


def build_unseeded():
    return nn.Sequential(nn.Conv2d(2, 2, 3, 2, 1), nn.InstanceNorm2d(2, affine=True)).double()


def build_classifier():
    np.random.seed(2)
    return nn.Sequential(nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(60, 4 + np.random.randint(1))).double()


def sum_of_squares(y, target):
    return (y * target).square().sum()


class Interpreter:
    """Interpreter of random calls, in one process or on the ranks of a grid."""

    def __init__(self, grid=None):
        self.grid, self.x = grid, torch.randn(SHAPE, dtype=torch.float64)
        self.saved = None
        self.distribute(0)

    def distribute(self, number):
        self.net = (build_seeded, build_unseeded, build_classifier, lambda: copy.deepcopy(SHARED))[number % 4]()
        options = ({}, {"recompute": True}, {"strips": 2})[number // 4 % 3]
        self.model = (
            SerialModel(self.net) if self.grid is None else ndt.distribute(self.net, SHAPE, self.grid, **options)
        )
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1, momentum=0.5)
        self.saved = self.schedule = None
        self.partitioned = False

    def images(self, seed):
        torch.manual_seed(seed)
        self.x = torch.randn(SHAPE, dtype=torch.float64)

    def draws(self, _):
        return torch.randn(2).tolist() + np.random.rand(2).tolist() + [random.random()]

    def forward(self, number):
        y = self.model(self.model.scatter(self.x))
        return self.model.gather(y if number % 2 else y.detach())

    def evaluate(self, _):
        self.model.eval()
        with torch.no_grad():
            y = self.model.gather(self.model(self.model.scatter(self.x)))
        self.model.train()
        return y

    def step(self, number):
        self.optimizer.zero_grad()
        y = self.model(self.model.scatter(self.x))
        criterion = (F.mse_loss, nn.SmoothL1Loss(beta=0.5), lambda y, t: (y - t).abs().sum())[number % 3]
        loss = self.model.loss(
            criterion, y, self.model.scatter_target(torch.ones(self.output_shape(y), dtype=torch.float64))
        )
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def accumulate(self, number):
        """Accumulate gradients of batches of different sizes, clip them, and update."""
        for size in (2, 1 + number % 2, 1):
            x = self.x[:size]
            y = self.model(self.model.scatter(x))
            ones = torch.ones((size, *self.output_shape(y)[1:]), dtype=torch.float64)
            self.model.loss(F.mse_loss, y, self.model.scatter_target(ones)).backward()
        if isinstance(self.optimizer, ndt.DistributedOptimizer):
            norm = self.optimizer.clip_grad_norm_(0.1)
        elif self.partitioned or number % 2:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        else:
            norm = nn.utils.clip_grad_value_(self.model.parameters(), 0.1)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=number % 3 == 0)
        return None if norm is None else norm.item()

    def resize(self, number):
        """Evaluate images of another size."""
        if isinstance(self.net[-1], nn.Linear):
            return None
        x = self.x.repeat(1, 1, 2, 2)[..., : 9 + number % 3, : 6 + number % 4]
        self.model.eval()
        with torch.no_grad():
            y = self.model.gather(self.model(self.model.scatter(x)))
        self.model.train()
        return y

    def change_optimizer(self, number):
        """Train with another optimiser, with two groups of parameters and a schedule."""
        if self.partitioned:
            self.distribute(number)
        weights = [p for p in self.net.parameters() if p.dim() > 1]
        others = [p for p in self.net.parameters() if p.dim() <= 1]
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 0.02}]
        kind = (torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam)[number % 4]
        # a bias before a norm has a gradient of rounding errors, which a small eps would amplify
        self.optimizer = kind([group for group in groups if group["params"]], lr=0.05, eps=1e-2)
        self.partitioned = False
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)

    def partition_optimizer(self, number):
        """Train with an optimiser that is partitioned over the ranks; a module has at most one."""
        if self.partitioned:
            self.distribute(number)
        kind, options = (torch.optim.Adam, torch.optim.SGD)[number % 2], {"lr": 0.03}
        options |= {"momentum": 0.5} if number % 2 else {"eps": 1e-2}
        self.schedule, self.partitioned = None, True
        if not any(p.requires_grad for p in self.net.parameters()):
            self.net.requires_grad_()
        if self.grid is None:
            self.optimizer = kind([p for p in self.net.parameters() if p.requires_grad], **options)
        else:
            strategy = STRATEGIES[number % len(STRATEGIES)]
            self.optimizer = ndt.DistributedOptimizer(self.model, kind, strategy, **options)

    def schedule_step(self, _):
        if self.schedule is not None:
            self.schedule.step()
        return [group["lr"] for group in self.optimizer.param_groups]

    def reload_optimizer(self, _):
        state = copy.deepcopy(self.optimizer.state_dict())
        self.optimizer.load_state_dict(state)
        return len(state["state"])

    def freeze(self, number):
        for p in list(self.net.parameters())[number % 3 :: 3]:
            p.requires_grad_(number % 2 == 0)

    def edit_parameters(self, number):
        """Edit parameters in place, as moving averages and initialisers do."""
        with torch.no_grad():
            for p in self.model.parameters():
                p.mul_(0.9).add_(0.01 * (number % 3))
            for name, p in self.model.named_parameters():
                if name.endswith("bias"):
                    p.data = torch.zeros_like(p)

    def set_momentum(self, number):
        """Change attributes of submodules."""
        for layer in self.net.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.momentum = (None, 0.3)[number % 2]

    def freeze_statistics(self, number):
        for layer in self.net.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.train(number % 2 == 0)

    def input_gradient(self, _):
        x = self.model.scatter(self.x).requires_grad_()
        y = self.model(x)
        loss = self.model.loss(sum_of_squares, y, self.model.scatter_target(torch.ones(self.output_shape(y))))
        (dx,) = torch.autograd.grad(loss, [x])
        return self.model.gather(dx)

    def output_shape(self, y):
        return tuple(y.shape) if self.grid is None else self.model.output_shapes[0]

    def state_dict(self, _):
        self.saved = copy.deepcopy(self.model.state_dict())
        return [value.double().sum().item() for value in self.saved.values()]

    def load_state_dict(self, _):
        if self.saved is not None:
            self.model.load_state_dict(self.saved)

    def halo(self, number):
        mode = ("zeros", "reflect", "wrap")[number % 3]
        if self.grid is None:
            cells = F.pad(self.x, (1, 1, 1, 1), mode={"zeros": "constant", "wrap": "circular"}.get(mode, mode))
            return F.conv2d(cells, KERNEL).sum().item()
        window = nd.Window(3, padding=1, mode=mode)
        box = self.grid.tile_box(SHAPE[2:]).slices
        y = F.conv2d(ndt.halo(self.x[(..., *box)], window, self.grid), KERNEL)
        return ndt.reduce(y.sum(), "sum", self.grid).item()

    def array(self, _):
        """Scatter an array and return its sum and the adjoint of its views."""
        x = self.x.permute(0, 2, 3, 1).numpy()
        if self.grid is None:
            ones = torch.ones(1, 9, SHAPE[2] * SHAPE[3], dtype=torch.float64)
            return [self.x.sum().item(), F.fold(ones, SHAPE[2:], 3, padding=1)[0, 0].numpy()]
        array = nd.GlobalArray(self.grid, x.shape, WINDOW, dtype="float64")
        tile = array.scatter(x)
        view = array.get_fprop_view(tile)
        rows, cols = (n - 2 for n in view.shape[1:3])
        spread = np.zeros_like(view)
        for i in range(3):
            for j in range(3):
                spread[:, i : i + rows, j : j + cols] += 1
        counts = array.gather(array.get_bprop_view(spread))[0, ..., 0]
        return [array.gather(tile).sum(), counts]


CALLS = [name for name in vars(Interpreter) if not name.startswith("_") and name != "output_shape"]
SHARED = build_seeded()


def run_script(script, grid=None):
    interpreter = Interpreter(grid)
    return [getattr(interpreter, name)(number) for name, number in script]


def read_generator_states():
    return torch.get_rng_state().tolist(), repr(np.random.get_state()), random.getstate()


def seed_generators(number):
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def is_close(actual, expected):
    if isinstance(expected, list):
        return len(actual) == len(expected) and all(map(is_close, actual, expected))
    return actual is expected is None or np.allclose(actual, expected, rtol=1e-9, atol=1e-9)


def check_script(script, grid, number=0, share=True):
    seed_generators(number)
    expected, final_states = run_script(script), read_generator_states()

    def body(world):
        with nd.ProcessGrid(world, **grid) as ranks:
            return run_script(script, ranks)

    seed_generators(number)
    with share_captures() if share else contextlib.nullcontext():
        results = nd.loopback.run(int(np.prod([*grid.values()])), body)
    for rank, rank_results in enumerate(results):
        for call, actual, reference in zip(script, rank_results, expected, strict=True):
            assert is_close(actual, reference), (grid, rank, call, script, actual, reference)
    assert read_generator_states() == final_states, (grid, script)


@pytest.mark.parametrize("number", range(ROUNDS))
@pytest.mark.long
def test_random_calls(number):
    rng = random.Random(f"{SEED} {number}")
    script = [(rng.choice(CALLS), rng.randint(0, 11)) for _ in range(rng.randint(4, 10))]
    check_script(script, rng.choice(GRIDS), number, share=rng.random() < 0.3)


@pytest.mark.parametrize("strategy", [0, 8])  # gradients on all ranks, and on their owners
@pytest.mark.long
def test_optimizer_created_after_a_pass_and_before_an_assignment(strategy):
    calls = ("step", 1), ("partition_optimizer", strategy), ("accumulate", 11), ("edit_parameters", 1), ("step", 1)
    check_script([*calls, ("state_dict", 0)], {"cols": 2})
