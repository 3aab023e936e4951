"""Gradients of norms of one sample for incoming gradients in any memory format; PyTorch's own may be wrong."""

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_runs import find_difference, run_distributed, run_serial  # noqa: E402

CELLS = 4, 5, 3
NORMS = {
    "batch": nn.BatchNorm3d(2), "evaluated": nn.BatchNorm3d(2).eval(), "untracked": nn.BatchNorm3d(2, affine=False),
    "instance": nn.InstanceNorm3d(2, affine=True), "tracked": nn.InstanceNorm3d(2, track_running_stats=True),
    "evaluated instance": nn.InstanceNorm3d(2, track_running_stats=True).eval(), "groups": nn.GroupNorm(2, 2),
}  # fmt: skip


class FunctionalNorm(nn.Module):
    """Norm called as a function, chosen by name."""

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


class FlattenedNorm(nn.Module):
    """Norm whose output becomes tokens, so that its gradient is channels-last with a gap."""

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
    norm = NORMS.get(name) or FunctionalNorm(name)
    x = torch.randn(1, 2, *CELLS, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    expected = run_serial(FlattenedNorm(norm, contiguous=True).double(), [x])
    for actual in run_distributed(FlattenedNorm(norm, contiguous=False).double(), [x], expected["gradients"], grid):
        worst, location = find_difference(actual, expected)
        assert worst < 1e-9, location
