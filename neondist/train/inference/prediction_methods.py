"""Prediction methods: block by block, independently on each rank; or whole images, one tile per rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil, prod
from typing import Any

import numpy as np

from ...arrays.namespace import to_host
from ...comm import ProcessGrid
from ...errors import ConfigError
from ...formats import TileSource
from ...formats.cache import ChunkCache
from ...geometry import Box, GridShape
from ...models import Model, TrainableModel
from ...plan import Plan, TrainingSettings, compile_plan
from ...plan.blocks import IMAGE_COPIES, find_blockwise_obstacles, fit_blocks, shrink_blocks_to_fit
from ...runtime.blocks import BlockwiseExecutor
from ...system.memory import (
    count_local_ranks,
    format_bytes,
    format_limit_for,
    free_bytes,
    model_bytes_per_rank,
    process_overhead_bytes,
)
from .images import SourceSamples

DEFAULT_BLOCK_EXTENT_BY_NDIM = {1: 1 << 18, 2: 2048, 3: 256}
"""Default cells along each axis of a block, by the number of axes."""
MAX_CHUNK_CACHE_BYTES = 1 << 28
"""Largest size in bytes of a rank's cache of decoded chunks."""


class PredictionMethod(ABC):
    """Method of computing all outputs, part by part.

    Attributes
    ----------
    images : SourceSamples
    num_parts : int
    output_shape : (*spatial, C)
    dtype : numpy.dtype
    is_collective : bool
        Whether all ranks work on each part together.
    identity_for_resume : list
        Identity of the method, equal for a job and its resumption.
    """

    images: SourceSamples
    num_parts: int
    output_shape: tuple[int, ...]
    dtype: np.dtype
    is_collective: bool
    identity_for_resume: list[Any]

    def source_aligned_with_output(self) -> TileSource | None:
        """Return the images if their cells coincide with the output's; None if the outputs have another extent."""
        return self.images.source if tuple(self.output_shape[:-1]) == self.images.shape[1:-1] else None

    def order_parts_for_reading(self, parts: Sequence[int]) -> Sequence[int]:
        """Return parts in the best order for reading."""
        return parts

    @abstractmethod
    def read_local_input(self, part: int) -> np.ndarray:
        """Return this rank's input for a part."""

    @abstractmethod
    def compute_local_output(self, part: int, x: np.ndarray) -> np.ndarray | None:
        """Return this rank's outputs; None if other ranks have them."""

    @abstractmethod
    def local_output_samples_and_box(self, part: int) -> tuple[range, Box]:
        """Return the samples and the box of this rank's outputs."""

    @abstractmethod
    def count_cells(self, part: int) -> int:
        """Return the number of cells of a part on all ranks."""


