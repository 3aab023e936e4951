"""The two ways through a network: block by block, each rank its own; or whole, each rank its tile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil, prod
from typing import Any, Protocol

import numpy as np

from ...arrays.namespace import to_host
from ...comm import ProcessGrid
from ...errors import ConfigError
from ...formats import TileSource
from ...formats.cache import ChunkCache
from ...geometry import Box, GridShape
from ...models import Model, TrainableModel
from ...plan import Plan, Training, compile_plan
from ...plan.blocks import COPIES, fitted, fitted_blocks, not_in_blocks
from ...runtime.blocks import Blockwise
from ...system.memory import PROCESS, free_memory, share_of, words
from .images import Images

BLOCK = {1: 1 << 18, 2: 2048, 3: 256}
"""default number of cells along each axis of a block, by the number of axes"""
CACHE = 1 << 28
"""bytes of decoded chunks that a rank keeps at most, beside its blocks"""


class Route(Protocol):
    """A route to compute all outputs, part by part.

    Attributes
    ----------
    parts : int
    output_shape : (*spatial, C)
    dtype : numpy.dtype
    collective : bool
        Whether all ranks work on a part together.
    about : list
        What a resumed job has to have in common with the one that it resumes.
    """

    parts: int
    output_shape: tuple[int, ...]
    dtype: np.dtype
    collective: bool
    about: list[Any]

    def like(self) -> TileSource | None:
        """Return an image whose cells lie where those of the output do; None if there is none."""

    def ordered(self, parts: Sequence[int]) -> Sequence[int]:
        """Return parts in the order in which they are best read."""

    def read(self, part: int) -> np.ndarray:
        """Return what this rank needs of the images for a part."""

    def outputs(self, part: int, x: np.ndarray) -> np.ndarray | None:
        """Return this rank's outputs; None: others have them."""

    def place(self, part: int) -> tuple[range, Box]:
        """Return the samples and the cells that they are."""

    def cells(self, part: int) -> int:
        """Return how many cells of images a part is, on all ranks."""


