"""Outputs of a distributed module as inputs, and as arguments of losses, of other modules and of the same module."""

from math import prod

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import neondist as nd  # noqa: E402
import neondist.torch as ndt  # noqa: E402
from neondist.errors import ShapeError  # noqa: E402


class Transposed(nn.Module):
    """Convolution whose output has rows for columns: on square images, its tiles have the shapes of other cells."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x):
        return self.conv(x).transpose(2, 3)


class Features(nn.Module):
    """Convolutions that return intermediate results, which they use further."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(1, 1, 3, padding=1), nn.Conv2d(1, 1, 3, padding=1, stride=2)])

    def forward(self, x):
        first = self.convs[0](x)
        return first, self.convs[1](first.tanh())


FIRST = {
    "pixel shuffle": (lambda: nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.PixelShuffle(2)), (2, 1, 7, 9)),
    "square": (Transposed, (2, 1, 12, 12)),
    "rows for columns": (Transposed, (2, 1, 9, 14)),
    "strided": (lambda: nn.Conv2d(1, 1, 3, stride=2), (2, 1, 15, 13)),
}
DERIVED = {"output": lambda y: y, "alias": lambda y: y.detach(), "derived": lambda y: y.clamp(-1, 1) + 0.5}
GRIDS = [{"cols": 2}, {"rows": 2, "cols": 2}, {"replicas": 2}, {"rows": 2, "cols": 3}]


def chain(name, derive, distribute):
    torch.manual_seed(0)
    build, shape = FIRST[name]
    first, second = build().double(), nn.Conv2d(1, 2, 3, padding=1).double()
    image = torch.randn(shape, dtype=torch.float64)
    middle = first(image).shape
    a, b = distribute(first, shape), distribute(second, middle)
    between = a(a.scatter(image))
    y = b(derive(between))
    target = torch.linspace(-1, 1, 2 * middle.numel(), dtype=torch.float64).view(middle[0], 2, *middle[2:])
    loss = b.loss(F.l1_loss, y, b.scatter_target(target))
    loss.backward()
    return loss, b.gather(y), *(p.grad for p in (*first.parameters(), *second.parameters()))


class OneProcess:
    """A module with the methods of a distributed one."""

    def __init__(self, module, _):
        self.module, self.scatter, self.scatter_target = module, torch.clone, torch.clone
        self.gather = torch.clone

    def __call__(self, *inputs):
        return self.module(*inputs)

    def loss(self, criterion, y, target):
        return criterion(y, target)


def run_on_grid(grid, function):
    def body(world):
        with nd.ProcessGrid(world, **{"replicas": 1, "rows": 1, "cols": 1} | grid) as ranks:
            return function(lambda module, shape: ndt.distribute(module, shape, ranks, dtype=torch.float64))

    return nd.loopback.run(prod(grid.values()), body)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("derived", DERIVED)
@pytest.mark.parametrize("name", FIRST)
def test_outputs_as_inputs_of_another_module(name, derived, grid):
    if (name, derived) == ("square", "derived") and grid == {"rows": 2, "cols": 2}:
        with pytest.raises(ShapeError, match="partitioned in different ways; compute it in the module"):
            run_on_grid(grid, lambda distribute: chain(name, DERIVED[derived], distribute))
        return
    expected = chain(name, DERIVED[derived], OneProcess)
    for results in run_on_grid(grid, lambda distribute: chain(name, DERIVED[derived], distribute)):
        for result, value in zip(results, expected, strict=True):
            torch.testing.assert_close(result, value)


def test_losses_between_modules():
    def compare(distribute):
        torch.manual_seed(0)
        image = torch.randn(1, 1, 12, 12, dtype=torch.float64)
        modules = [Transposed().double(), nn.Conv2d(1, 1, 1).double()]
        models = [distribute(module, image.shape) for module in modules]
        loss = models[0].loss(F.mse_loss, *(model(model.scatter(image)) for model in models))
        loss.backward()
        return loss, *(p.grad for module in modules for p in module.parameters())

    expected = compare(OneProcess)
    for results in run_on_grid({"rows": 2, "cols": 2}, compare):
        for result, value in zip(results, expected, strict=True):
            torch.testing.assert_close(result, value)


@pytest.mark.filterwarnings("error")
def test_gradients_of_other_modules_and_of_features_cause_no_warnings():
    def step(distribute):
        torch.manual_seed(0)
        first, second = (distribute(module.double(), (1, 1, 12, 14)) for module in (Features(), nn.Conv2d(1, 1, 1)))
        features = first(first.scatter(torch.ones(1, 1, 12, 14, dtype=torch.float64)))
        y = second(features[0])
        loss = first.loss(lambda outputs, _: outputs[0].mean() + outputs[1].mean(), features, None)
        (loss + second.loss(F.mse_loss, y, torch.zeros_like(y))).backward()

    run_on_grid({"rows": 2}, step)
