"""Guarded passes name the rule or scheme of a user's own that is wrong, and give the same numbers else."""

import copy

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from torch import nn  # noqa: E402
from torch_runs import captured_once  # noqa: E402

import neondist as nd  # noqa: E402
import neondist.torch as ndt  # noqa: E402
from neondist import ProcessGrid  # noqa: E402
from neondist.comm import loopback  # noqa: E402
from neondist.errors import HaloError  # noqa: E402
from neondist.torch.ir.registry import RULES  # noqa: E402

NET = nn.Sequential(
    nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 3, 3), nn.Softplus(), nn.MaxPool2d(2)
)
SHAPE = (2, 1, 12, 10)


class Lazy(nd.schemes.ExchangePolicy):
    """Fills nothing."""

    def forward(self, halo):
        """Do nothing."""

    backward = forward

    def exchanges(self, direction):
        """Return none."""
        return 0, 0, 0


def passed(guard, ranks=4, **how):
    """Return the output and the gradients of a pass on virtual ranks."""
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))

    def body(world):
        with ProcessGrid(world) as grid:
            model = ndt.distribute(copy.deepcopy(NET), SHAPE, grid, **how)
            if guard:
                model.guard()
            y = model(model.scatter(x))
            y.sum().backward()
            return [y.detach(), *(p.grad for p in model.parameters())]

    with captured_once():
        return loopback.run(ranks, body)


@pytest.fixture
def softplus():
    """Let a test give softplus a rule."""
    name, before = "aten.softplus.default", dict(RULES)
    yield ndt.rule(name)
    RULES.clear()
    RULES.update(before)


@pytest.mark.parametrize("how", [{}, {"scheme": "tower"}, {"scheme": "deep_halo"}, {"recompute": True}])
@pytest.mark.long
def test_the_same_numbers(how):
    for plain, watched in zip(passed(False, **how), passed(True, **how), strict=True):
        for a, b in zip(plain, watched, strict=True):
            assert torch.equal(a, b)


def test_a_rule_that_writes_into_its_argument(softplus):
    @softplus
    def wrong(lowering, x, beta, threshold):
        return lowering.local(lambda a: a.detach().exp_() + a * 0, [x], x.layout)

    assert len(passed(False)) == 4
    with pytest.raises(HaloError, match=r"rank .: step '4:aten\.softplus\.default', forward: modified its argument 0"):
        passed(True)


def test_a_rule_that_gives_another_part_than_it_says(softplus):
    @softplus
    def wrong(lowering, x, beta, threshold):
        return lowering.local(lambda a: a.double(), [x], x.layout)

    with pytest.raises(
        HaloError, match=r"returned torch\.float64 of shape \(2, 3, 5, 4\) as result 0, but its rule declares"
    ):
        passed(True)


def test_a_scheme_that_leaves_cells_unfilled():
    with pytest.raises(HaloError, match=r"'0:aten\.conv2d\.default', forward: .* never filled; scheme Lazy must fill"):
        passed(True, scheme=Lazy())
