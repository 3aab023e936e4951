"""Guarded passes: they name faulty user rules and schemes, and otherwise do not change results."""

import copy

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from torch import nn  # noqa: E402
from torch_runs import share_captures  # noqa: E402

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


class EmptyPolicy(nd.schemes.ExchangePolicy):
    """Scheme that fills nothing."""

    def forward(self, halo):
        """Do nothing."""

    backward = forward

    def exchanges_per_call(self, direction):
        """Return none."""
        return 0, 0, 0


def run_pass(guard, ranks=4, **options):
    """Return the output and the gradients of a pass on virtual ranks."""
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))

    def body(world):
        with ProcessGrid(world) as grid:
            model = ndt.distribute(copy.deepcopy(NET), SHAPE, grid, **options)
            if guard:
                model.guard()
            y = model(model.scatter(x))
            y.sum().backward()
            return [y.detach(), *(p.grad for p in model.parameters())]

    with share_captures():
        return loopback.run(ranks, body)


@pytest.fixture
def register_softplus():
    """Return a decorator that registers a rule for softplus, and restore the rules afterwards."""
    name, original_rules = "aten.softplus.default", dict(RULES)
    yield ndt.rule(name)
    RULES.clear()
    RULES.update(original_rules)


@pytest.mark.parametrize("options", [{}, {"scheme": "tower"}, {"scheme": "deep_halo"}, {"recompute": True}])
@pytest.mark.long
def test_guard_preserves_results(options):
    for plain, guarded in zip(run_pass(False, **options), run_pass(True, **options), strict=True):
        for a, b in zip(plain, guarded, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("result", [None, torch.zeros(3)])
def test_rules_that_return_no_value_are_named(register_softplus, result):
    @register_softplus
    def softplus_rule(lowering, x, beta, threshold):
        return result

    with pytest.raises(ndt.UnsupportedOperator, match=r"its rule softplus_rule returns .* instead of a value"):
        run_pass(False)


@pytest.mark.parametrize("name", ["mine.energy", "energy", "", "mine..default", 3, torch.ops.aten.softplus.default])
def test_rules_of_invalid_names_are_rejected(name):
    with pytest.raises(nd.ConfigError, match=r"is not an operator name; expected NAMESPACE.NAME.OVERLOAD"):
        ndt.rule(name)


def test_rule_that_modifies_its_argument(register_softplus):
    @register_softplus
    def rule(lowering, x, beta, threshold):
        return lowering.local(lambda a: a.detach().exp_() + a * 0, [x], x.layout)

    assert len(run_pass(False)) == 4
    with pytest.raises(HaloError, match=r"rank .: step '4:aten\.softplus\.default', forward: modified its argument 0"):
        run_pass(True)


def test_rule_with_a_wrong_result(register_softplus):
    @register_softplus
    def rule(lowering, x, beta, threshold):
        return lowering.local(lambda a: a.double(), [x], x.layout)

    with pytest.raises(
        HaloError, match=r"returned torch\.float64 of shape \(2, 3, 5, 4\) as result 0, but its rule declares"
    ):
        run_pass(True)


def test_scheme_that_leaves_cells_unfilled():
    with pytest.raises(
        HaloError, match=r"'0:aten\.conv2d\.default', forward: .* never filled; scheme EmptyPolicy must fill"
    ):
        run_pass(True, scheme=EmptyPolicy())
