"""Attention over cells whose keys and values travel around a ring of ranks (Liu, Zaharia and Abbeel 2023).

A rank sees the keys of one other at a time, a few columns of the scores at once, and keeps for each of its queries the
largest score so far and the sum of exponentials (Milakov and Gimelshein 2018). On the way back keys and values travel
once more, and their gradients with them, home at last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from ..observer import During
from .graph import WIDER, Step
from .layout import Dim, Mesh, axes_of, indices, local_atoms
from .mesh_comm import MeshComm, StagedExchange
from .once import once_differentiable

_OPS = torch.ops.aten
SCORES = 2**20
"""are computed at once, or those of 64 keys"""


class Ring(NamedTuple):
    """Plan of ring attention; pure.

    Attributes
    ----------
    mesh : Mesh
    queries, keys : Dim
        How rows and columns of the scores are cut: by the same axes.
    causal : bool
    scale : float
        Of the scores.
    """

    mesh: Mesh
    queries: Dim
    keys: Dim
    causal: bool
    scale: float

    def ranks(self, rank: int) -> list[int]:
        """Return a rank's ring, itself included, in the order in which blocks travel."""
        axes, place = axes_of([self.keys]), self.mesh.place(rank)
        others = [one for axis, one in enumerate(place) if axis not in axes]
        places = ((one, self.mesh.place(one)) for one in range(self.mesh.size))
        return [r for r, at in places if [one for axis, one in enumerate(at) if axis not in axes] == others]

    def sent(self, rank: int, direction: str) -> int:
        """Return of how many keys a rank sends what a pass needs of them: keys and values, or the gradients of both."""
        ring = self.ranks(rank)
        length = {one: prod(local_atoms(self.keys, self.mesh.place(one))) for one in ring}
        every, following = sum(length.values()), length[ring[(ring.index(rank) + 1) % len(ring)]]
        return every - following if direction == "forward" else 2 * every - following


class RingChannel:
    """The messages around one ring, planned once, through two flat buffers of this rank that take turns."""

    def __init__(self, wires: MeshComm, step: Step) -> None:
        self.wires, self.name, self.ring = wires, step.name, step.key
        rank, mesh = wires.grid.rank, wires.mesh
        self.ranks = self.ring.ranks(rank)
        self.at = self.ranks.index(rank)
        self.rows = torch.tensor(indices(self.ring.queries, wires.place))
        self.columns = [torch.tensor(indices(self.ring.keys, mesh.place(one))) for one in self.ranks]
        self.group, self.first = wires.group_of(axes_of([self.ring.keys]))
        self._planned: dict[Any, tuple[list[torch.Tensor], list[StagedExchange]]] = {}

    def during(self, direction: str) -> During:
        """Return a block that observers are told of."""
        return self.wires.grid.observers.during("redistribute", self.name, direction)

    def rotate(self, direction: str, *tensors: torch.Tensor) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Yield whose keys are here, and their tensors, this rank's first; what is written into them travels with them.

        Backward, the first half of the tensors comes home at last, and is yielded once more.
        """
        number, back = len(self.ranks), direction == "backward"
        shapes = [(*t.shape[:-2], t.shape[-1]) for t in tensors]  # of what there is for each key
        ends = [prod(shape) for shape in shapes]
        key = direction, (tensors[0].dtype, tensors[0].device), tuple(shapes)
        if key not in self._planned:
            self._planned = {of: kept for of, kept in self._planned.items() if of[1] == key[1]}
            self._planned[key] = self._plan(sum(ends), back, tensors[0])
        flats, exchanges = self._planned[key]

        def parts(hop: int) -> list[torch.Tensor]:
            length = len(self.columns[(self.at - hop) % number])
            cells = flats[hop % 2][: sum(ends) * length].split([end * length for end in ends])
            return [part.view(*shape[:-1], length, shape[-1]) for part, shape in zip(cells, shapes, strict=True)]

        for part, tensor in zip(parts(0), tensors, strict=True):
            part.copy_(tensor)
        for hop in range(number + back):
            yield (self.at - hop) % number, parts(hop)
            if hop < len(exchanges):
                for message in exchanges[hop].exchange.sends:
                    self.wires.record("ring", self.name, direction, self.first + message.peer, message.nbytes)
                exchanges[hop].run()

    def scores(self, q: torch.Tensor, keys: torch.Tensor, mask: Any, columns: torch.Tensor) -> torch.Tensor:
        """Return those of this rank's queries, which are scaled, and some columns."""
        found, columns = q @ keys.mT, columns.to(q.device)
        if mask is not None:
            mask = mask if mask.shape[-1] == 1 else mask.index_select(-1, columns)
            found = found.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else found.add_(mask)
        if self.ring.causal:
            found.masked_fill_(self.rows.to(q.device)[:, None] < columns, -torch.inf)
        return found

    def _plan(self, numbers: int, back: bool, like: torch.Tensor) -> tuple[list[torch.Tensor], list[StagedExchange]]:
        """Return two buffers and the exchanges between them, given how many numbers there are for each key."""
        count, sizes = len(self.ranks), [numbers * len(columns) for columns in self.columns]
        flats, exchanges = [torch.empty(max(sizes), dtype=like.dtype, device=like.device) for _ in range(2)], []
        for hop in range(count - 1 + back):
            leaving, arriving = (sizes[(self.at - one) % count] for one in (hop, hop + 1))
            if hop == count - 1:  # gradients come home alone
                leaving, arriving = leaving // 2, arriving // 2
            ends = ((1, flats[hop % 2][:leaving]), (-1, flats[(hop + 1) % 2][:arriving]))
            out, into = ({self.ranks[(self.at + by) % count]: flat} for by, flat in ends)
            exchanges.append(self.wires.parcels(self.group, out, into, self.first))
        return flats, exchanges


