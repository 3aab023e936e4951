"""Running segments again on the way back gives the same numbers, and needs less memory."""

import copy

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_runs import captured_once, check, sent  # noqa: E402

import neondist.torch as ndt  # noqa: E402
from neondist import ProcessGrid  # noqa: E402
from neondist.comm import loopback  # noqa: E402


@pytest.fixture(autouse=True)
def once():
    with captured_once():
        yield


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm, self.relu = nn.BatchNorm2d(channels), nn.ReLU(inplace=True)

    def forward(self, x):
        return x + self.relu(self.norm(self.conv(x)))


def deep(blocks=8, channels=3):
    """A chain of blocks whose last tiles are so small that some ranks have none."""
    parts = [nn.Conv2d(2, channels, 1), *(Residual(channels) for _ in range(blocks))]
    return nn.Sequential(
        *parts, nn.MaxPool2d(4), nn.Conv2d(channels, 2, 2, padding=1), nn.Dropout(0.0), nn.MaxPool2d(2)
    )


@pytest.mark.long
def test_recomputing_gives_the_numbers_of_one_process():
    check(deep(), (2, 2, 13, 11), grids=[(1, 1, 1), (1, 3, 2), (2, 1, 2)], recompute=True)


def test_what_keeps_nothing_runs_again_on_all_ranks():
    """Ranks without cells keep nothing of a segment that others have to run again, sums included."""
    check(nn.Sequential(nn.Flatten(), nn.Linear(9, 5), nn.Softmax(1)), (1, 1, 9, 1), grids=[(1, 5, 1)], recompute=True)
    chain = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Sigmoid(), nn.Softmax(2), nn.Tanh(), nn.Conv2d(1, 1, 3, padding=1))
    check(chain, (1, 1, 3, 1), grids=[(1, 5, 1)], recompute=True)


def test_dropout_is_drawn_the_same_when_run_again():
    original = nn.Sequential(*(nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Dropout(0.5)) for _ in range(6)))

    def body(world):
        with ProcessGrid(world, rows=2, cols=2) as grid:
            found = []
            for recompute in (False, True):
                module = copy.deepcopy(original)
                model = ndt.distribute(module, (1, 2, 9, 8), grid, recompute=recompute)
                if grid.rank == 0:  # alone draws from PyTorch's generator
                    torch.manual_seed(7)
                y = model(model.scatter(torch.ones(1, 2, 9, 8)))
                y.sum().backward()
                found.append([model.gather(y), *(p.grad for p in module.parameters())])
            return found

    for plain, again in loopback.run(4, body):
        for a, b in zip(plain, again, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def kept(recompute):
    """Return the bytes that ranks keep for the way back."""
    original = deep(blocks=24, channels=8)

    def body(world):
        with ProcessGrid(world, rows=2) as grid:
            model = ndt.distribute(copy.deepcopy(original), (1, 2, 64, 64), grid, recompute=recompute)
            found = {}

            def pack(tensor):
                found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                model(model.scatter(torch.ones(1, 2, 64, 64)))
            return sum(found.values())

    return max(loopback.run(2, body))


@pytest.mark.long
def test_less_is_kept():
    assert kept(True) < 0.45 * kept(False)


@pytest.mark.parametrize("grid", [(1, 3, 2), (2, 1, 2)])
@pytest.mark.long
def test_a_users_checkpoint_sends_in_the_same_order_on_all_ranks(grid):
    replicas, rows, cols = grid
    original = deep(blocks=2).double()

    def body(world):
        with ProcessGrid(world, replicas=replicas, rows=rows, cols=cols) as ranks:
            found = []
            for again in (False, True):
                module = copy.deepcopy(original)
                model = ndt.distribute(module, (2, 2, 13, 11), ranks)
                x = model.scatter(torch.ones(2, 2, 13, 11, dtype=torch.float64)).requires_grad_()
                y = checkpoint(model, x, use_reentrant=False) if again else model(x)
                y.sum().backward()
                found.append([p.grad for p in module.parameters()])
                assert sent(model)
            return found

    for plain, again in loopback.run(replicas * rows * cols, body):
        for a, b in zip(plain, again, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


class Detached(nn.Module):
    """Output of the first segment that has a gradient for one reader, and none for another."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 4, stride=2, groups=4, bias=False)

    def forward(self, x):
        y = self.conv(nn.functional.pad(x, [0, 2]))
        return nn.functional.smooth_l1_loss(y, y.flip(0).detach(), reduction="sum")


def test_what_is_detached_sends_no_gradient():
    check(Detached(), (2, 4, 5), grids=[(2, 1, 2)], recompute=True)
