"""Compilation of the computations of a rank between messages."""

from functools import partial

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from torch import nn  # noqa: E402
from torch_runs import check  # noqa: E402

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
def test_what_is_fused_gives_the_same_numbers(grid):
    """Also on ranks without any index."""
    fused = []
    check(Net(), (2, 2, 9, 3), grids=[grid], compile=lambda run: fused.append(run) or run)
    assert fused


@pytest.mark.long
def test_torch_compile_gives_the_same_numbers():
    """With what it does before it writes C++, which takes a minute."""
    check(Net(), (1, 2, 9, 8), grids=[(1, 2, 1)], compile=partial(torch.compile, backend="aot_eager"))


def test_recompute_and_compile_exclude_each_other():
    with pytest.raises(ConfigError, match="recompute: cannot"):
        ndt.distribute(Net(), (1, 2, 9, 8), recompute=True, compile=True)
