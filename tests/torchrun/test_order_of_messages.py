"""Order of the messages of modules, which NCCL requires and gloo does not: there are no tags.

Batches of messages go one after the other on each rank, match the other's in their order, and wait for all in them.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch_runs import captured_once

import neondist as nd
import neondist.torch as ndt
from neondist.torch.exchange.transport import MESSAGES, TorchTransport, world

SENT, RECEIVED, SUM = "sent to", "received from", "sum over all"
PROGRAMS = {}  # what torch.export finds, for all cases


class Net(nn.Module):
    """Something of all that crosses ranks: windows, norms, index maps, attention, a vector."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.down, self.last = nn.Conv2d(4, 4, 4, 2, 1), nn.Linear(4 * 6 * 5, 3)

    def forward(self, x):
        x = F.dropout(F.relu(self.norm(self.first(F.pad(x, (1, 1, 1, 1), "circular")))), 0.1)
        x = self.down(self.first(x[:, :2].flip(2)) + x.mean((2, 3), keepdim=True))
        cells = x.flatten(2).mT
        x = x + F.scaled_dot_product_attention(cells, cells, cells).mT.reshape(x.shape)
        return self.last(F.interpolate(x, (6, 5), mode="bilinear").flatten(1))


def batches(monkeypatch):
    """Return a list that grows by the batches of tensors that this rank posts: (kind, rank of the world, bytes)."""
    log, summing = [], []
    post, reduce_tensor = TorchTransport.post, TorchTransport._allreduce_tensor
    reduce_all = torch.distributed.all_reduce

    def posted(self, sends, receives, kind):
        sends, receives = list(sends), list(receives)
        if kind == MESSAGES or summing:
            log.append(
                [
                    (kind, self._ranks[peer], data.numel())
                    for kind, letters in ((SENT, sends), (RECEIVED, receives))
                    for peer, data in letters
                    if data.numel()
                ]
            )
        return post(self, sends, receives, kind)

    def summed(self, tensor, op):
        summing.append(self)
        reduce_tensor(self, tensor, op)
        summing.pop()

    def added(tensor, *about, **more):
        if summing:
            log.append([(SUM, None, tensor.nbytes)])
        return reduce_all(tensor, *about, **more)

    monkeypatch.setattr(TorchTransport, "post", posted)
    monkeypatch.setattr(TorchTransport, "_allreduce_tensor", summed)
    monkeypatch.setattr(torch.distributed, "all_reduce", added)
    return log


def run_as_nccl_does(logs):
    """Run the ranks' batches, or say which wait for each other."""
    waiting = [list(log) for log in logs]
    left = [[] for _ in logs]  # of the batch at work on each rank
    while any(waiting) or any(left):
        begun = [rank for rank, batches in enumerate(waiting) if batches and not left[rank]]
        for rank in begun:
            left[rank] = list(waiting[rank].pop(0))
        met = [(rank, end) for rank, ends in enumerate(left) for end in tuple(ends) if meets(left, rank, end)]
        assert begun or met, f"all wait: {left}"


def meets(left, rank, end):
    """Let what a rank sends, or a sum, come to its end, if that is at work on the others, too."""
    kind, peer, size = end
    if kind == SUM:
        if not all(end in ends for ends in left):
            return False
        for ends in left:
            ends.remove(end)
        return True
    arriving = [there for there in left[peer] if there[:2] == (RECEIVED, rank)] if kind == SENT else []
    if arriving:
        assert arriving[0][2] == size, f"rank {rank} sends {size} bytes to {peer}, which expects {arriving[0][2]}"
        left[peer].remove(arriving[0])
        left[rank].remove(end)
    return bool(arriving)


@pytest.mark.parametrize(
    "how", [{}, {"recompute": True}, {"scheme": "deep_halo(layers=3)"}, {"strips": 2}, {"gather_at": ["down"]}], ids=str
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_batches_of_messages_match_without_tags(how, replicas, monkeypatch):
    if world().size % replicas:
        return
    torch.manual_seed(0)
    module, image = Net(), torch.randn(2, 2, 13, 11, requires_grad=True)
    with nd.ProcessGrid(world(), replicas=replicas) as grid, captured_once(PROGRAMS):
        model = ndt.distribute(module, image.shape, grid, **how)
        log = batches(monkeypatch)
        for _ in range(2):
            loss = model.loss(F.cross_entropy, model(model.scatter(image)), model.scatter_target(torch.tensor([0, 2])))
            loss.backward()
        logs = world().allgather(list(log))
    assert world().size == 1 or all(logs)
    run_as_nccl_does(logs)


def test_what_would_wait_is_found():
    out, back = (SENT, 1, 8), (RECEIVED, 1, 8)
    other = (RECEIVED, 0, 8), (SENT, 0, 8)
    run_as_nccl_does([[[out, back]], [[*other]]])
    run_as_nccl_does([[[out], [back]], [[other[0]], [other[1]]]])
    with pytest.raises(AssertionError, match="all wait"):
        run_as_nccl_does([[[out], [back]], [[other[1]], [other[0]]]])
    with pytest.raises(AssertionError, match="all wait"):
        run_as_nccl_does([[[(SUM, None, 4)]], []])
    with pytest.raises(AssertionError, match="which expects 4"):
        run_as_nccl_does([[[out]], [[(RECEIVED, 0, 4)]]])
