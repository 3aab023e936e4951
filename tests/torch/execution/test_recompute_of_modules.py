"""Recomputation of segments in backward passes: same results with less memory."""

import copy
import functools

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts  # noqa: E402
from torch_runs import check_module, count_sent_bytes  # noqa: E402

import neondist.torch as ndt  # noqa: E402
from neondist import ProcessGrid  # noqa: E402
from neondist.comm import loopback  # noqa: E402

pytestmark = pytest.mark.usefixtures("shared_captures")


class ResidualBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm, self.relu = nn.BatchNorm2d(channels), nn.ReLU(inplace=True)

    def forward(self, x):
        return x + self.relu(self.norm(self.conv(x)))


def build_deep_chain(blocks=8, channels=3):
    """Return a chain of residual blocks whose last tiles are empty on some ranks."""
    parts = [nn.Conv2d(2, channels, 1), *(ResidualBlock(channels) for _ in range(blocks))]
    return nn.Sequential(
        *parts, nn.MaxPool2d(4), nn.Conv2d(channels, 2, 2, padding=1), nn.Dropout(0.0), nn.MaxPool2d(2)
    )


@pytest.mark.long
def test_recomputation_matches_single_process():
    check_module(build_deep_chain(), (2, 2, 13, 11), grids=[(1, 1, 1), (1, 3, 2), (2, 1, 2)], recompute=True)


def test_empty_ranks_recompute_collectives():
    """Ranks without cells save nothing of a segment, but others recompute it, including its sums."""
    check_module(
        nn.Sequential(nn.Flatten(), nn.Linear(9, 5), nn.Softmax(1)), (1, 1, 9, 1), grids=[(1, 5, 1)], recompute=True
    )
    chain = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Sigmoid(), nn.Softmax(2), nn.Tanh(), nn.Conv2d(1, 1, 3, padding=1))
    check_module(chain, (1, 1, 3, 1), grids=[(1, 5, 1)], recompute=True)


def test_dropout_is_reproduced():
    original = nn.Sequential(*(nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Dropout(0.5)) for _ in range(6)))

    def body(world):
        with ProcessGrid(world, rows=2, cols=2) as grid:
            results = []
            for recompute in (False, True):
                module = copy.deepcopy(original)
                model = ndt.distribute(module, (1, 2, 9, 8), grid, recompute=recompute)
                if grid.rank == 0:  # the only rank that draws from PyTorch's generator
                    torch.manual_seed(7)
                y = model(model.scatter(torch.ones(1, 2, 9, 8)))
                y.sum().backward()
                results.append([model.gather(y), *(p.grad for p in module.parameters())])
            return results

    for plain, recomputed in loopback.run(4, body):
        for a, b in zip(plain, recomputed, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def measure_saved_bytes(recompute):
    """Return the largest number of bytes that a rank saves for backward."""
    original = build_deep_chain(blocks=24, channels=8)

    def body(world):
        with ProcessGrid(world, rows=2) as grid:
            model = ndt.distribute(copy.deepcopy(original), (1, 2, 64, 64), grid, recompute=recompute)
            sizes = {}

            def pack(tensor):
                sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                model(model.scatter(torch.ones(1, 2, 64, 64)))
            return sum(sizes.values())

    return max(loopback.run(2, body))


@pytest.mark.long
def test_recomputation_saves_memory():
    assert measure_saved_bytes(True) < 0.45 * measure_saved_bytes(False)


@pytest.mark.parametrize("grid", [(1, 3, 2), (2, 1, 2)])
@pytest.mark.long
def test_user_checkpoint_preserves_message_order(grid):
    replicas, rows, cols = grid
    original = build_deep_chain(blocks=2).double()

    def body(world):
        with ProcessGrid(world, replicas=replicas, rows=rows, cols=cols) as ranks:
            gradients = []
            for use_checkpoint in (False, True):
                module = copy.deepcopy(original)
                model = ndt.distribute(module, (2, 2, 13, 11), ranks)
                x = model.scatter(torch.ones(2, 2, 13, 11, dtype=torch.float64)).requires_grad_()
                y = checkpoint(model, x, use_reentrant=False) if use_checkpoint else model(x)
                y.sum().backward()
                gradients.append([p.grad for p in module.parameters()])
                assert count_sent_bytes(model)
            return gradients

    for plain, recomputed in loopback.run(replicas * rows * cols, body):
        for a, b in zip(plain, recomputed, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def run_under_hooks(model, x, hooks):
    """Call a model on a tile with saved-tensor hooks that store tensors elsewhere, or recompute them."""
    if hooks == "checkpoint":
        return checkpoint(model, x, use_reentrant=False)
    if hooks == "selective checkpoint":
        saved = [torch.ops.aten.convolution.default]
        context = functools.partial(create_selective_checkpoint_contexts, saved)
        return checkpoint(model, x, use_reentrant=False, context_fn=context)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach().numpy().copy(), torch.from_numpy):
        return model(x)


@pytest.mark.filterwarnings("ignore:an output of a distributed module")
@pytest.mark.parametrize("strips", [None, 2])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("hooks", ["checkpoint", "selective checkpoint", "copies"])
def test_capture_in_pass_ignores_saved_tensor_hooks(hooks, ranks, strips):
    torch.manual_seed(0)
    original = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 3))

    def train(module, grid=None):
        model = ndt.distribute(module, (2, 2, 9, 8), grid, strips=strips) if grid else module
        for samples in (2, 3, 2, 2):  # a batch of three samples and evaluation mode are captured in a pass
            image = torch.randn(samples, 2, 9, 8, generator=torch.Generator().manual_seed(samples))
            y = run_under_hooks(model, model.scatter(image) if grid else image, hooks)
            y.square().sum().backward()
            module.train(samples == 2)
        return [p.grad for p in module.parameters()]

    def body(world):
        with ProcessGrid(world) as grid:
            return train(copy.deepcopy(original), grid)

    expected = train(copy.deepcopy(original))
    for gradients in loopback.run(ranks, body):
        torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-4)


class DetachedTarget(nn.Module):
    """Module that uses its first segment's output with and without gradient."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 4, stride=2, groups=4, bias=False)

    def forward(self, x):
        y = self.conv(nn.functional.pad(x, [0, 2]))
        return nn.functional.smooth_l1_loss(y, y.flip(0).detach(), reduction="sum")


def test_detached_output_has_no_gradient():
    check_module(DetachedTarget(), (2, 4, 5), grids=[(2, 1, 2)], recompute=True)


class StridedAttention(nn.Module):
    """Attention of every second cell, with one feature: PyTorch's kernel depends on the strides of the arguments."""

    def __init__(self):
        super().__init__()
        self.conv = nn.ConvTranspose2d(3, 2, (1, 3), (1, 2), (0, 0), (0, 3), 1, True, (1, 5))

    def forward(self, x):
        cells = x[1::2, 1:, -3:, ::2]
        heads = [cells.flatten(2).unflatten(1, (3, 1)).transpose(2, 3) for _ in range(3)]
        y = self.conv(nn.functional.scaled_dot_product_attention(*heads).transpose(2, 3).reshape([1, 3, 3, 3]))
        return torch.stack([y, y.sin()], 0)


def test_segments_are_recomputed_from_tensors_of_the_same_strides():
    check_module(StridedAttention(), (3, 4, 7, 6), grids=[(1, 5, 1)], recompute=True)
