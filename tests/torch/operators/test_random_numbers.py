"""Random numbers of distributed PyTorch modules: equal on every grid, or rejected."""

import copy

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch_runs import FunctionModule, share_captures  # noqa: E402

import neondist.torch as ndt  # noqa: E402
from neondist import ProcessGrid  # noqa: E402
from neondist.comm import loopback  # noqa: E402
from neondist.torch.execution.runner import PlanRunner  # noqa: E402

IMAGES = (2, 3, 13, 11)


@pytest.fixture
def fixed_seed(monkeypatch):
    """Fix the seed of a pass, since virtual ranks share PyTorch's generator."""
    monkeypatch.setattr(PlanRunner, "_draw_seed", lambda self, inputs: torch.tensor(12345))


def compute_outputs(module, images, grid):
    """Return the gathered output of each virtual rank."""
    replicas, rows, cols = grid

    def body(world):
        with ProcessGrid(world, replicas=replicas, rows=rows, cols=cols) as ranks:
            model = ndt.distribute(copy.deepcopy(module), IMAGES, ranks)
            return model.gather(model(model.scatter(images)))

    with share_captures():
        return loopback.run(replicas * rows * cols, body)


def attend(x):
    """Attention with dropout over cells and over replicated vectors."""
    cells, vectors = x.flatten(2).mT, x.mean((2, 3))[:, None]
    attended = F.scaled_dot_product_attention(cells, cells, cells, dropout_p=0.3).mT.unflatten(2, x.shape[2:])
    return attended * F.scaled_dot_product_attention(vectors, vectors, vectors, dropout_p=0.3).mT[..., None]


@pytest.mark.long
@pytest.mark.usefixtures("fixed_seed")
def test_dropout_is_equal_on_every_grid():
    """Plans differ in length between grids, and channels and vectors are replicated."""
    torch.manual_seed(0)
    parts = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Conv2d(4, 4, 3), nn.Dropout2d(0.5)
    module = nn.Sequential(
        *parts, FunctionModule(attend), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.3)
    ).double()
    images = torch.randn(IMAGES, dtype=torch.float64)
    (expected,) = compute_outputs(module, images, (1, 1, 1))
    assert 0 < (expected == 0).sum() < expected.numel()
    for grid in ((1, 2, 1), (1, 2, 2), (2, 1, 2), (1, 3, 2)):
        for actual in compute_outputs(module, images, grid):
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


GENERATORS = {
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.4, True),
    "alpha dropout of channels": lambda x: F.feature_alpha_dropout(x, 0.4, True),
    "in place": lambda x: F.dropout2d(F.dropout(x * 1, 0.4, True, True), 0.3, True, True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "bernoulli": lambda x: x * torch.bernoulli(x.sigmoid()),
    "drop path": lambda x: x * x.new_empty((2, 1, 1, 1)).bernoulli_(0.7),
    "default probability": lambda x: x * x.new_empty((2, 1, 1, 1)).bernoulli_(0.5),
    "permutation": lambda x: x[:, :, torch.randperm(13)],
    "categories": lambda x: F.one_hot(torch.multinomial(x.flatten(1).sigmoid(), 3), 429).to(x) * x.flatten(1)[:, None],
    "categories, replaced": lambda x: (
        x * torch.multinomial(x[:, 0, 0].sigmoid(), 13, replacement=True)[:, None, :, None]
    ),
    "gumbel softmax": lambda x: F.gumbel_softmax(x, dim=1, hard=True),
    "normal": lambda x: torch.normal(x, 0.1) + torch.normal(0.0, 1.0, (13, 11)).to(x) + torch.empty_like(x).normal_(),
    "uniform": lambda x: x * torch.empty_like(x).uniform_(0.5, 0.7),
    "exponential": lambda x: x + torch.empty_like(x).exponential_(),
    "integers": lambda x: x * torch.randint(2, 5, (13, 11)),
    "integers in place": lambda x: x * torch.empty_like(x).random_(2, 5) + torch.empty_like(x).random_(to=4),
    "vector": lambda x: x.mean((2, 3)) + torch.randn(2, 3).to(x),
}


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.long
@pytest.mark.usefixtures("fixed_seed")
def test_random_numbers_are_equal_on_every_grid(name):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), FunctionModule(GENERATORS[name])).double()
    images = torch.randn(IMAGES, dtype=torch.float64)
    (expected,) = compute_outputs(module, images, (1, 1, 1))
    for grid in ((1, 3, 1), (2, 1, 2)):
        for actual in compute_outputs(module, images, grid):
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


