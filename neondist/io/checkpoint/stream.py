"""Block-wise transfer of arrays between a root rank and the other ranks; no rank holds a distributed array in full."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from ...arrays.namespace import namespace, to_host
from ...comm import Redistribution, Transport
from ...geometry import Box
from .pieces import ArrayPart, Slices


def gather_to_root(world: Transport, pieces: Iterable[ArrayPart]) -> Iterator[tuple[ArrayPart, Slices, np.ndarray]]:
    """Yield all blocks on rank 0 as (piece, slices, values). Collective; every rank must exhaust the iterator.

    Other ranks yield nothing. Parts that several ranks have, such as replicas, are sent by the first of them.
    """
    for piece in pieces:
        for block, file_slices in piece.blocks():
            if len(piece.boxes) == 1:
                values = to_host(piece.local_array[block.slices])
            else:
                rank_boxes = [box.intersect(block) for box in piece.boxes]
                redistribution = Redistribution(world.all_to_all, world.rank, rank_boxes, _boxes_on_root(world, block))
                values = redistribution.forward(to_host(_own_part_of_block(piece, world.rank, rank_boxes)))
            if world.rank == 0:
                yield piece, file_slices, values.reshape([s.stop - s.start for s in file_slices])


def scatter_from_root(
    world: Transport, pieces: Iterable[ArrayPart], read: Callable[[ArrayPart, Slices], np.ndarray], root: int = 0
) -> None:
    """Fill every rank's part from `read(piece, file_slices)`, called once per block on rank `root`. Collective.

    If `read` raises, missing blocks are filled with zeros, and `root` re-raises the exception after all transfers.
    """
    failure: Exception | None = None

    def read_block(piece: ArrayPart, block: Box, file_slices: Slices) -> np.ndarray:
        nonlocal failure
        if failure is None:
            try:
                return np.asarray(read(piece, file_slices), piece.dtype).reshape(block.shape)
            except Exception as problem:
                failure = problem
        return np.zeros(block.shape, piece.dtype)

    for piece in pieces:
        for block, file_slices in piece.blocks():
            if len(piece.boxes) == 1:
                values = world.bcast(read_block(piece, block, file_slices) if world.rank == root else None, root)
                piece.local_array[block.slices] = namespace(piece.local_array).asarray(values)
                continue
            root_boxes = _boxes_on_root(world, block, root)
            rank_boxes = [box.intersect(block) for box in piece.boxes]
            if world.rank == root:
                root_values = read_block(piece, block, file_slices)
            else:
                root_values = np.zeros(root_boxes[world.rank].shape, piece.dtype)
            values = Redistribution(world.all_to_all, world.rank, root_boxes, rank_boxes).forward(root_values)
            if values.size:
                _own_part_of_block(piece, world.rank, rank_boxes)[...] = namespace(piece.local_array).asarray(values)
    if failure is not None:
        raise failure


def _boxes_on_root(world: Transport, block: Box, root: int = 0) -> list[Box]:
    """Return the box of each rank if `root` has the whole block."""
    return [block if rank == root else Box(block.lo, block.lo) for rank in range(world.size)]


def _own_part_of_block(piece: ArrayPart, rank: int, rank_boxes: Sequence[Box]) -> np.ndarray:
    """Return a view of this rank's part of a block."""
    return piece.local_array[rank_boxes[rank].relative_to(piece.boxes[rank]).slices]
