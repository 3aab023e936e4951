"""Block-wise computation of a trunk, or of strips, recomputed in the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch

from ..comm import ProcessGrid
from ..geometry import split
from .functions import Moments
from .graph import has_gradients
from .in_blocks import Ranged, Traced, part_of_block
from .layout import Shape
from .mesh_comm import MeshComm
from .once import once_differentiable
from .plan import TorchPlan
from .run import Runner
from .transfer import Range


class _Block(NamedTuple):
    number: int
    runner: Runner
    sources: Ranged
    own: Ranged


class Blocks:
    """Computation of a rank's blocks of a group of steps.

    Parameters
    ----------
    here : for each output, the range along each dimension that this rank has
    parts : tuple of int
        Into how many those are cut, by axes of the mesh.
    first : for each input, the first index along each dimension that is given
    """

    def __init__(self, traced: Traced, here: Ranged, parts: Sequence[int], first: Sequence[Sequence[int]]) -> None:
        self.traced, self.here, self.parts, self.first = traced, here, parts, first
        self.names = *traced.parameters, *traced.buffers
        self.wires = MeshComm(ProcessGrid.serial(), len(traced.shape) - 2)

    def __call__(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return this rank's tiles of the outputs, given what they need of the inputs, parameters and buffers."""
        found: tuple[torch.Tensor, ...] = _Blocked.apply(self, *given)
        return found

    def extents(self) -> list[int]:
        """Return how many indices this rank has at most along each axis of the mesh."""
        found = [1] * len(self.parts)
        for here, out in zip(self.here, self.traced.outputs, strict=True):
            for (lo, hi), (atom,) in zip(here, out.layout, strict=True):
                if atom.axis is not None:
                    found[atom.axis] = max(found[atom.axis], hi - lo)
        return found

    def plan(self, place: Sequence[int]) -> tuple[TorchPlan, Ranged]:
        """Return what computes one block, and what that is of the outputs."""
        own = tuple(
            tuple(
                _part_of(lo, hi, self.parts, place, atom.axis)
                for (lo, hi), (atom,) in zip(here, out.layout, strict=True)
            )
            for here, out in zip(self.here, self.traced.outputs, strict=True)
        )
        return self.traced.plan(at_least_one(own, self.here)), own

    @cached_property
    def blocks(self) -> list[_Block]:
        """All that have anything."""
        found: list[_Block] = []
        for place in product(*map(range, self.parts)):
            plan, own = self.plan(place)
            if any(all(lo < hi for lo, hi in ranges) for ranges in own):
                sources = self.traced.sources(at_least_one(own, self.here))
                found.append(_Block(len(found), Runner(self.wires, plan), sources, own))
        return found

    def run(self, block: _Block, *given: torch.Tensor) -> list[torch.Tensor]:
        """Return a block of each output, given what it needs of the inputs, parameters and buffers."""
        number, plan = len(self.first), block.runner.plan
        tensors = dict(zip(self.names, given[number:], strict=True))
        found = block.runner(given[:number], tensors, tensors)
        return [
            part_of_block(y, plan.values[out].layout, ranges)
            for y, out, ranges in zip(found, plan.outputs, block.own, strict=True)
        ]

    def empty(self, like: torch.Tensor) -> list[torch.Tensor]:
        """Return memory for what all blocks give."""
        outputs = zip(self.here, self.traced.outputs, strict=True)
        return [like.new_empty([hi - lo for lo, hi in here], dtype=out.dtype) for here, out in outputs]

    def views(self, block: _Block, given: Sequence[Any]) -> list[Any]:
        """Return what a block needs of the inputs, and all else that is given."""
        inputs = [
            None if tensor is None else _narrowed(tensor, ranges, first)
            for tensor, ranges, first in zip(given[: len(self.first)], block.sources, self.first, strict=True)
        ]
        return [*inputs, *given[len(self.first) :]]

    def own(self, block: _Block, tiles: Sequence[Any]) -> list[Any]:
        """Return a block's parts of tiles of the outputs."""
        return [
            None
            if tile is None
            else tile[tuple(slice(lo - a, hi - a) for (lo, hi), (a, _) in zip(own, here, strict=True))]
            for tile, own, here in zip(tiles, block.own, self.here, strict=True)
        ]


