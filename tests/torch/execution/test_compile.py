"""Compilation of a rank's computation between messages."""

from functools import partial

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from torch import nn  # noqa: E402
from torch_runs import check_module  # noqa: E402

import neondist.torch as ndt  # noqa: E402
from neondist.errors import ConfigError  # noqa: E402


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.second = nn.Conv2d(3, 2, 3, stride=2, padding=1)

    def forward(self, x):
        y = torch.relu(self.norm(self.first(x)))
        y = y * torch.sigmoid(y) + 1
        return self.second(y), y.mean((2, 3))


@pytest.mark.parametrize("grid", [(1, 2, 2), (2, 3, 1), (1, 1, 4)])
def test_compiled_functions_match_single_process(grid):
    """Including ranks without cells."""
    compiled = []
    check_module(Net(), (2, 2, 9, 3), grids=[grid], compile=lambda run: compiled.append(run) or run)
    assert compiled


@pytest.mark.long
def test_torch_compile_matches_single_process():
    """With the stages before code generation, which takes a minute."""
    check_module(Net(), (1, 2, 9, 8), grids=[(1, 2, 1)], compile=partial(torch.compile, backend="aot_eager"))


def test_recompute_and_compile_are_exclusive():
    with pytest.raises(ConfigError, match="recompute: cannot"):
        ndt.distribute(Net(), (1, 2, 9, 8), recompute=True, compile=True)
