"""Message order of distributed modules: NCCL has no tags, so messages must match in order; gloo does not require that.

Each rank runs its batches of messages one after another, and each batch completes when all its messages have.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch_runs import share_captures

import neondist as nd
import neondist.torch as ndt
from neondist.torch.exchange.transport import MESSAGES, TorchTransport, world

SENT, RECEIVED, SUM = "sent to", "received from", "sum over all"
PROGRAMS = {}  # captured programs, shared by all cases


class Net(nn.Module):
    """Network with every kind of communication: windows, norms, index maps, attention, a vector output."""

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


def record_batches(monkeypatch):
    """Record the batches of tensors that this rank posts, as lists of (kind, world rank, bytes)."""
    log, active_sums = [], []
    post, reduce_tensor = TorchTransport.post, TorchTransport._allreduce_tensor
    reduce_all = torch.distributed.all_reduce

    def recording_post(self, sends, receives, kind):
        sends, receives = list(sends), list(receives)
        if kind == MESSAGES or active_sums:
            log.append(
                [
                    (kind, self._ranks[peer], data.numel())
                    for kind, messages in ((SENT, sends), (RECEIVED, receives))
                    for peer, data in messages
                    if data.numel()
                ]
            )
        return post(self, sends, receives, kind)

    def recording_reduce(self, tensor, op):
        active_sums.append(self)
        reduce_tensor(self, tensor, op)
        active_sums.pop()

    def recording_all_reduce(tensor, *args, **kwargs):
        if active_sums:
            log.append([(SUM, None, tensor.nbytes)])
        return reduce_all(tensor, *args, **kwargs)

    monkeypatch.setattr(TorchTransport, "post", recording_post)
    monkeypatch.setattr(TorchTransport, "_allreduce_tensor", recording_reduce)
    monkeypatch.setattr(torch.distributed, "all_reduce", recording_all_reduce)
    return log


def run_in_order(logs):
    """Run the batches of all ranks, or fail with those that deadlock."""
    queues = [list(log) for log in logs]
    pending = [[] for _ in logs]  # pending messages of each rank's current batch
    while any(queues) or any(pending):
        started = [rank for rank, queue in enumerate(queues) if queue and not pending[rank]]
        for rank in started:
            pending[rank] = list(queues[rank].pop(0))
        completed = [
            (rank, operation)
            for rank, operations in enumerate(pending)
            for operation in tuple(operations)
            if complete(pending, rank, operation)
        ]
        assert started or completed, f"deadlock: {pending}"


def complete(pending, rank, operation):
    """Complete a send or a sum if its counterparts are pending on the other ranks; return whether it was completed."""
    kind, peer, size = operation
    if kind == SUM:
        if not all(operation in operations for operations in pending):
            return False
        for operations in pending:
            operations.remove(operation)
        return True
    receives = [receive for receive in pending[peer] if receive[:2] == (RECEIVED, rank)] if kind == SENT else []
    if receives:
        assert receives[0][2] == size, f"rank {rank} sends {size} bytes to {peer}, which expects {receives[0][2]}"
        pending[peer].remove(receives[0])
        pending[rank].remove(operation)
    return bool(receives)


@pytest.mark.parametrize(
    "options",
    [{}, {"recompute": True}, {"scheme": "deep_halo(layers=3)"}, {"strips": 2}, {"gather_at": ["down"]}],
    ids=str,
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_batches_of_messages_match_without_tags(options, replicas, monkeypatch):
    if world().size % replicas:
        return
    torch.manual_seed(0)
    module, image = Net(), torch.randn(2, 2, 13, 11, requires_grad=True)
    with nd.ProcessGrid(world(), replicas=replicas) as grid, share_captures(PROGRAMS):
        model = ndt.distribute(module, image.shape, grid, **options)
        log = record_batches(monkeypatch)
        for _ in range(2):
            loss = model.loss(F.cross_entropy, model(model.scatter(image)), model.scatter_target(torch.tensor([0, 2])))
            loss.backward()
        logs = world().allgather(list(log))
    assert world().size == 1 or all(logs)
    run_in_order(logs)


def test_deadlocks_are_detected():
    send, receive = (SENT, 1, 8), (RECEIVED, 1, 8)
    peer_operations = (RECEIVED, 0, 8), (SENT, 0, 8)
    run_in_order([[[send, receive]], [[*peer_operations]]])
    run_in_order([[[send], [receive]], [[peer_operations[0]], [peer_operations[1]]]])
    with pytest.raises(AssertionError, match="deadlock"):
        run_in_order([[[send], [receive]], [[peer_operations[1]], [peer_operations[0]]]])
    with pytest.raises(AssertionError, match="deadlock"):
        run_in_order([[[(SUM, None, 4)]], []])
    with pytest.raises(AssertionError, match="which expects 4"):
        run_in_order([[[send]], [[(RECEIVED, 0, 4)]]])