class Sums(Blocks):
    """Means of groups, and sums of squares about them, for each block of the input of a norm.

    (blocks, 2, N, groups), zeros for other samples, or (blocks, 2, 1, C).
    """

    def __init__(self, moments: Moments, *about: Any) -> None:
        super().__init__(*about)
        self.groups = moments.groups

    def total(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the sum over all blocks, given what `run` gives."""
        return (rows[:, 0] * self._counts(rows)).sum(0).view(-1)

    def squares(self, rows: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        """Return the sum of squares about a mean."""
        apart = rows[:, 0] - mean.view(rows.shape[2:])
        return (rows[:, 1] + apart**2 * self._counts(rows)).sum(0).view(-1)

    def _counts(self, rows: torch.Tensor) -> torch.Tensor:
        """Return over how many numbers they are taken."""
        found = rows.new_zeros(len(rows), *rows.shape[2:])
        for block in self.blocks:
            samples, channels, *cells = (hi - lo for lo, hi in block.own[0])
            number = prod(cells) * (samples if self.groups is None else channels // self.groups)
            self.own(block, [found])[0].fill_(number)
        return found

    def run(self, block: _Block, *given: torch.Tensor) -> list[torch.Tensor]:
        """Return them of one block."""
        (y,) = super().run(block, *given)
        y = y.transpose(0, 1).flatten(1)[None] if self.groups is None else y.reshape(len(y), self.groups, -1)
        variance, mean = torch.var_mean(y, -1, correction=0)
        return [torch.stack([mean, variance * y.shape[-1]])]

    def empty(self, like: torch.Tensor) -> list[torch.Tensor]:
        """Return memory for those of all blocks."""
        return [like.new_zeros(self.shape, dtype=self.traced.outputs[0].dtype)]

    @property
    def shape(self) -> Shape:
        """Shape of all blocks together."""
        samples, channels, *_ = self.traced.outputs[0].shape
        return prod(self.parts), 2, *((1, channels) if self.groups is None else (samples, self.groups))

    def own(self, block: _Block, tiles: Sequence[Any]) -> list[Any]:
        """Return those of one block."""
        samples = slice(None) if self.groups is None else slice(*block.own[0][0])
        return [None if tile is None else tile[block.number][..., samples, :] for tile in tiles]


class _Blocked(torch.autograd.Function):
    """Tiles of the outputs; each block is computed again on the way back."""

    @staticmethod
    def forward(ctx: Any, blocks: Blocks, *given: torch.Tensor) -> Any:
        ctx.blocks, ctx.cast = blocks, (torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu"))
        ctx.save_for_backward(*given)
        tiles = blocks.empty(given[0])
        for block in blocks.blocks:
            for part, y in zip(blocks.own(block, tiles), blocks.run(block, *blocks.views(block, given)), strict=True):
                part.copy_(y)
        ctx.mark_non_differentiable(*(tile for tile in tiles if not has_gradients(tile.dtype)))
        return tuple(tiles)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Any) -> Any:
        blocks, needed, given = ctx.blocks, ctx.needs_input_grad[1:], ctx.saved_tensors
        sums = [torch.zeros_like(t) if need else None for t, need in zip(given, needed, strict=True)]
        for block in blocks.blocks:
            tensors = blocks.views(block, given)
            leaves = [t.detach().requires_grad_(need) for t, need in zip(tensors, needed, strict=True)]
            with torch.enable_grad(), torch.autocast("cpu", *ctx.cast):
                found = zip(blocks.run(block, *leaves), blocks.own(block, dys), strict=True)
            pairs = [(y, dy.to(y.dtype)) for y, dy in found if y.requires_grad and dy is not None]
            if not pairs:
                continue
            ys, gradients = [y for y, _ in pairs], [dy for _, dy in pairs]
            ends = [leaf for leaf in leaves if leaf.requires_grad]
            into = [total for total in blocks.views(block, sums) if total is not None]
            for total, grad in zip(into, torch.autograd.grad(ys, ends, gradients, allow_unused=True), strict=True):
                if grad is not None:
                    total.add_(grad)
        return None, *sums


def _narrowed(tensor: torch.Tensor, ranges: Sequence[Range], first: Sequence[int]) -> torch.Tensor:
    """Return ranges of what begins at the first indices."""
    for dim, ((lo, hi), start) in enumerate(zip(ranges, first, strict=True)):
        tensor = tensor.narrow(dim, lo - start if lo < hi else 0, hi - lo)
    return tensor


def at_least_one(own: Ranged, here: Ranged) -> Ranged:
    """Return the ranges, and one index where there is none: operators need not know what is empty."""
    return tuple(
        tuple(
            (lo, hi) if lo < hi else (max(0, min(lo, end - 1)), max(1, min(lo + 1, end))) for (lo, hi), (_, end) in both
        )
        for both in (zip(a, b, strict=True) for a, b in zip(own, here, strict=True))
    )


def _part_of(lo: int, hi: int, parts: Sequence[int], place: Sequence[int], axis: int | None) -> Range:
    if axis is None:
        return lo, hi
    a, b = split(hi - lo, parts[axis], place[axis])
    return lo + a, lo + b
