"""Planned peak memory of a module's training step against the tensors alive in one, within 15 %."""

import weakref
from math import prod

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


def build_local_net():
    """Return a module whose operators depend on neighbourhoods only."""
    first = nn.Conv2d(3, 12, 3, padding=1), nn.SiLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*first, nn.Conv2d(12, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 1, 3, padding=1), nn.Tanh())


def build_deep_net():
    layers = (layer for _ in range(12) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.SiLU()))
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


CASES = [(build_chain, 2, False), (ResidualNet, 1, False), (ResidualNet, 4, False), (UNet, 1, False), (UNet, 2, False)]
CASES += [(ResidualNet, 1, True), (UNet, 2, True)]


def sum_of_image(output, target):
    """Return a loss that needs no memory beside the output."""
    return output.sum()


def measure(build, ranks, autocast=False, criterion=None, **options):
    """Return the plan, the planned and the measured peak of a training step on each rank."""
    x, labels = torch.randn(SHAPE), torch.zeros(SHAPE[0], dtype=torch.long)
    criterion = nn.CrossEntropyLoss() if criterion is None else criterion

    def body(world):
        with nd.ProcessGrid(world, replicas=1) as grid:
            model = ndt.distribute(build(), SHAPE, grid, **options)
            tile = model.scatter(x)

            def train():
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = model.loss(criterion, model(tile), labels)
                loss.backward()

            train()  # one-time allocations
            model.zero_grad()
            with LiveTensors() as tensors:
                train()
            trained = [name for name, _ in model.named_parameters()]
            gradients = sum(parameter.nbytes for parameter in model.parameters())
            plan = model.plan.under_autocast(torch.bfloat16) if autocast else model.plan
            return plan, TrainingMemory(plan, trained).peak(grid.rank) + gradients, tensors.peak

    with share_captures():
        return nd.loopback.run(ranks, body)


@pytest.mark.parametrize(("build", "ranks", "autocast"), CASES)
@pytest.mark.long
def test_planned_peak_memory(build, ranks, autocast):
    """With and without autocast."""
    for _, planned, measured in measure(build, ranks, autocast):
        assert planned == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(("build", "ranks"), [(build_deep_net, 1), (build_deep_net, 2), (ResidualNet, 2), (UNet, 4)])
@pytest.mark.long
def test_recomputation_is_planned(build, ranks):
    """The plan knows what recomputation needs: of a deep network less than all values, on one rank too."""
    with_all_values = measure(build, ranks)
    for (_, planned, measured), (*_, bound) in zip(measure(build, ranks, recompute=True), with_all_values, strict=True):
        assert planned == pytest.approx(measured, rel=0.15)
        assert build is not build_deep_net or measured < 0.6 * bound


@pytest.mark.parametrize(("options", "ranks"), [({"strips": 6}, 2), ({"memory": "1.4MB"}, 1), ({"memory": "1MB"}, 2)])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.long
def test_blocks_are_planned(options, ranks, recompute, monkeypatch):
    """A pass in blocks or strips stays within its plan, and within the memory limit."""
    monkeypatch.setattr("neondist.system.memory.process_overhead_bytes", lambda backend: 0)
    options = options | {"criterion": sum_of_image, "recompute": recompute}
    for plan, planned, measured in measure(build_local_net, ranks, **options):
        assert any(prod(step.blocks.block_counts) > 1 for step in plan.steps if step.blocks is not None)
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
        monkeypatch.setattr(training_memory, "MIN_DEDUPLICATED_BYTES", 1 << 30)
        separate = [live for live, _ in nd.loopback.run(2, live_after_forward)]
    result = 8 * 8 * 12 * 4  # bytes of the ReLU's result on each rank
    assert [b - a for a, b in zip(shared, separate, strict=True)] == [result, result]
