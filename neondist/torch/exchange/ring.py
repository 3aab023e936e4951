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
"""Maximum number of scores computed at once, unless the scores for 64 keys are more."""


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
        axes = axes_of([self.keys])

        def other_coordinates(peer: int) -> list[int]:
            return [coord for axis, coord in enumerate(self.mesh.place(peer)) if axis not in axes]

        shared_coordinates = other_coordinates(rank)
        return [peer for peer in range(self.mesh.size) if other_coordinates(peer) == shared_coordinates]


class RingChannel:
    """Messages around one ring through two alternating flat buffers, planned once."""

    def __init__(self, comm: MeshComm, step: Step) -> None:
        self.comm, self.name, self.ring = comm, step.name, step.kind_args
        mesh = comm.mesh
        rank = comm.grid.rank
        self.ranks = self.ring.ranks(rank)
        self.own_position = self.ranks.index(rank)
        self.query_indices = torch.tensor(local_indices(self.ring.queries, comm.place))
        self.key_indices = [torch.tensor(local_indices(self.ring.keys, mesh.place(peer))) for peer in self.ranks]
        self.group, self.first_rank = comm.message_group(axes_of([self.ring.keys]))
        self._planned_exchanges: dict[Any, tuple[list[torch.Tensor], list[StagedExchange]]] = {}

    def observe(self, direction: str) -> EventScope:
        """Return the context manager that reports this exchange to observers."""
        return self.comm.grid.observers.observe("redistribute", self.name, direction)

    def rotate(self, direction: str, *tensors: torch.Tensor) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Yield the owner's position and tensors for each block, this rank's first; changes to tensors are passed on.

        In the backward pass, the first half of the tensors finally returns to its owner, and is yielded again.
        """
        ring_size = len(self.ranks)
        is_backward = direction == "backward"
        shapes = [(*t.shape[:-2], t.shape[-1]) for t in tensors]  # of the data of one key
        elements_per_key = [prod(shape) for shape in shapes]
        key = direction, (tensors[0].dtype, tensors[0].device), tuple(shapes)
        if key not in self._planned_exchanges:
            self._planned_exchanges = {k: kept for k, kept in self._planned_exchanges.items() if k[1] == key[1]}
            self._planned_exchanges[key] = self._plan_exchanges(sum(elements_per_key), is_backward, tensors[0])
        flats, exchanges = self._planned_exchanges[key]

        def tensors_at(hop: int) -> list[torch.Tensor]:
            num_keys = len(self.key_indices[(self.own_position - hop) % ring_size])
            sizes = [n * num_keys for n in elements_per_key]
            flat_parts = flats[hop % 2][: sum(sizes)].split(sizes)
            return [part.view(*shape[:-1], num_keys, shape[-1]) for part, shape in zip(flat_parts, shapes, strict=True)]

        for part, tensor in zip(tensors_at(0), tensors, strict=True):
            part.copy_(tensor)
        for hop in range(ring_size + is_backward):
            yield (self.own_position - hop) % ring_size, tensors_at(hop)
            if hop < len(exchanges):
                for message in exchanges[hop].exchange.sends:
                    peer = self.first_rank + message.peer
                    self.comm.record_traffic("ring", self.name, direction, peer, message.nbytes)
                exchanges[hop].run()

    def compute_scores(self, q: torch.Tensor, keys: torch.Tensor, mask: Any, columns: torch.Tensor) -> torch.Tensor:
        """Return the scores of this rank's scaled queries for some columns."""
        scores = q @ keys.mT
        columns = columns.to(q.device)
        if mask is not None:
            mask = mask if mask.shape[-1] == 1 else mask.index_select(-1, columns)
            scores = scores.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else scores.add_(mask)
        if self.ring.causal:
            scores.masked_fill_(self.query_indices.to(q.device)[:, None] < columns, -torch.inf)
        return scores

    def _plan_exchanges(
        self, elements_per_key: int, is_backward: bool, like: torch.Tensor
    ) -> tuple[list[torch.Tensor], list[StagedExchange]]:
        """Return two buffers and the exchanges between them."""
        ring_size = len(self.ranks)
        block_sizes = [elements_per_key * len(columns) for columns in self.key_indices]
        flats, exchanges = [torch.empty(max(block_sizes), dtype=like.dtype, device=like.device) for _ in range(2)], []
        next_rank = self.ranks[(self.own_position + 1) % ring_size]
        previous_rank = self.ranks[self.own_position - 1]
        for hop in range(ring_size - 1 + is_backward):
            outgoing_size = block_sizes[(self.own_position - hop) % ring_size]
            incoming_size = block_sizes[(self.own_position - hop - 1) % ring_size]
            if hop == ring_size - 1:  # only gradients return to their owner
                outgoing_size, incoming_size = outgoing_size // 2, incoming_size // 2
            outgoing = {next_rank: flats[hop % 2][:outgoing_size]}
            incoming = {previous_rank: flats[(hop + 1) % 2][:incoming_size]}
            exchanges.append(StagedExchange(self.comm, self.group, outgoing, incoming, self.first_rank))
        return flats, exchanges


