"""Random sequences of public calls on virtual ranks: results and generator states against a single process.

NEONDIST_ROUNDS=200 tries more.
"""

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
GRIDS = {"cols": 2}, {"rows": 3}, {"rows": 2, "cols": 2}, {"replicas": 2, "rows": 2}, {"replicas": 2}, {"cols": 1}


def build_seeded():
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 1)).double()


def build_unseeded():
    return nn.Sequential(nn.Conv2d(2, 2, 3, 2, 1), nn.InstanceNorm2d(2, affine=True)).double()


def build_classifier():
    np.random.seed(2)
    return nn.Sequential(nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(60, 4 + np.random.randint(1))).double()


class Interpreter:
    """Interpreter of random calls, in one process or on the ranks of a grid."""

    def __init__(self, grid=None):
        self.grid, self.x = grid, torch.randn(SHAPE, dtype=torch.float64)
        self.saved = None
        self.distribute(0)

    def distribute(self, number):
        self.net = (build_seeded, build_unseeded, build_classifier, lambda: copy.deepcopy(SHARED))[number % 4]()
        self.model = SerialModel(self.net) if self.grid is None else ndt.distribute(self.net, SHAPE, self.grid)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1, momentum=0.5)
        self.saved = None

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


@pytest.mark.parametrize("number", range(ROUNDS))
@pytest.mark.long
def test_random_calls(number):
    rng = random.Random(f"{SEED} {number}")
    script = [(rng.choice(CALLS), rng.randint(0, 11)) for _ in range(rng.randint(4, 10))]
    grid, share = rng.choice(GRIDS), rng.random() < 0.3
    seed_generators(number)
    expected, final_states = run_script(script), read_generator_states()

    def body(world):
        with nd.ProcessGrid(world, **grid) as ranks:
            return run_script(script, ranks)

    seed_generators(number)
    if share:
        with share_captures():
            results = nd.loopback.run(int(np.prod([*grid.values()])), body)
    else:
        results = nd.loopback.run(int(np.prod([*grid.values()])), body)
    for rank, rank_results in enumerate(results):
        for call, actual, reference in zip(script, rank_results, expected, strict=True):
            assert is_close(actual, reference), (grid, rank, call, script, actual, reference)
    assert read_generator_states() == final_states, (grid, script)
