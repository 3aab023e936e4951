"""Modules on a device whose memory the host cannot read: PyTorch's meta device, which rejects mixing and copies.

It has no values; tests/torchrun checks the values of tensor messages over gloo.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch_runs import FunctionModule, count_sent_bytes

import neondist.torch as ndt
from neondist import ProcessGrid
from neondist.comm import loopback
from neondist.comm.single import SingleTransport
from neondist.comm.transport import Message

GRIDS = [(1, 2, 2), (2, 1, 2), (1, 3, 1)]


@pytest.fixture(autouse=True)
def batch_norm_statistics():
    """Register the batch-norm statistics operator, which PyTorch lacks on the meta device."""

    def empty_statistics(x, mean, variance, momentum):
        return x.new_empty(x.shape[1]), x.new_empty(x.shape[1])

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("batch_norm_update_stats", empty_statistics, "Meta")
        yield


class DeviceTransport(SingleTransport):
    """Rank among identical ranks; messages must be device tensors, and are discarded."""

    tensor_device_types = ("meta",)

    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def split_tiles_and_replicas(self, tiles):
        return DeviceTransport(self.rank % tiles, tiles), DeviceTransport(self.rank // tiles, self.size // tiles)

    def split(self, color, key):
        return DeviceTransport(0, 2)

    def create_exchange(self, sends, receives):
        assert all(isinstance(m, Message) and m.array.device.type == "meta" for m in (*sends, *receives))
        return super().create_exchange(sends, receives)

    def allreduce(self, array, op="sum"):
        assert not isinstance(array, torch.Tensor) or array.device.type == "meta"

    def allgather(self, value):
        return [value] * self.size

    def bcast(self, value, root=0):
        return 1 if value is None else value


class Net(nn.Module):
    """Network with windows, index maps, interpolation, norms, random numbers, attention and sums."""

    def __init__(self):
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 4, 2, 1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.InstanceNorm2d(8, affine=True)])
        self.up, self.last = nn.ConvTranspose2d(8, 8, 3, 2), nn.Conv2d(8, 4, 1)
        self.register_buffer("scale", torch.ones(8, 1, 1))

    def forward(self, x):
        x = self.first(F.pad(x, (1, 2, 2, 1), "reflect"))
        for norm in self.norms:
            x = F.dropout(F.relu(norm(x)) * self.scale, 0.1, self.training)
        x = F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False)
        x = torch.roll(x.flip(2), (1, 2), (2, 3)) + torch.randn_like(x)
        y = self.up(self.down(x))
        for mode in ("nearest", "bilinear", "bicubic"):
            y = y + F.interpolate(F.max_pool2d(x, 2), y.shape[-2:], mode=mode)
        y = y + F.adaptive_avg_pool2d(x, 1) + x.mean((2, 3), keepdim=True) + x.new_full((8, 1, 1), 2.0)
        return self.last(F.interpolate(y, (24, 26), mode="bilinear", align_corners=True, antialias=False))


def attend(x):
    q = x.flatten(2).mT
    return F.scaled_dot_product_attention(q, q, q).mT.reshape(x.shape)


CASES = {
    "everything": (Net(), (2, 3, 24, 26)),
    "attention": (FunctionModule(attend), (2, 4, 12, 13)),
    "a vector": (
        nn.Sequential(nn.Conv2d(3, 4, 3, padding="same"), nn.Flatten(), nn.Linear(4 * 12 * 13, 5)),
        (2, 3, 12, 13),
    ),
    "few cells": (
        nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.MaxPool2d(3, 2), nn.Upsample(scale_factor=3)),
        (2, 3, 8, 9),
    ),
}


@pytest.mark.usefixtures("shared_captures")
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.long
def test_training_step_stays_on_the_device(case, grid):
    replicas, rows, cols = grid
    module, shape = CASES[case]
    for rank in (0, 1, replicas * rows * cols - 1):
        with ProcessGrid(
            DeviceTransport(rank, replicas * rows * cols), replicas=replicas, rows=rows, cols=cols
        ) as ranks:
            local_module = copy.deepcopy(module).to("meta").train()
            model = ndt.distribute(local_module, shape, ranks)
            x = model.scatter(torch.empty(shape, device="meta")).requires_grad_()
            y = model(x)
            y.backward(torch.empty_like(y))
            assert x.grad.device == y.device == torch.device("meta")
            assert all(p.grad.device == p.device == torch.device("meta") for p in local_module.parameters())
            assert count_sent_bytes(model) == model.plan.traffic(
                rank, dict(local_module.named_parameters()), inputs=True
            )


def test_loss_stays_on_the_device():
    with ProcessGrid(DeviceTransport(1, 2), rows=2, cols=1) as ranks:
        model = ndt.distribute(nn.Conv2d(3, 4, 3, padding=1).to("meta"), (2, 3, 12, 13), ranks)
        y = model(model.scatter(torch.empty(2, 3, 12, 13, device="meta")))
        target = model.scatter_target(torch.empty(2, 12, 13, dtype=torch.int64, device="meta"))
        loss = model.loss(nn.CrossEntropyLoss(torch.ones(4, device="meta")), y, target)
        loss.backward()
        assert loss.device == torch.device("meta")


def test_virtual_ranks_disable_autograd_threads():
    """A shared autograd thread for a GPU would block on one rank's messages while another rank has to send them."""

    def body(world):
        with ProcessGrid(world, rows=2) as ranks:
            model = ndt.distribute(nn.Conv2d(1, 1, 3), (1, 1, 8, 8), ranks)
            model(model.scatter(torch.ones(1, 1, 8, 8))).sum().backward()
            return torch._C._is_multithreading_enabled()

    assert loopback.run(2, body) == [False, False]
    assert torch._C._is_multithreading_enabled()
