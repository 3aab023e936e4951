"""Random numbers of distributed torch modules: the same for every grid, or refused."""

import copy

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch_runs import Function, captured_once  # noqa: E402

import neondist.torch as ndt  # noqa: E402
from neondist import ProcessGrid  # noqa: E402
from neondist.comm import loopback  # noqa: E402
from neondist.torch.execution.run import Runner  # noqa: E402

IMAGES = (2, 3, 13, 11)


def outputs(module, images, grid):
    """Return what each virtual rank has of the whole output."""
    replicas, rows, cols = grid

    def body(world):
        with ProcessGrid(world, replicas=replicas, rows=rows, cols=cols) as ranks:
            model = ndt.distribute(copy.deepcopy(module), IMAGES, ranks)
            return model.gather(model(model.scatter(images)))

    with captured_once():
        return loopback.run(replicas * rows * cols, body)


def attention(x):
    """Cells, and vectors that are whole on all ranks, forget some of what they look at."""
    cells, vectors = x.flatten(2).mT, x.mean((2, 3))[:, None]
    found = F.scaled_dot_product_attention(cells, cells, cells, dropout_p=0.3).mT.unflatten(2, x.shape[2:])
    return found * F.scaled_dot_product_attention(vectors, vectors, vectors, dropout_p=0.3).mT[..., None]


@pytest.mark.long
def test_dropout_is_that_of_one_rank_on_every_grid(monkeypatch):
    """Grids have plans of other lengths, and a channel or a vector is whole on all ranks."""
    monkeypatch.setattr(
        Runner, "_draw_seed", lambda self, inputs: torch.tensor(12345)
    )  # virtual ranks share PyTorch's generator
    torch.manual_seed(0)
    parts = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Conv2d(4, 4, 3), nn.Dropout2d(0.5)
    module = nn.Sequential(*parts, Function(attention), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.3)).double()
    images = torch.randn(IMAGES, dtype=torch.float64)
    (alone,) = outputs(module, images, (1, 1, 1))
    assert 0 < (alone == 0).sum() < alone.numel()
    for grid in ((1, 2, 1), (1, 2, 2), (2, 1, 2), (1, 3, 2)):
        for found in outputs(module, images, grid):
            torch.testing.assert_close(found, alone, rtol=1e-12, atol=1e-12)


DRAWN = {
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.4, True),
    "alpha dropout of channels": lambda x: F.feature_alpha_dropout(x, 0.4, True),
    "in place": lambda x: F.dropout2d(F.dropout(x * 1, 0.4, True, True), 0.3, True, True),
    "slopes": lambda x: F.rrelu(x, training=True),
    "truth": lambda x: x * torch.bernoulli(x.sigmoid()),
    "paths": lambda x: x * x.new_empty((2, 1, 1, 1)).bernoulli_(0.7),
    "choices": lambda x: F.gumbel_softmax(x, dim=1, hard=True),
    "normal": lambda x: torch.normal(x, 0.1) + torch.normal(0.0, 1.0, (13, 11)).to(x) + torch.empty_like(x).normal_(),
    "uniform": lambda x: x * torch.empty_like(x).uniform_(0.5, 0.7),
    "exponential": lambda x: x + torch.empty_like(x).exponential_(),
    "whole numbers": lambda x: x * torch.randint(2, 5, (13, 11)),
    "a vector's": lambda x: x.mean((2, 3)) + torch.randn(2, 3).to(x),
}


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.long
def test_numbers_are_those_of_one_rank_on_every_grid(name, monkeypatch):
    monkeypatch.setattr(Runner, "_draw_seed", lambda self, inputs: torch.tensor(12345))
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), Function(DRAWN[name])).double()
    images = torch.randn(IMAGES, dtype=torch.float64)
    (alone,) = outputs(module, images, (1, 1, 1))
    for grid in ((1, 3, 1), (2, 1, 2)):
        for found in outputs(module, images, grid):
            torch.testing.assert_close(found, alone, rtol=1e-12, atol=1e-12)


class Noisy(nn.Module):
    """A criterion that may begin to draw random numbers."""

    def __init__(self):
        super().__init__()
        self.p = 0.0

    def forward(self, output, target):
        return (F.dropout(output, self.p) - target).square().mean()


