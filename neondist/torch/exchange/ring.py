"""Ring attention: keys and values travel around a ring of ranks (Liu, Zaharia and Abbeel 2023).

A rank processes the keys of one rank at a time, in chunks of columns of the scores, and keeps for each of its queries
the largest score so far and the sum of exponentials (Milakov and Gimelshein 2018). In the backward pass keys and values
travel around the ring again, with their gradients, which finally return to the owners of the keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from ...observer import EventScope
from ..ir.graph import ACCUMULATION_DTYPES, Step
from ..ir.layout import Dim, Mesh, axes_of, local_indices
from ..ir.once_differentiable import once_differentiable
from .mesh_comm import MeshComm, StagedExchange

_OPS = torch.ops.aten
MAX_SCORES_AT_ONCE = 2**20
"""Maximum number of scores computed at once, but at least the scores for 64 keys."""


class RingPlan(NamedTuple):
    """Plan of ring attention.

    Attributes
    ----------
    queries, keys : Dim
        Partition of the rows and columns of the scores, over the same axes.
    scale : float
        Factor by which scores are multiplied.
    """

    mesh: Mesh
    queries: Dim
    keys: Dim
    causal: bool
    scale: float

    def ranks(self, rank: int) -> list[int]:
        """Return the ranks of a rank's ring, including the rank itself, in the order in which blocks travel."""
        axes, place = axes_of([self.keys]), self.mesh.place(rank)
        others = [coord for axis, coord in enumerate(place) if axis not in axes]
        places = ((peer, self.mesh.place(peer)) for peer in range(self.mesh.size))
        return [r for r, at in places if [coord for axis, coord in enumerate(at) if axis not in axes] == others]


class RingChannel:
    """Messages around one ring through two alternating flat buffers, planned once."""

    def __init__(self, comm: MeshComm, step: Step) -> None:
        self.comm, self.name, self.ring = comm, step.name, step.kind_args
        rank, mesh = comm.grid.rank, comm.mesh
        self.ranks = self.ring.ranks(rank)
        self.own_position = self.ranks.index(rank)
        self.query_indices = torch.tensor(local_indices(self.ring.queries, comm.place))
        self.key_indices = [torch.tensor(local_indices(self.ring.keys, mesh.place(peer))) for peer in self.ranks]
        self.group, self.first = comm.message_group(axes_of([self.ring.keys]))
        self._planned_exchanges: dict[Any, tuple[list[torch.Tensor], list[StagedExchange]]] = {}

    def observe(self, direction: str) -> EventScope:
        """Return the context manager that reports this exchange to observers."""
        return self.comm.grid.observers.observe("redistribute", self.name, direction)

    def rotate(self, direction: str, *tensors: torch.Tensor) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Yield the owner's position and tensors for each block, this rank's first; changes to tensors are passed on.

        In the backward pass, the first half of the tensors finally returns to its owner, and is yielded again.
        """
        number, is_backward = len(self.ranks), direction == "backward"
        shapes = [(*t.shape[:-2], t.shape[-1]) for t in tensors]  # of the data of one key
        ends = [prod(shape) for shape in shapes]
        key = direction, (tensors[0].dtype, tensors[0].device), tuple(shapes)
        if key not in self._planned_exchanges:
            self._planned_exchanges = {k: kept for k, kept in self._planned_exchanges.items() if k[1] == key[1]}
            self._planned_exchanges[key] = self._plan(sum(ends), is_backward, tensors[0])
        flats, exchanges = self._planned_exchanges[key]

        def tensors_at(hop: int) -> list[torch.Tensor]:
            length = len(self.key_indices[(self.own_position - hop) % number])
            cells = flats[hop % 2][: sum(ends) * length].split([end * length for end in ends])
            return [part.view(*shape[:-1], length, shape[-1]) for part, shape in zip(cells, shapes, strict=True)]

        for part, tensor in zip(tensors_at(0), tensors, strict=True):
            part.copy_(tensor)
        for hop in range(number + is_backward):
            yield (self.own_position - hop) % number, tensors_at(hop)
            if hop < len(exchanges):
                for message in exchanges[hop].exchange.sends:
                    self.comm.record_traffic("ring", self.name, direction, self.first + message.peer, message.nbytes)
                exchanges[hop].run()

    def scores(self, q: torch.Tensor, keys: torch.Tensor, mask: Any, columns: torch.Tensor) -> torch.Tensor:
        """Return the scores of this rank's scaled queries for some columns."""
        scores, columns = q @ keys.mT, columns.to(q.device)
        if mask is not None:
            mask = mask if mask.shape[-1] == 1 else mask.index_select(-1, columns)
            scores = scores.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else scores.add_(mask)
        if self.ring.causal:
            scores.masked_fill_(self.query_indices.to(q.device)[:, None] < columns, -torch.inf)
        return scores

    def _plan(
        self, elements: int, is_backward: bool, like: torch.Tensor
    ) -> tuple[list[torch.Tensor], list[StagedExchange]]:
        """Return two buffers and the exchanges between them; `elements` is the number of elements per key."""
        count, sizes = len(self.ranks), [elements * len(columns) for columns in self.key_indices]
        flats, exchanges = [torch.empty(max(sizes), dtype=like.dtype, device=like.device) for _ in range(2)], []
        for hop in range(count - 1 + is_backward):
            outgoing, incoming = (sizes[(self.own_position - step) % count] for step in (hop, hop + 1))
            if hop == count - 1:  # only gradients return to their owner
                outgoing, incoming = outgoing // 2, incoming // 2
            ends = ((1, flats[hop % 2][:outgoing]), (-1, flats[(hop + 1) % 2][:incoming]))
            out, into = ({self.ranks[(self.own_position + by) % count]: flat} for by, flat in ends)
            exchanges.append(StagedExchange(self.comm, self.group, out, into, self.first))
        return flats, exchanges


