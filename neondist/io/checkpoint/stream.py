"""Parts of arrays travel between rank 0 and the others block by block, so that rank 0 never holds a whole one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from ...arrays.namespace import namespace, to_host
from ...comm import Redistribution, Transport
from ...geometry import Box
from .pieces import Piece, Slices


def collect(world: Transport, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, Slices, np.ndarray]]:
    """Yield all blocks on rank 0: piece, place in the whole, values; collective, to be exhausted on every rank.

    On the other ranks it yields nothing. Parts that several ranks have, as replicas do, come from the first.
    """
    for piece in pieces:
        for block, place in piece.blocks():
            if len(piece.boxes) == 1:
                values = to_host(piece.array[block.slices])
            else:
                parts = [box.intersect(block) for box in piece.boxes]
                moves = Redistribution(world.all_to_all, world.rank, parts, _on_one(world, block))
                values = moves.forward(to_host(_within(piece, world.rank, parts)))
            if world.rank == 0:
                yield piece, place, values.reshape([s.stop - s.start for s in place])


def scatter(
    world: Transport, pieces: Iterable[Piece], read: Callable[[Piece, Slices], np.ndarray], root: int = 0
) -> None:
    """Fill every rank's part from `read(piece, place)`, which is called on rank `root` alone, once a block; collective.

    If `read` raises, so does this, on that rank, once the other ranks have got something.
    """
    failure: Exception | None = None

    def values_of(piece: Piece, block: Box, place: Slices) -> np.ndarray:
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
                found = world.bcast(values_of(piece, block, place) if world.rank == root else None, root)
                piece.array[block.slices] = namespace(piece.array).asarray(found)
                continue
            held, parts = _on_one(world, block, root), [box.intersect(block) for box in piece.boxes]
            mine = (
                values_of(piece, block, place) if world.rank == root else np.zeros(held[world.rank].shape, piece.dtype)
            )
            found = Redistribution(world.all_to_all, world.rank, held, parts).forward(mine)
            if found.size:
                _within(piece, world.rank, parts)[...] = namespace(piece.array).asarray(found)
    if failure is not None:
        raise failure


def _on_one(world: Transport, block: Box, root: int = 0) -> list[Box]:
    """Return what each rank has where one rank has all of a block."""
    return [block if rank == root else Box(block.lo, block.lo) for rank in range(world.size)]


def _within(piece: Piece, rank: int, parts: Sequence[Box]) -> np.ndarray:
    """Return this rank's cells of its part of a block."""
    return piece.array[parts[rank].relative_to(piece.boxes[rank]).slices]
