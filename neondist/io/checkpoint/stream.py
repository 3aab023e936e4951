"""Transfer of arrays between a root rank and the others in blocks, so that no rank holds a distributed array whole."""

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
        for block, place in piece.blocks():
            if len(piece.boxes) == 1:
                values = to_host(piece.local_array[block.slices])
            else:
                parts = [box.intersect(block) for box in piece.boxes]
                moves = Redistribution(world.all_to_all, world.rank, parts, _boxes_on_root(world, block))
                values = moves.forward(to_host(_own_part_of_block(piece, world.rank, parts)))
            if world.rank == 0:
                yield piece, place, values.reshape([s.stop - s.start for s in place])


def scatter_from_root(
    world: Transport, pieces: Iterable[ArrayPart], read: Callable[[ArrayPart, Slices], np.ndarray], root: int = 0
) -> None:
    """Fill every rank's part from `read(piece, place)`, called once per block on rank `root`. Collective.

    If `read` raises, missing blocks are filled with zeros, and `root` re-raises the exception after all transfers.
    """
    failure: Exception | None = None

    def read_block(piece: ArrayPart, block: Box, place: Slices) -> np.ndarray:
        nonlocal failure
        if failure is None:
            try:
                return np.asarray(read(piece, place), piece.dtype).reshape(block.shape)
            except Exception as problem:
                failure = problem
        return np.zeros(block.shape, piece.dtype)

    for piece in pieces:
        for block, place in piece.blocks():
            if len(piece.boxes) == 1:
                values = world.bcast(read_block(piece, block, place) if world.rank == root else None, root)
                piece.local_array[block.slices] = namespace(piece.local_array).asarray(values)
                continue
            held, parts = _boxes_on_root(world, block, root), [box.intersect(block) for box in piece.boxes]
            sent = (
                read_block(piece, block, place) if world.rank == root else np.zeros(held[world.rank].shape, piece.dtype)
            )
            values = Redistribution(world.all_to_all, world.rank, held, parts).forward(sent)
            if values.size:
                _own_part_of_block(piece, world.rank, parts)[...] = namespace(piece.local_array).asarray(values)
    if failure is not None:
        raise failure


def _boxes_on_root(world: Transport, block: Box, root: int = 0) -> list[Box]:
    """Return the box of each rank if `root` has the whole block."""
    return [block if rank == root else Box(block.lo, block.lo) for rank in range(world.size)]


def _own_part_of_block(piece: ArrayPart, rank: int, parts: Sequence[Box]) -> np.ndarray:
    """Return a view of this rank's part of a block."""
    return piece.local_array[parts[rank].relative_to(piece.boxes[rank]).slices]