class InBlocks:
    """Each rank computes blocks by itself, each from all cells that it depends on.

    Parameters
    ----------
    images : Images
    plan : BlockPlan, or what is like it
    run : callable
        From a block's number and its cells of the image to its output.
    cache : int
        Bytes of decoded chunks.
    output_shape : (*spatial, C)
        Of one image's output.
    dtype : numpy.dtype
    """

    collective = False

    def __init__(
        self,
        images: Images,
        plan: Any,
        run: Callable[[int, Any], Any],
        cache: int,
        output_shape: tuple[int, ...],
        dtype: np.dtype,
    ) -> None:
        images.source.cache, self._across = ChunkCache(cache), self._blocks_in(cache, images, plan)
        self.images, self.plan, self._run, self.dtype = images, plan, run, dtype
        self.parts, self.output_shape = images.shape[0] * len(plan), output_shape
        self.about = ["blocks", list(plan.size)]

    def like(self) -> TileSource | None:
        """Return the images, if the outputs are as large."""
        return _as_large(self.images, self.output_shape)

    @staticmethod
    def _blocks_in(cache: int, images: Images, plan: Any) -> int:
        """Return how many neighbours across can be kept until those below them are read."""
        source, cells = images.source, plan.largest_image.shape
        if source.chunks is None:
            return 1
        chunks = source.chunks[-1 - len(cells) :]
        read = [min(n, (ceil(cut / c) + 1) * c) for n, cut, c in zip(images.shape[1:], cells, chunks, strict=False)]
        blocks = cache // (prod(read) * images.shape[-1] * source.dtype.itemsize)
        return max(1, int(blocks ** (1 / max(1, len(cells) - 1)) + 1e-6))

    def ordered(self, parts: Sequence[int]) -> Sequence[int]:
        """Return blocks in columns, so that what two of them need is decoded once."""

        def place(part: int) -> list[int]:
            sample, number = divmod(part, len(self.plan))
            first, *others = self.plan.coords(number)
            return [sample, *(at // self._across for at in others), first, *others]

        return sorted(parts, key=place)

    def read(self, part: int) -> np.ndarray:
        """Return a block's part of its image."""
        sample, number = divmod(part, len(self.plan))
        return self.images.read(range(sample, sample + 1), self.plan.image(number), self.dtype)

    def outputs(self, part: int, x: np.ndarray) -> np.ndarray:
        """Return a block."""
        y: np.ndarray = to_host(self._run(part % len(self.plan), x))
        return y

    def place(self, part: int) -> tuple[range, Box]:
        """Return its sample and its cells."""
        sample, number = divmod(part, len(self.plan))
        return range(sample, sample + 1), self.plan.output(number)

    def cells(self, part: int) -> int:
        """Return how many cells of the output it has."""
        return self.plan.output(part % len(self.plan)).size


class InTiles:
    """All ranks compute a batch of whole images, each its tile."""

    collective = True

    def __init__(self, model: TrainableModel, images: Images, batch: int, grid: ProcessGrid, plan: Any) -> None:
        self.model, self.images, self.batch, self.grid, self.dtype = model, images, batch, grid, model.dtype
        model.build(images.shape[1:], batch, grid, plan)
        self.parts, self.output_shape = -(-images.shape[0] // batch), model.output_shape
        self.about = ["whole", batch]

    def like(self) -> TileSource | None:
        """Return the images, if the outputs are as large."""
        return _as_large(self.images, self.output_shape)

    def ordered(self, parts: Sequence[int]) -> Sequence[int]:
        """Return them as they are."""
        return parts

    def _samples(self, part: int) -> range:
        return range(part * self.batch, min((part + 1) * self.batch, self.images.shape[0]))

    def read(self, part: int) -> np.ndarray:
        """Return this rank's tile of its replica's share."""
        samples = self._samples(part)
        lo, hi = self.grid.sample_range(len(samples))
        return self.images.read(samples[lo:hi], self.model.input.own, self.dtype)

    def outputs(self, part: int, x: np.ndarray) -> np.ndarray | None:
        """Return its tile of the output; a vector is the first tile's."""
        y: np.ndarray = to_host(self.model.fprop(x, training=False, batch_size=len(self._samples(part))))
        return y if len(self.output_shape) > 1 or self.grid.tile == 0 else None

    def place(self, part: int) -> tuple[range, Box]:
        """Return the replica's share of the samples, and the tile."""
        samples = self._samples(part)
        lo, hi = self.grid.sample_range(len(samples))
        return samples[lo:hi], self.grid.partition(self.output_shape[:-1]).box(self.grid.tile)

    def cells(self, part: int) -> int:
        """Return how many cells the images have."""
        return len(self._samples(part)) * Box.of(self.images.shape[1:-1]).size


def choose(
    model: Any,
    images: Images,
    grid: ProcessGrid,
    batch: int,
    block: int | None,
    before: list[Any] | None,
    beyond: int = 0,
) -> InBlocks | InTiles:
    """Return the route that a network goes: whole if it fits into memory, or needs the whole image; else in blocks.

    Parameters
    ----------
    batch : int
        Samples that go together at most.
    block : int, optional
        Cells along each axis that a block may have: then it goes in blocks.
    before : list, optional
        The `about` of the job that is resumed.
    beyond : int
        Cells after its own, along each axis, that a block also has.

    Raises
    ------
    UserError
        The network does not fit the images, cannot go in blocks, or fits into no memory.
    """
    shape, memory = images.shape[1:], getattr(model, "memory", None)
    batch = max(grid.replicas, min(batch, images.shape[0] if images.stacked else 1))
    if before is not None and block is None:
        batch, block = (before[1], None) if before[0] == "whole" else (batch, max(before[1]))
    limit = grid.world.bcast(limit_of(memory, grid.size))
    if not isinstance(model, Model):
        return _choose_module(model, images, grid, batch, block, limit, beyond)
    alone = forward_plan(model, shape, GridShape(), 1)
    graph = alone.graph
    whole = next(not_in_blocks(graph), None)
    if block is not None and whole is not None:
        raise ConfigError(
            f"block: layer '{whole[0]}' cannot be computed block by block ({whole[1]}); leave out --block"
        )
    if block is None:
        plan, batch = _halved(lambda batch: forward_plan(model, shape, grid.shape, batch), _needed, batch, grid, limit)
        if _needed(plan) > limit and whole is not None:
            if memory is None:
                raise ConfigError(
                    f"memory: layer '{whole[0]}' {whole[1]}, so that it cannot be computed block by block; for a"
                    f" whole image, a rank needs {words(_needed(plan))}, but has {words(limit)}; use more ranks, or"
                    " give --memory, which computes it strip by strip"
                )
            plan = model.plan(shape, grid.shape, batch)
        if whole is not None or _needed(plan) <= limit:
            return InTiles(model, images, batch, grid, plan)
    cache = cache_of(images, limit)
    numbers = (limit - cache - alone.memory(0) + alone.arena(0, 0)) // model.dtype.itemsize
    sizes = _sizes(block, len(graph.shapes[graph.output]) - 1)
    blocks = fitted_blocks(graph, sizes, numbers, model.dtype.itemsize, beyond)
    model.build(shape, 1, ProcessGrid.serial(), alone)
    computed = Blockwise(blocks, model.context)

    def run(number: int, x: np.ndarray) -> Any:
        return computed.run(number, model.context.backend.from_host(x, model.dtype))

    return InBlocks(images, blocks, run, cache, model.output_shape, model.dtype)


def _choose_module(
    model: Any, images: Images, grid: ProcessGrid, batch: int, block: int | None, limit: int, beyond: int
) -> InBlocks | InTiles:
    """Return the route of a module of PyTorch, as `choose` does."""
    shape = images.shape[1:]
    model.resize(shape)
    plan, batch = _halved(
        lambda batch: model.plan(shape, grid.shape, batch), lambda plan: plan.needed, batch, grid, limit
    )
    if block is None and plan.needed <= limit:
        return InTiles(model, images, batch, grid, plan)
    needed = f"for a whole image, a rank needs {words(plan.needed)}"
    if block is None:
        remedy = f"{needed}, but has {words(limit)}; use more ranks, or give more --memory"
    else:
        remedy = f"leave out --block: {needed}"
    traced, cache = model.in_blocks(shape, remedy), cache_of(images, limit)
    sizes, left = _sizes(block, len(traced.extent)), limit - cache - plan.weights
    blocks = fitted(partial(traced.blocks, beyond=beyond), traced.extent, sizes, left)
    model.build(shape, 1, ProcessGrid.serial())
    return InBlocks(images, blocks, partial(model.block, blocks), cache, model.output_shape, model.dtype)


def _halved(
    plan_of: Callable[[int], Any], needed: Callable[[Any], int], batch: int, grid: ProcessGrid, limit: int
) -> tuple[Any, int]:
    """Return the plan for as many samples as fit, and how many they are."""
    plan = plan_of(batch)
    while needed(plan) > limit and batch > grid.replicas:
        batch = max(grid.replicas, batch // 2)
        plan = plan_of(batch)
    return plan, batch


def _as_large(images: Images, output_shape: tuple[int, ...]) -> TileSource | None:
    return images.source if tuple(output_shape[:-1]) == images.shape[1:-1] else None


def cache_of(images: Images, limit: int) -> int:
    """Return the bytes of decoded chunks that a rank may keep."""
    return 0 if images.source.chunks is None else min(CACHE, limit // 4)


def _sizes(block: int | None, axes: int) -> list[int]:
    """Return the cells along each axis that a block has at most."""
    return [block or BLOCK[axes]] * axes


def forward_plan(model: Any, shape: tuple[int, ...], grid: GridShape, batch: int) -> Plan:
    """Return the plan of a model of neondist's layers for passes alone that do not go back, whole tiles at once."""
    training = Training(model.cost, model.optimizer, model.dtype, backward=False)
    return compile_plan(model.chain, shape, grid, batch, training)


def limit_of(memory: int | None, ranks: int) -> int:
    """Return the bytes that a rank may use for a network."""
    if memory is not None:
        return share_of(memory, ranks)
    free = free_memory()
    return 1 << 62 if free is None else max(PROCESS, free // 2 // ranks)


def _needed(plan: Plan) -> int:
    """Return the bytes that a rank needs at most for whole images: of the network, and of those read and written."""
    ends = 0
    for shape in (plan.input_shape, plan.output_shape):
        ends += plan.grid.partition(shape[:-1]).largest * shape[-1] * plan.samples(0) * plan.itemsize
    return max(plan.memory(rank) for rank in range(plan.grid.size)) + COPIES * ends
