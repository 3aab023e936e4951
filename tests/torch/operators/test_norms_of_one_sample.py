"""Norms of one sample: their gradients, whatever the memory format of those that come; PyTorch's own may be wrong."""

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_runs import difference, distributed, serial  # noqa: E402

CELLS = 4, 5, 3
NORMS = {
    "batch": nn.BatchNorm3d(2), "evaluated": nn.BatchNorm3d(2).eval(), "untracked": nn.BatchNorm3d(2, affine=False),
    "instance": nn.InstanceNorm3d(2, affine=True), "tracked": nn.InstanceNorm3d(2, track_running_stats=True),
    "evaluated instance": nn.InstanceNorm3d(2, track_running_stats=True).eval(), "groups": nn.GroupNorm(2, 2),
}  # fmt: skip


class Functional(nn.Module):
    """A norm that is called as a function, by a name."""

    def __init__(self, name):
        super().__init__()
        self.name, self.weight = name, nn.Parameter(torch.tensor([1.5, -0.5]))

    def forward(self, x):
        if self.name == "torch.native_batch_norm":
            return torch.native_batch_norm(x, self.weight, None, None, None, True, 0.1, 1e-5)[0]
        if self.name == "F.batch_norm":
            return F.batch_norm(x, None, None, self.weight, training=True)
        if self.name == "checkpoint":
            return checkpoint(lambda x: F.instance_norm(x, weight=self.weight), x, use_reentrant=False)
        return torch.instance_norm(x, self.weight, None, None, None, True, 0.1, 1e-5, False)


FUNCTIONS = "torch.native_batch_norm", "F.batch_norm", "torch.instance_norm", "checkpoint"


class Flattened(nn.Module):
    """A norm whose result is laid out as tokens, so that its gradient comes with channels last, but for a gap."""

    def __init__(self, norm, contiguous):
        super().__init__()
        self.norm, self.contiguous = norm, contiguous
        self.register_buffer("token", torch.ones(1, 1, 2))

    def forward(self, x):
        y = self.norm(x)
        if self.contiguous:  # for the reference
            y.register_hook(torch.Tensor.contiguous)
        return torch.cat([self.token, y.flatten(2).transpose(1, 2)], 1)


@pytest.mark.parametrize("grid", [(1, 1, 1), (1, 1, 2)])
@pytest.mark.parametrize("name", [*NORMS, *FUNCTIONS])
def test_gradients_of_tokens(name, grid):
    norm = NORMS.get(name) or Functional(name)
    x = torch.randn(1, 2, *CELLS, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    expected = serial(Flattened(norm, contiguous=True).double(), [x])
    for found in distributed(Flattened(norm, contiguous=False).double(), [x], expected["gradients"], grid):
        worst, where = difference(found, expected)
        assert worst < 1e-9, where