class NoisyLoss(nn.Module):
    """Criterion with dropout, which may be switched on."""

    def __init__(self):
        super().__init__()
        self.p = 0.0

    def forward(self, output, target):
        return (F.dropout(output, self.p) - target).square().mean()


def test_criterion_that_starts_to_use_random_numbers(monkeypatch):
    monkeypatch.setattr(PlanRunner, "_draw_seed", lambda self, inputs: torch.tensor(5))
    images = torch.randn(IMAGES, generator=torch.Generator().manual_seed(1))

    def body(world):
        with ProcessGrid(world) as grid:
            model, criterion, losses = ndt.distribute(nn.Tanh(), IMAGES, grid), NoisyLoss(), []
            for criterion.p in (0.0, 0.0, 0.5, 0.5):
                x = model.scatter(images)
                losses.append(model.loss(criterion, model(x), x).item())
            return losses

    expected = loopback.run(1, body)[0]
    assert expected[0] == expected[1] != expected[2] == expected[3]
    assert loopback.run(3, body)[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.usefixtures("fixed_seed")
def test_distributions_match_pytorch():
    torch.manual_seed(0)
    images, weights = torch.randn(IMAGES, dtype=torch.float64), torch.tensor([0.0, 0.2, 0.5, 0.3])
    functions = {
        "alpha dropout": lambda x: F.alpha_dropout(x.expand(60, -1, -1, -1), 0.4, True),
        "normal": lambda x: torch.normal(2.0, 3.0, (60, 3, 13, 11)),
        "uniform": lambda x: x.new_empty((60, 3, 13, 11)).uniform_(-1, 3),
        "integers": lambda x: torch.randint(-2, 5, (60, 3, 13, 11)).to(x),
        "integers in place": lambda x: x.new_empty((60, 3, 13, 11)).random_(-2, to=5),
        "permutation": lambda x: torch.randperm(4290).reshape(10, 3, 13, 11)[:5].to(x) / 2000,
        "categories": lambda x: torch.multinomial(weights.expand(25740, 4), 2).to(x)[:, 1].reshape(60, 3, 13, 11),
        "categories, replaced": lambda x: torch.multinomial(weights, 25740, True).to(x).reshape(60, 3, 13, 11),
    }
    for name, function in functions.items():
        module = FunctionModule(lambda x, f=function: f(x[:1] * 0 + 1) + 0 * x[:1])
        with ProcessGrid.serial() as grid:
            numbers = ndt.distribute(module, IMAGES, grid, dtype=torch.float64)(images)
        expected = function(images[:1] * 0 + 1).double()
        assert abs(numbers.mean() - expected.mean()) < 0.1, name
        assert abs(numbers.std() - expected.std()) < 0.1, name
        assert abs(numbers.min() - expected.min()) < 2, name
        assert abs(numbers.max() - expected.max()) < 2, name


class RecurrentNet(nn.Module):
    """LSTM over rows, with dropout between its layers."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, 2, dropout=0.3, batch_first=True)

    def forward(self, x):
        return self.lstm(x.mean(3).mT)[0]


@pytest.mark.long
@pytest.mark.usefixtures("fixed_seed")
def test_dropout_between_recurrent_layers_is_equal_on_every_grid():
    torch.manual_seed(0)
    module, images = RecurrentNet().double(), torch.randn(IMAGES, dtype=torch.float64)
    (expected,) = compute_outputs(module, images, (1, 1, 1))
    assert (expected - compute_outputs(module.eval(), images, (1, 1, 1))[0]).abs().max() > 1e-3
    for grid in ((1, 2, 1), (2, 1, 1), (1, 2, 2)):
        for actual in compute_outputs(module.train(), images, grid):
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


REJECTED = {
    "poisson": lambda x: torch.poisson(x.mean((2, 3)).exp()),
    "binomial": lambda x: torch.binomial(x.exp() + 1, x.sigmoid()),
}


@pytest.mark.parametrize("name", REJECTED)
def test_operators_that_draw_per_rank_are_rejected(name):
    module = FunctionModule(REJECTED[name])
    with pytest.raises(ndt.UnsupportedOperator, match=r"random|dropout"):
        compute_outputs(module, torch.zeros(IMAGES), (1, 2, 1))


class NormalNumbers(nn.Module):
    """Normal numbers with an image as mean and a parameter as deviation."""

    def __init__(self):
        super().__init__()
        self.std = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return torch.normal(x, self.std), torch.normal(2.0, x * 0)


def test_means_and_deviations_have_zero_gradients():
    x = torch.arange(3.0).reshape(1, 1, 1, 3)

    def body(world):
        # the second rank has no cells
        model = ndt.distribute(NormalNumbers(), x.shape, ProcessGrid(world, rows=2, cols=1))
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