class RingAttention(torch.autograd.Function):
    """Attention of this rank's queries to the keys of all ranks of its ring."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, channel: RingChannel
    ) -> torch.Tensor:
        """Return (..., queries, channels of v)."""
        wide, q = ACCUMULATION_DTYPES.get(q.dtype, q.dtype), q.contiguous()
        queries = q.to(wide) * channel.ring.scale
        least = torch.finfo(wide).min  # finite, so that rows without any key have no NaN
        top = queries.new_full((*q.shape[:-1], 1), least)
        total, y = torch.zeros_like(top), queries.new_zeros(*q.shape[:-1], v.shape[-1])
        fused = _uses_fused_kernel(q, v, mask, channel.ring)
        with channel.observe("forward"), torch.autocast(q.device.type, enabled=False):
            for whose, block in channel.rotate("forward", k, v):
                if not (q.numel() and block[0].numel()):
                    continue
                if fused:  # the outputs are treated as the values of a single key with scores `logs`
                    output, logs = _OPS._scaled_dot_product_flash_attention_for_cpu(q, *block, scale=channel.ring.scale)
                    parts = iter([(logs.unsqueeze(-1).clone(), output.to(wide))])
                else:
                    chunks = _iter_key_value_chunks(channel.key_indices[whose], block, queries)
                    parts = iter((channel.scores(queries, keys, mask, at), values) for at, keys, values in chunks)
                for scores, values in parts:
                    higher = torch.maximum(top, scores.amax(-1, keepdim=True))
                    scores.sub_(higher).exp_()
                    fading = (top - higher).exp_()
                    total.mul_(fading).add_(scores.sum(-1, keepdim=True))
                    y.mul_(fading).add_(scores * values if fused else scores @ values)
                    top = higher
        has_keys = total > 0
        y.div_(torch.where(has_keys, total, 1))
        ctx.save_for_backward(q, k, v, mask, y, torch.where(has_keys, top + total.log(), 0))
        ctx.channel = channel
        return y.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradients of queries, keys and values."""
        (q, k, v, mask, y, logs), channel = ctx.saved_tensors, ctx.channel
        queries, dy = q.to(y.dtype) * channel.ring.scale, gradients[0].to(y.dtype).contiguous()
        inner, dq = (dy * y).sum(-1, keepdim=True), torch.zeros_like(queries)
        fused = _uses_fused_kernel(q, v, mask, channel.ring)
        blocks = channel.rotate("backward", torch.zeros_like(k), torch.zeros_like(v), k, v)
        with channel.observe("backward"):
            for hop, (whose, (dk, dv, *block)) in enumerate(blocks):
                if hop == len(channel.ranks):
                    break
                if not (q.numel() and dk.numel()):
                    continue
                if fused:
                    args = dy.to(q.dtype), q, *block, y.to(q.dtype), logs.squeeze(-1), 0.0, False
                    parts = _OPS._scaled_dot_product_flash_attention_for_cpu_backward(*args, scale=channel.ring.scale)
                    for total, part in zip((dq, dk, dv), parts, strict=True):
                        total += part
                    continue
                start = 0
                for columns, keys, values in _iter_key_value_chunks(channel.key_indices[whose], block, queries):
                    part = slice(start, start + len(columns))
                    weights = channel.scores(queries, keys, mask, columns).sub_(logs).exp_()
                    dv[..., part, :] += (weights.mT @ dy).to(dv)
                    weights.mul_((dy @ values.mT).sub_(inner))
                    dk[..., part, :] += (weights.mT @ queries).to(dk)
                    dq.add_(weights @ keys)
                    start = part.stop
        dq = dq if fused else dq * channel.ring.scale
        return dq.to(q.dtype), dk.to(k, copy=True), dv.to(v, copy=True), None, None


def _uses_fused_kernel(q: torch.Tensor, v: torch.Tensor, mask: Any, ring: RingPlan) -> bool:
    """Return whether PyTorch's fused kernel, which returns log-sum-exps, computes the blocks."""
    available = hasattr(_OPS, "_scaled_dot_product_flash_attention_for_cpu") and q.device.type == "cpu"
    return available and q.dim() == 4 and q.shape[-1] == v.shape[-1] and mask is None and not ring.causal


def _iter_key_value_chunks(
    columns: torch.Tensor, block: Sequence[torch.Tensor], like: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    number = max(64, MAX_SCORES_AT_ONCE // max(1, prod(like.shape[:-1])))
    for start in range(0, len(columns), number):
        few = slice(start, start + number)
        keys, values = (tensor[..., few, :].to(like) for tensor in block)
        yield columns[few], keys, values