class BlockwisePrediction(PredictionMethod):
    """Block-wise prediction: each rank computes blocks independently, each from its whole receptive field.

    Parameters
    ----------
    images : SourceSamples
    block_plan : BlockPlan or similar
    run_block : callable
        Function from a block's number and input cells to its output.
    cache_bytes : int
        Size of the cache of decoded chunks.
    output_shape : (*spatial, C)
        Shape of one image's output.
    dtype : numpy.dtype
    """

    is_collective = False

    def __init__(
        self,
        images: SourceSamples,
        block_plan: Any,
        run_block: Callable[[int, Any], Any],
        cache_bytes: int,
        output_shape: tuple[int, ...],
        dtype: np.dtype,
    ) -> None:
        images.source.cache = ChunkCache(cache_bytes)
        self._blocks_per_column = self._count_cached_blocks(cache_bytes, images, block_plan)
        self.images, self.plan, self._run_block, self.dtype = images, block_plan, run_block, dtype
        self.num_parts, self.output_shape = images.shape[0] * len(block_plan), output_shape
        self.identity_for_resume = ["blocks", list(block_plan.size)]

    @staticmethod
    def _count_cached_blocks(cache_bytes: int, images: SourceSamples, block_plan: Any) -> int:
        """Return the number of blocks, along each axis but the first, that stay cached until the next row is read."""
        source, extent = images.source, block_plan.largest_input_box.shape
        if source.chunks is None:
            return 1
        chunk = source.chunks[-1 - len(extent) :]
        shape = [min(n, (ceil(cut / c) + 1) * c) for n, cut, c in zip(images.shape[1:], extent, chunk, strict=False)]
        num_blocks = cache_bytes // (prod(shape) * images.shape[-1] * source.dtype.itemsize)
        return max(1, int(num_blocks ** (1 / max(1, len(extent) - 1)) + 1e-6))

    def order_parts_for_reading(self, parts: Sequence[int]) -> Sequence[int]:
        """Return blocks in columns, so that shared chunks are decoded once."""

        def sort_key(part: int) -> list[int]:
            sample, number = divmod(part, len(self.plan))
            first_coord, *other_coords = self.plan.coords(number)
            return [sample, *(at // self._blocks_per_column for at in other_coords), first_coord, *other_coords]

        return sorted(parts, key=sort_key)

    def read_local_input(self, part: int) -> np.ndarray:
        """Return the input cells of a block."""
        sample, number = divmod(part, len(self.plan))
        return self.images.read(range(sample, sample + 1), self.plan.input_box(number), self.dtype)

    def compute_local_output(self, part: int, x: np.ndarray) -> np.ndarray:
        """Return the output of a block."""
        y: np.ndarray = to_host(self._run_block(part % len(self.plan), x))
        return y

    def local_output_samples_and_box(self, part: int) -> tuple[range, Box]:
        """Return the sample and the output box of a block."""
        sample, number = divmod(part, len(self.plan))
        return range(sample, sample + 1), self.plan.output_box(number)

    def count_cells(self, part: int) -> int:
        """Return the number of output cells of a block."""
        return self.plan.output_box(part % len(self.plan)).size


class WholeImagePrediction(PredictionMethod):
    """Whole-image prediction: all ranks compute a batch together, each its tile."""

    is_collective = True

    def __init__(
        self, model: TrainableModel, images: SourceSamples, batch_size: int, grid: ProcessGrid, plan: Any
    ) -> None:
        self.model, self.images, self.batch_size, self.grid, self.dtype = model, images, batch_size, grid, model.dtype
        model.build(images.shape[1:], batch_size, grid, plan)
        self.num_parts, self.output_shape = -(-images.shape[0] // batch_size), model.output_shape
        self.identity_for_resume = ["whole", batch_size]

    def _samples_of_part(self, part: int) -> range:
        return range(part * self.batch_size, min((part + 1) * self.batch_size, self.images.shape[0]))

    def read_local_input(self, part: int) -> np.ndarray:
        """Return this rank's tile of its replica's samples."""
        samples = self._samples_of_part(part)
        lo, hi = self.grid.sample_range(len(samples))
        return self.images.read(samples[lo:hi], self.model.input.own, self.dtype)

    def compute_local_output(self, part: int, x: np.ndarray) -> np.ndarray | None:
        """Return this rank's tile of the output; outputs without spatial axes belong to the first tile."""
        y: np.ndarray = to_host(self.model.fprop(x, training=False, batch_size=len(self._samples_of_part(part))))
        return y if len(self.output_shape) > 1 or self.grid.tile == 0 else None

    def local_output_samples_and_box(self, part: int) -> tuple[range, Box]:
        """Return the replica's samples and the tile's box."""
        samples = self._samples_of_part(part)
        lo, hi = self.grid.sample_range(len(samples))
        return samples[lo:hi], self.grid.partition(self.output_shape[:-1]).box(self.grid.tile)

    def count_cells(self, part: int) -> int:
        """Return the number of cells of the batch's images."""
        return len(self._samples_of_part(part)) * Box.of(self.images.shape[1:-1]).size


def choose_method(
    model: Any,
    images: SourceSamples,
    grid: ProcessGrid,
    batch: int,
    block: int | None,
    resumed_method: list[Any] | None,
    extra_cells: int = 0,
) -> PredictionMethod:
    """Return the prediction method: whole images if they fit in memory or are required; else blocks.

    Parameters
    ----------
    batch : int
        Largest number of samples per pass.
    block : int, optional
        Largest number of cells along each axis of a block; forces the block-wise method.
    resumed_method : list, optional
        `identity_for_resume` of the job to resume.
    extra_cells : int
        Extra cells after the end of each block, along each axis.

    Raises
    ------
    UserError
        The network does not match the images, cannot be computed in blocks, or does not fit in memory.
    """
    sample_shape, memory = images.shape[1:], getattr(model, "memory", None)
    batch = max(grid.replicas, min(batch, images.shape[0] if images.has_single_sample_axis else 1))
    if resumed_method is not None and block is None:
        batch, block = (resumed_method[1], None) if resumed_method[0] == "whole" else (batch, max(resumed_method[1]))
    limit_bytes = grid.world.bcast(memory_limit_per_rank(memory, grid.size, model.layer_backend_name))
    if not isinstance(model, Model):
        return _choose_torch_module_method(model, images, grid, batch, block, limit_bytes, extra_cells)
    serial_plan = compile_forward_plan(model, sample_shape, GridShape(), 1)
    graph = serial_plan.graph
    obstacle = next(find_blockwise_obstacles(graph), None)
    if block is not None and obstacle is not None:
        raise ConfigError(
            f"block: layer '{obstacle[0]}' cannot be computed block by block ({obstacle[1]}); leave out block"
        )
    if block is None:
        plan_for_batch = partial(compile_forward_plan, model, sample_shape, grid.shape)
        plan, batch = _plan_largest_fitting_batch(plan_for_batch, _peak_bytes_per_rank, batch, grid, limit_bytes)
        if _peak_bytes_per_rank(plan) > limit_bytes and obstacle is not None:
            if memory is None:
                raise ConfigError(
                    f"memory: layer '{obstacle[0]}' {obstacle[1]}, so it cannot be computed block by block; for a"
                    f" whole image, a rank needs {format_bytes(_peak_bytes_per_rank(plan))}, but has"
                    f" {format_bytes(limit_bytes)}; use more ranks, or give --memory for strip-by-strip execution"
                )
            plan = model.plan(sample_shape, grid.shape, batch)
        if obstacle is not None or _peak_bytes_per_rank(plan) <= limit_bytes:
            return WholeImagePrediction(model, images, batch, grid, plan)
    cache = chunk_cache_bytes(images, limit_bytes)
    max_elements = (limit_bytes - cache - serial_plan.memory(0) + serial_plan.arena_bytes(0, 0)) // model.dtype.itemsize
    max_extents = _max_block_extents(block, len(graph.shapes[graph.output_value]) - 1)
    block_plan = fit_blocks(graph, max_extents, max_elements, model.dtype.itemsize, extra_cells)
    model.build(sample_shape, 1, ProcessGrid.serial(), serial_plan)
    executor = BlockwiseExecutor(block_plan, model.context)

    def run_block(number: int, x: np.ndarray) -> Any:
        return executor.run(number, model.context.backend.from_host(x, model.dtype))

    return BlockwisePrediction(images, block_plan, run_block, cache, model.output_shape, model.dtype)


def _choose_torch_module_method(
    model: Any, images: SourceSamples, grid: ProcessGrid, batch: int, block: int | None, limit: int, extra_cells: int
) -> PredictionMethod:
    """Return the method of a PyTorch module, as `choose_method` does."""
    shape = images.shape[1:]
    model.set_image_extent(shape)
    plan, batch = _plan_largest_fitting_batch(
        lambda batch: model.plan(shape, grid.shape, batch), lambda plan: plan.needed_bytes, batch, grid, limit
    )
    if len(plan.output_shape) not in (1, len(shape)):
        raise ConfigError(
            f"model: returns outputs of shape {tuple(plan.output.shape)} for images with {len(shape) - 1} spatial axes;"
            " return (N, C, *spatial), such as y.unsqueeze(1) for outputs without channels, or (N, C)"
        )
    if block is None and plan.needed_bytes <= limit:
        return WholeImagePrediction(model, images, batch, grid, plan)
    needed_text = f"for a whole image, a rank needs {format_bytes(plan.needed_bytes)}"
    if block is None:
        remedy = f"{needed_text}, but has {format_bytes(limit)}; use more ranks, or give"
        remedy += f" --memory {format_limit_for(plan.needed_bytes, grid.size)}"
    else:
        remedy = f"leave out block: {needed_text}"
    traced, cache = model.trace_for_blocks(shape, remedy), chunk_cache_bytes(images, limit)
    max_extents, budget_bytes = _max_block_extents(block, len(traced.extent)), limit - cache - plan.weights_bytes
    divide_into_blocks = partial(traced.divide_into_blocks, overlap=extra_cells)
    blocks = shrink_blocks_to_fit(divide_into_blocks, traced.extent, max_extents, budget_bytes)
    model.build(shape, 1, ProcessGrid.serial())
    return BlockwisePrediction(images, blocks, partial(model.run_block, blocks), cache, model.output_shape, model.dtype)


def _plan_largest_fitting_batch(
    plan_for_batch: Callable[[int], Any], needed_bytes: Callable[[Any], int], batch: int, grid: ProcessGrid, limit: int
) -> tuple[Any, int]:
    """Return the plan and the size of a batch, halved until it fits or each replica has one sample."""
    plan = plan_for_batch(batch)
    while needed_bytes(plan) > limit and batch > grid.replicas:
        batch = max(grid.replicas, batch // 2)
        plan = plan_for_batch(batch)
    return plan, batch


def chunk_cache_bytes(images: SourceSamples, memory_limit: int) -> int:
    """Return the size in bytes of a rank's cache of decoded chunks."""
    return 0 if images.source.chunks is None else min(MAX_CHUNK_CACHE_BYTES, memory_limit // 4)


def _max_block_extents(block_extent: int | None, ndim: int) -> list[int]:
    return [block_extent or DEFAULT_BLOCK_EXTENT_BY_NDIM[ndim]] * ndim


def compile_forward_plan(model: Any, shape: tuple[int, ...], grid: GridShape, batch_size: int) -> Plan:
    """Return the forward-only plan of a model of neondist's layers, with whole tiles."""
    settings = TrainingSettings(model.cost, model.optimizer, model.dtype, backward=False)
    return compile_plan(model.chain, shape, grid, batch_size, settings)


def memory_limit_per_rank(memory: int | None, ranks: int, backend: str | None = None) -> int:
    """Return the memory limit in bytes of a network on a rank."""
    if memory is not None:
        return model_bytes_per_rank(memory, count_local_ranks(ranks), backend)
    available_bytes = free_bytes()
    return 1 << 62 if available_bytes is None else max(process_overhead_bytes(backend), available_bytes // 2 // ranks)


def _peak_bytes_per_rank(plan: Plan) -> int:
    """Return a rank's peak memory in bytes for whole images: the network, and the images read and written."""
    io_bytes = 0
    for shape in (plan.input_shape, plan.output_shape):
        io_bytes += plan.grid.partition(shape[:-1]).max_tile_size * shape[-1] * plan.samples(0) * plan.itemsize
    return max(plan.memory(rank) for rank in range(plan.grid.size)) + IMAGE_COPIES * io_bytes