class Around(torch.autograd.Function):
    """Attention of this rank's queries to the keys of all ranks of its ring."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, channel: RingChannel
    ) -> torch.Tensor:
        """Return (..., queries, channels of v)."""
        wide, q = WIDER.get(q.dtype, q.dtype), q.contiguous()
        queries = q.to(wide) * channel.ring.scale
        least = torch.finfo(wide).min  # finite, so that rows without any key have no NaN
        top = queries.new_full((*q.shape[:-1], 1), least)
        total, y = torch.zeros_like(top), queries.new_zeros(*q.shape[:-1], v.shape[-1])
        fused = _is_fused(q, v, mask, channel.ring)
        with channel.during("forward"), torch.autocast(q.device.type, enabled=False):
            for whose, block in channel.rotate("forward", k, v):
                if not (q.numel() and block[0].numel()):
                    continue
                if fused:  # found, as if it were the value of a single key, of score logs
                    found, logs = _OPS._scaled_dot_product_flash_attention_for_cpu(q, *block, scale=channel.ring.scale)
                    parts = iter([(logs.unsqueeze(-1).clone(), found.to(wide))])
                else:
                    several = _few(channel.columns[whose], block, queries)
                    parts = iter((channel.scores(queries, keys, mask, at), values) for at, keys, values in several)
                for scores, values in parts:
                    higher = torch.maximum(top, scores.amax(-1, keepdim=True))
                    scores.sub_(higher).exp_()
                    fading = (top - higher).exp_()
                    total.mul_(fading).add_(scores.sum(-1, keepdim=True))
                    y.mul_(fading).add_(scores * values if fused else scores @ values)
                    top = higher
        seen = total > 0
        y.div_(torch.where(seen, total, 1))
        ctx.save_for_backward(q, k, v, mask, y, torch.where(seen, top + total.log(), 0))
        ctx.channel = channel
        return y.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradients of queries, keys and values."""
        (q, k, v, mask, y, logs), channel = ctx.saved_tensors, ctx.channel
        queries, dy = q.to(y.dtype) * channel.ring.scale, gradients[0].to(y.dtype).contiguous()
        inner, dq = (dy * y).sum(-1, keepdim=True), torch.zeros_like(queries)
        fused = _is_fused(q, v, mask, channel.ring)
        blocks = channel.rotate("backward", torch.zeros_like(k), torch.zeros_like(v), k, v)
        with channel.during("backward"):
            for hop, (whose, (dk, dv, *block)) in enumerate(blocks):
                if hop == len(channel.ranks):
                    break
                if not (q.numel() and dk.numel()):
                    continue
                if fused:
                    given = dy.to(q.dtype), q, *block, y.to(q.dtype), logs.squeeze(-1), 0.0, False
                    found = _OPS._scaled_dot_product_flash_attention_for_cpu_backward(*given, scale=channel.ring.scale)
                    for total, part in zip((dq, dk, dv), found, strict=True):
                        total += part
                    continue
                start = 0
                for columns, keys, values in _few(channel.columns[whose], block, queries):
                    part = slice(start, start + len(columns))
                    weights = channel.scores(queries, keys, mask, columns).sub_(logs).exp_()
                    dv[..., part, :] += (weights.mT @ dy).to(dv)
                    weights.mul_((dy @ values.mT).sub_(inner))
                    dk[..., part, :] += (weights.mT @ queries).to(dk)
                    dq.add_(weights @ keys)
                    start = part.stop
        dq = dq if fused else dq * channel.ring.scale
        return dq.to(q.dtype), dk.to(k, copy=True), dv.to(v, copy=True), None, None


def _is_fused(q: torch.Tensor, v: torch.Tensor, mask: Any, ring: Ring) -> bool:
    """Return whether PyTorch's fused kernel computes the blocks, which says the logarithms of their sums."""
    there = hasattr(_OPS, "_scaled_dot_product_flash_attention_for_cpu") and q.device.type == "cpu"
    return there and q.dim() == 4 and q.shape[-1] == v.shape[-1] and mask is None and not ring.causal


def _few(
    columns: torch.Tensor, block: Sequence[torch.Tensor], like: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield a few columns at a time, with their keys and values."""
    number = max(64, SCORES // max(1, prod(like.shape[:-1])))
    for start in range(0, len(columns), number):
        few = slice(start, start + number)
        keys, values = (tensor[..., few, :].to(like) for tensor in block)
        yield columns[few], keys, values