class RingAttention(torch.autograd.Function):
    """Attention of this rank's queries to the keys of all ranks of its ring."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, channel: RingChannel
    ) -> torch.Tensor:
        """Return (..., queries, channels of v)."""
        wide_dtype = ACCUMULATION_DTYPES.get(q.dtype, q.dtype)
        q = q.contiguous()
        queries = q.to(wide_dtype) * channel.ring.scale
        min_score = torch.finfo(wide_dtype).min  # finite, so that rows without any key have no NaN
        max_scores = queries.new_full((*q.shape[:-1], 1), min_score)
        exp_sums = torch.zeros_like(max_scores)
        y = queries.new_zeros(*q.shape[:-1], v.shape[-1])
        is_fused = _uses_fused_kernel(q, v, mask, channel.ring)
        with channel.observe("forward"), torch.autocast(q.device.type, enabled=False):
            for position, block in channel.rotate("forward", k, v):
                if not (q.numel() and block[0].numel()):
                    continue
                if is_fused:  # the outputs are treated as the values of a single key with scores `log_sums`
                    output, log_sums = _OPS._scaled_dot_product_flash_attention_for_cpu(
                        q, *block, scale=channel.ring.scale
                    )
                    scores_and_values = iter([(log_sums.unsqueeze(-1).clone(), output.to(wide_dtype))])
                else:
                    chunks = _iter_key_value_chunks(channel.key_indices[position], block, queries)
                    scores_and_values = iter(
                        (channel.compute_scores(queries, keys, mask, at), values) for at, keys, values in chunks
                    )
                for scores, values in scores_and_values:
                    new_max_scores = torch.maximum(max_scores, scores.amax(-1, keepdim=True))
                    scores.sub_(new_max_scores).exp_()
                    rescaling = (max_scores - new_max_scores).exp_()
                    exp_sums.mul_(rescaling).add_(scores.sum(-1, keepdim=True))
                    y.mul_(rescaling).add_(scores * values if is_fused else scores @ values)
                    max_scores = new_max_scores
        has_keys = exp_sums > 0
        y.div_(torch.where(has_keys, exp_sums, 1))
        ctx.save_for_backward(q, k, v, mask, y, torch.where(has_keys, max_scores + exp_sums.log(), 0))
        ctx.channel = channel
        return y.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradients of queries, keys and values."""
        q, k, v, mask, y, log_sums = ctx.saved_tensors
        channel = ctx.channel
        queries = q.to(y.dtype) * channel.ring.scale
        dy = gradients[0].to(y.dtype).contiguous()
        dy_dot_y = (dy * y).sum(-1, keepdim=True)
        dq = torch.zeros_like(queries)
        is_fused = _uses_fused_kernel(q, v, mask, channel.ring)
        blocks = channel.rotate("backward", torch.zeros_like(k), torch.zeros_like(v), k, v)
        with channel.observe("backward"):
            for hop, (position, (dk, dv, *block)) in enumerate(blocks):
                if hop == len(channel.ranks):
                    break
                if not (q.numel() and dk.numel()):
                    continue
                if is_fused:
                    args = dy.to(q.dtype), q, *block, y.to(q.dtype), log_sums.squeeze(-1), 0.0, False
                    block_gradients = _OPS._scaled_dot_product_flash_attention_for_cpu_backward(
                        *args, scale=channel.ring.scale
                    )
                    for total, part in zip((dq, dk, dv), block_gradients, strict=True):
                        total += part
                    continue
                start = 0
                for columns, keys, values in _iter_key_value_chunks(channel.key_indices[position], block, queries):
                    key_slice = slice(start, start + len(columns))
                    weights = channel.compute_scores(queries, keys, mask, columns).sub_(log_sums).exp_()
                    dv[..., key_slice, :] += (weights.mT @ dy).to(dv)
                    weights.mul_((dy @ values.mT).sub_(dy_dot_y))
                    dk[..., key_slice, :] += (weights.mT @ queries).to(dk)
                    dq.add_(weights @ keys)
                    start = key_slice.stop
        dq = dq if is_fused else dq * channel.ring.scale
        return dq.to(q.dtype), dk.to(k, copy=True), dv.to(v, copy=True), None, None


def _uses_fused_kernel(q: torch.Tensor, v: torch.Tensor, mask: Any, ring: RingPlan) -> bool:
    """Return whether PyTorch's fused kernel, which returns log-sum-exps, computes the blocks."""
    is_available = hasattr(_OPS, "_scaled_dot_product_flash_attention_for_cpu") and q.device.type == "cpu"
    return is_available and q.dim() == 4 and q.shape[-1] == v.shape[-1] and mask is None and not ring.causal


def _iter_key_value_chunks(
    columns: torch.Tensor, block: Sequence[torch.Tensor], like: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    chunk_size = max(64, MAX_SCORES_AT_ONCE // max(1, prod(like.shape[:-1])))
    for start in range(0, len(columns), chunk_size):
        chunk = slice(start, start + chunk_size)
        keys, values = (tensor[..., chunk, :].to(like) for tensor in block)
        yield columns[chunk], keys, values
