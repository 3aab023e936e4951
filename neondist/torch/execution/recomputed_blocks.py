"""Block-wise computation of a trunk or of strips; blocks are recomputed in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch

from ...comm import ProcessGrid
from ...geometry import Range, part_range
from ..exchange.mesh_comm import MeshComm
from ..exchange.normalisation import MomentsSpec
from ..ir.graph import ACCUMULATION_DTYPES
from ..ir.layout import Shape
from ..ir.once_differentiable import once_differentiable
from ..lowering.plan import TorchPlan
from ..lowering.training_memory import TracedSavedValues, TrainingMemory
from .block_lowering import AxisRanges, TracedSubgraph, crop_block, narrow_to_ranges
from .runner import PlanRunner


class _OutputBlock(NamedTuple):
    number: int
    runner: PlanRunner
    input_ranges: AxisRanges
    output_ranges: AxisRanges


class RecomputedBlocks:
    """Block-wise computation of a group of steps on one rank.

    Parameters
    ----------
    output_ranges : for each output, this rank's range along each dimension
    block_counts : tuple of int
        Number of blocks along each axis of the mesh.
    view_offsets_by_id : by id of a partitioned input, the global index at which its view starts in each dimension
    """

    def __init__(
        self, traced: TracedSubgraph, output_ranges: AxisRanges, block_counts: Sequence[int],
        view_offsets_by_id: Mapping[int, Sequence[int]],
    ) -> None:  # fmt: skip
        self.traced, self.output_ranges, self.block_counts = traced, output_ranges, tuple(block_counts)
        self.view_offsets = [view_offsets_by_id.get(value.id, (0,) * len(value.layout)) for value in traced.inputs]
        self.comm = MeshComm(ProcessGrid.serial(), traced.spatial_ndim)
        self.compiler: Callable[..., Any] | None = None
        self.differentiable_inputs = traced.differentiable_inputs()
        self._saved_values: TracedSavedValues = {}

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return this rank's tiles of the outputs from its views of the inputs."""
        outputs: tuple[torch.Tensor, ...] = _RecomputedBlocksFunction.apply(self, *tensors)
        return outputs

    def max_own_extents(self) -> list[int]:
        """Return the largest number of indices that this rank has along each axis of the mesh."""
        extents = [1] * len(self.block_counts)
        for ranges, out in zip(self.output_ranges, self.traced.outputs, strict=True):
            for (lo, hi), (atom,) in zip(ranges, out.layout, strict=True):
                if atom.axis is not None:
                    extents[atom.axis] = max(extents[atom.axis], hi - lo)
        return extents

    def block_plan(self, place: Sequence[int]) -> tuple[TorchPlan, AxisRanges]:
        """Return the plan of one block, and the ranges of the outputs that this block computes."""
        block_ranges = tuple(
            tuple(
                _block_range(lo, hi, self.block_counts, place, atom.axis)
                for (lo, hi), (atom,) in zip(ranges, out.layout, strict=True)
            )
            for ranges, out in zip(self.output_ranges, self.traced.outputs, strict=True)
        )
        return self.traced.plan_for(extend_empty_ranges(block_ranges, self.output_ranges)), block_ranges

    def peak_bytes(self, inputs_requiring_grad: Collection[int] | None = None) -> int:
        """Return the peak number of live bytes while a block is computed, excluding the step's inputs and outputs.

        Parameters
        ----------
        inputs_requiring_grad : collection of int, optional
            Positions of the inputs that require gradients in a backward pass; default: a forward pass.
        """
        # an inner block and the block at the corner, which reads both ends of a periodic image
        places = [n // 2 for n in self.block_counts], [0] * len(self.block_counts)
        plans = [self.block_plan(place)[0] for place in places]
        if inputs_requiring_grad is None:
            return max(plan.peak()[0] - plan.bytes_of_inputs() for plan in plans)
        peaks = []
        for plan in plans:
            gradient_input_ids = [plan.inputs[at] for at in inputs_requiring_grad]
            gradient_bytes = sum(plan.values[value].nbytes for value in gradient_input_ids)
            peaks.append(TrainingMemory(plan, (), gradient_input_ids, self._saved_values).peak(0) + gradient_bytes)
        return max(peaks)

    @cached_property
    def nonempty_blocks(self) -> list[_OutputBlock]:
        """Blocks with elements of at least one output."""
        blocks = list[_OutputBlock]()
        compiled_functions = dict[Any, Callable[..., Any]]()
        for place in product(*map(range, self.block_counts)):
            plan, block_ranges = self.block_plan(place)
            if any(all(lo < hi for lo, hi in ranges) for ranges in block_ranges):
                input_ranges = self.traced.source_ranges(extend_empty_ranges(block_ranges, self.output_ranges))
                runner = PlanRunner(self.comm, plan, None, self.compiler, compiled_functions)
                blocks.append(_OutputBlock(len(blocks), runner, input_ranges, block_ranges))
        return blocks

    def run_block(self, block: _OutputBlock, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Return a block of each output, given the block's views of the inputs."""
        plan = block.runner.plan
        outputs = block.runner(tensors, {}, {})
        return [
            crop_block(y, plan.values[out].layout, ranges)
            for y, out, ranges in zip(outputs, plan.outputs, block.output_ranges, strict=True)
        ]

    def empty_outputs(self, like: torch.Tensor) -> list[torch.Tensor]:
        """Return uninitialised tiles of the outputs."""
        outputs = zip(self.output_ranges, self.traced.outputs, strict=True)
        return [like.new_empty([hi - lo for lo, hi in ranges], dtype=out.dtype) for ranges, out in outputs]

    def narrow_inputs(self, block: _OutputBlock, tensors: Sequence[Any]) -> list[Any]:
        """Return the parts of this rank's views of the inputs that a block reads."""
        return [
            None if tensor is None else narrow_to_ranges(tensor, ranges, offsets)
            for tensor, ranges, offsets in zip(tensors, block.input_ranges, self.view_offsets, strict=True)
        ]

    def narrow_outputs(self, block: _OutputBlock, tiles: Sequence[Any]) -> list[Any]:
        """Return a block's parts of tiles of the outputs."""
        return [
            None
            if tile is None
            else tile[tuple(slice(lo - a, hi - a) for (lo, hi), (a, _) in zip(own, ranges, strict=True))]
            for tile, own, ranges in zip(tiles, block.output_ranges, self.output_ranges, strict=True)
        ]


class BlockMoments(RecomputedBlocks):
    """Means of groups, sums of squared deviations from them, and element counts, for each block of a norm's input.

    The shape is (blocks, 3, N, groups), with zeros for samples outside a block, or (blocks, 3, 1, C).
    """

    def __init__(self, moments: MomentsSpec, *args: Any) -> None:
        super().__init__(*args)
        self.groups = moments.groups

    def sum_of_elements(self, block_moments: torch.Tensor) -> torch.Tensor:
        """Return the sums of elements over all blocks, given the results of `run_block`."""
        return (block_moments[:, 0] * block_moments[:, 2]).sum(0).view(-1)

    def sum_of_squared_deviations(self, block_moments: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        """Return the sums, over all blocks, of squared deviations from a given mean."""
        difference = block_moments[:, 0] - mean.view(block_moments.shape[2:])
        return (block_moments[:, 1] + difference**2 * block_moments[:, 2]).sum(0).view(-1)

    def run_block(self, block: _OutputBlock, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Return the means, sums of squared deviations, and element counts of one block."""
        (y,) = super().run_block(block, *tensors)
        y = y.transpose(0, 1).flatten(1)[None] if self.groups is None else y.reshape(len(y), self.groups, -1)
        variance, mean = torch.var_mean(y, -1, correction=0)
        return [torch.stack([mean, variance * y.shape[-1], torch.full_like(mean, y.shape[-1])])]

    def empty_outputs(self, like: torch.Tensor) -> list[torch.Tensor]:
        """Return zeros for the rows of all blocks."""
        return [like.new_zeros(self.shape, dtype=self.traced.outputs[0].dtype)]

    @property
    def shape(self) -> Shape:
        """Shape of the result for all blocks."""
        samples, channels, *_ = self.traced.outputs[0].shape
        return prod(self.block_counts), 3, *((1, channels) if self.groups is None else (samples, self.groups))

    def narrow_outputs(self, block: _OutputBlock, tiles: Sequence[Any]) -> list[Any]:
        """Return the rows of one block."""
        samples = slice(None) if self.groups is None else slice(*block.output_ranges[0][0])
        return [None if tile is None else tile[block.number][..., samples, :] for tile in tiles]


class _RecomputedBlocksFunction(torch.autograd.Function):
    """Tiles of the outputs; each block is recomputed in the backward pass."""

    @staticmethod
    def forward(ctx: Any, blocks: RecomputedBlocks, *tensors: torch.Tensor) -> Any:
        ctx.blocks, ctx.cast = blocks, (torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu"))
        ctx.save_for_backward(*tensors)
        tiles = blocks.empty_outputs(tensors[0])
        for block in blocks.nonempty_blocks:
            outputs = blocks.run_block(block, *blocks.narrow_inputs(block, tensors))
            for part, y in zip(blocks.narrow_outputs(block, tiles), outputs, strict=True):
                part.copy_(y)
        needs_input_grad = ctx.needs_input_grad[1:]
        tiles_and_inputs = zip(tiles, blocks.differentiable_inputs, strict=True)
        constant_tiles = (tile for tile, inputs in tiles_and_inputs if not any(needs_input_grad[i] for i in inputs))
        ctx.mark_non_differentiable(*constant_tiles)
        return tuple(tiles)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Any) -> Any:
        blocks, tensors = ctx.blocks, ctx.saved_tensors
        needs_input_grad = ctx.needs_input_grad[1:]
        gradient_sums = [
            torch.zeros_like(t, dtype=t.dtype if value.axes - {0} else ACCUMULATION_DTYPES.get(t.dtype))
            if need
            else None
            for t, value, need in zip(tensors, blocks.traced.inputs, needs_input_grad, strict=True)
        ]  # 16-bit dtypes are summed in float32 if every block contributes to all elements
        for block in blocks.nonempty_blocks:
            views = blocks.narrow_inputs(block, tensors)
            leaves = [t.detach().requires_grad_(need) for t, need in zip(views, needs_input_grad, strict=True)]
            with torch.enable_grad(), torch.autocast("cpu", *ctx.cast):
                outputs = zip(blocks.run_block(block, *leaves), blocks.narrow_outputs(block, dys), strict=True)
            outputs_and_gradients = [(y, dy.to(y.dtype)) for y, dy in outputs if y.requires_grad and dy is not None]
            if not outputs_and_gradients:
                continue
            ys, gradients = [y for y, _ in outputs_and_gradients], [dy for _, dy in outputs_and_gradients]
            grad_leaves = [leaf for leaf in leaves if leaf.requires_grad]
            block_sums = [total for total in blocks.narrow_inputs(block, gradient_sums) if total is not None]
            for total, grad in zip(
                block_sums, torch.autograd.grad(ys, grad_leaves, gradients, allow_unused=True), strict=True
            ):
                if grad is not None:
                    total.add_(grad)
        return None, *(total if total is None else total.to(t) for total, t in zip(gradient_sums, tensors, strict=True))


def extend_empty_ranges(ranges: AxisRanges, full_ranges: AxisRanges) -> AxisRanges:
    """Return the ranges, extended to one index where empty, since operators need not support empty tensors."""
    return tuple(
        tuple(
            (lo, hi) if lo < hi else (max(0, min(lo, end - 1)), max(1, min(lo + 1, end))) for (lo, hi), (_, end) in both
        )
        for both in (zip(a, b, strict=True) for a, b in zip(ranges, full_ranges, strict=True))
    )


def _block_range(lo: int, hi: int, block_counts: Sequence[int], place: Sequence[int], axis: int | None) -> Range:
    if axis is None:
        return lo, hi
    a, b = part_range(hi - lo, block_counts[axis], place[axis])
    return lo + a, lo + b
