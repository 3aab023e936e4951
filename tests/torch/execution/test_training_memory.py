"""Planned peak memory of a module's training step against the tensors alive in one, within 15 %."""

import weakref

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch_runs import share_captures  # noqa: E402

import neondist as nd  # noqa: E402
import neondist.torch as ndt  # noqa: E402
from neondist.torch.lowering import training_memory  # noqa: E402
from neondist.torch.lowering.training_memory import TrainingMemory  # noqa: E402

SHAPE = (2, 3, 96, 80)


class LiveTensors(TorchDispatchMode):
    """Track the bytes of live tensors created by this thread's operators."""

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.known = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._register((args, kwargs), created=False)  # tensors from before do not count
        result = func(*args, **(kwargs or {}))
        self._register(result, created=True)
        return result

    def _register(self, tree, created):
        for storage in (leaf.untyped_storage() for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)):
            if id(storage) not in self.known:
                size = storage.nbytes() if created else 0
                self.known.add(id(storage))
                self.live += size
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._release, id(storage), size)

    def _release(self, key, size):
        self.known.discard(key)
        self.live -= size


def build_chain():
    convolutions = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.SiLU()
    return nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))


class ResidualNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 5, stride=2, padding=2), nn.BatchNorm2d(16)
        self.a, self.b = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        return F.relu(x + self.b(F.relu(self.a(x)))).mean((2, 3))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU())
        self.bottom = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(2, 16), nn.ReLU())
        self.up = nn.Sequential(nn.Conv2d(24, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 4, 1))

    def forward(self, x):
        x = self.down(x)
        y = F.interpolate(self.bottom(F.max_pool2d(x, 2)), scale_factor=2.0, mode="bilinear")
        return self.up(torch.cat([x, y], 1)).mean((2, 3))


CASES = [(build_chain, 2, False), (ResidualNet, 1, False), (ResidualNet, 4, False), (UNet, 1, False), (UNet, 2, False)]
CASES += [(ResidualNet, 1, True), (UNet, 2, True)]


@pytest.mark.parametrize(("build", "ranks", "autocast"), CASES)
@pytest.mark.long
def test_planned_peak_memory(build, ranks, autocast):
    """With and without autocast."""
    x, labels = torch.randn(SHAPE), torch.zeros(SHAPE[0], dtype=torch.long)

    def body(world):
        with nd.ProcessGrid(world, replicas=1) as grid:
            model = ndt.distribute(build(), SHAPE, grid)
            tile = model.scatter(x)

            def train():
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = model.loss(nn.CrossEntropyLoss(), model(tile), labels)
                loss.backward()

            train()  # one-time allocations
            model.zero_grad()
            with LiveTensors() as tensors:
                train()
            trained = [name for name, _ in model.named_parameters()]
            gradients = sum(parameter.nbytes for parameter in model.parameters())
            plan = model.plan.under_autocast(torch.bfloat16) if autocast else model.plan
            return TrainingMemory(plan, trained).peak(grid.rank) + gradients, tensors.peak

    with share_captures():
        for planned, measured in nd.loopback.run(ranks, body):
            assert planned == pytest.approx(measured, rel=0.15)


def test_a_tensor_and_its_view_are_saved_once(monkeypatch):
    """A ReLU saves its result, and the convolution after it a view that contains the result."""
    shape = (1, 3, 16, 12)
    module = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 3, padding=1))

    def live_after_forward(world):
        with nd.ProcessGrid(world, rows=2) as grid:
            model = ndt.distribute(module, shape, grid)
            tile = model.scatter(torch.ones(shape))
            model(tile)  # one-time allocations
            with LiveTensors() as tensors:
                output = model(tile)
            return tensors.live, output

    with share_captures():
        shared = [live for live, _ in nd.loopback.run(2, live_after_forward)]
        monkeypatch.setattr(training_memory, "MIN_BYTES", 1 << 30)
        separate = [live for live, _ in nd.loopback.run(2, live_after_forward)]
    result = 8 * 8 * 12 * 4  # bytes of the ReLU's result on each rank
    assert [b - a for a, b in zip(shared, separate, strict=True)] == [result, result]