def test_a_criterion_that_begins_to_draw(monkeypatch):
    monkeypatch.setattr(Runner, "_draw_seed", lambda self, inputs: torch.tensor(5))
    images = torch.randn(IMAGES, generator=torch.Generator().manual_seed(1))

    def body(world):
        with ProcessGrid(world) as grid:
            model, criterion, found = ndt.distribute(nn.Tanh(), IMAGES, grid), Noisy(), []
            for criterion.p in (0.0, 0.0, 0.5, 0.5):
                x = model.scatter(images)
                found.append(model.loss(criterion, model(x), x).item())
            return found

    alone = loopback.run(1, body)[0]
    assert alone[0] == alone[1] != alone[2] == alone[3]
    assert loopback.run(3, body)[0] == pytest.approx(alone, rel=1e-6)


def test_numbers_are_spread_as_pytorchs(monkeypatch):
    monkeypatch.setattr(Runner, "_draw_seed", lambda self, inputs: torch.tensor(12345))
    torch.manual_seed(0)
    images = torch.randn(IMAGES, dtype=torch.float64)
    functions = {
        "alpha dropout": lambda x: F.alpha_dropout(x.expand(60, -1, -1, -1), 0.4, True),
        "normal": lambda x: torch.normal(2.0, 3.0, (60, 3, 13, 11)),
        "uniform": lambda x: x.new_empty((60, 3, 13, 11)).uniform_(-1, 3),
        "whole numbers": lambda x: torch.randint(-2, 5, (60, 3, 13, 11)).to(x),
    }
    for name, function in functions.items():
        module = Function(lambda x, f=function: f(x[:1] * 0 + 1) + 0 * x[:1])
        with ProcessGrid.serial() as grid:
            found = ndt.distribute(module, IMAGES, grid, dtype=torch.float64)(images)
        expected = function(images[:1] * 0 + 1).double()
        assert abs(found.mean() - expected.mean()) < 0.1, name
        assert abs(found.std() - expected.std()) < 0.1, name
        assert abs(found.min() - expected.min()) < 2, name
        assert abs(found.max() - expected.max()) < 2, name


class Recurrent(nn.Module):
    """Reads rows with dropout between its layers."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, 2, dropout=0.3, batch_first=True)

    def forward(self, x):
        return self.lstm(x.mean(3).mT)[0]


@pytest.mark.long
def test_dropout_between_recurrent_layers_is_refused():
    with pytest.raises(ndt.UnsupportedOperator, match="dropout between recurrent layers"):
        outputs(Recurrent(), torch.zeros(IMAGES), (1, 2, 1))
    (found,) = outputs(Recurrent(), torch.zeros(IMAGES), (1, 1, 1))
    assert found.shape == (2, 13, 4)
    (found, _) = outputs(Recurrent().eval(), torch.zeros(IMAGES), (1, 2, 1))
    assert found.shape == (2, 13, 4)


REFUSED = {
    "an order": lambda x: x.mean((2, 3))[:, torch.randperm(3)],
    "numbers of a class": lambda x: x.mean((2, 3)).softmax(1).multinomial(1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_each_rank_would_draw_for_itself_is_refused(name):
    module = Function(REFUSED[name])
    with pytest.raises(ndt.UnsupportedOperator, match=r"random|dropout"):
        outputs(module, torch.zeros(IMAGES), (1, 2, 1))


class Drawn(nn.Module):
    """Numbers around an image and a parameter."""

    def __init__(self):
        super().__init__()
        self.std = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return torch.normal(x, self.std), torch.normal(2.0, x * 0)


def test_means_and_deviations_have_gradients_of_zeros_on_every_rank():
    x = torch.arange(3.0).reshape(1, 1, 1, 3)

    def body(world):
        model = ndt.distribute(Drawn(), x.shape, ProcessGrid(world, rows=2, cols=1))  # the second rank has no cells
        tile = model.scatter(x).requires_grad_()
        first, second = model(tile)
        model.loss(nn.MSELoss(), first, model.scatter_target(torch.ones_like(x))).backward()
        return model.gather(first), model.gather(second), tile.grad, model.module.std.grad, second.requires_grad

    for first, second, inputs, parameters, differentiable in loopback.run(2, body, timeout=20):
        assert torch.equal(first, x)
        assert torch.equal(second, torch.full_like(x, 2.0))
        assert not inputs.any()
        assert not parameters.any()
        assert differentiable
