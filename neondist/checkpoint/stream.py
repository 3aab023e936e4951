"""Parts of arrays travel between rank 0 and the others block by block, so that rank 0 never holds a whole one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod

import numpy as np

from ..comm import Exchange, Message, Transport
from .pieces import Piece, Slices, Strip, shape_of


class Pipe:
    """Blocks of bytes between rank 0 and one other rank at a time; the buffer is made once."""

    def __init__(self, world: Transport, nbytes: int) -> None:
        self.world = world
        self.buffer = np.zeros(nbytes, np.uint8)
        self._ways: dict[tuple[int, bool], Exchange] = {}

    def put(self, peer: int, block: np.ndarray) -> None:
        """Send a block to `peer`, which has to `get` one of the same shape and dtype."""
        self._cells(block.shape, block.dtype)[...] = block
        self._run(peer, True)

    def get(self, peer: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return the block that `peer` puts; valid until the next one."""
        self._run(peer, False)
        return self._cells(shape, dtype)

    def _cells(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        nbytes = prod(shape) * dtype.itemsize
        return self.buffer[:nbytes].view(dtype).reshape(shape)

    def _run(self, peer: int, sends: bool) -> None:
        if (peer, sends) not in self._ways:
            message = [Message(peer, self.buffer, (slice(0, len(self.buffer)),))]
            self._ways[peer, sends] = self.world.exchange(message if sends else [], [] if sends else message)
        self._ways[peer, sends].run()


def collect(world: Transport, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, Slices, np.ndarray]]:
    """Yield all blocks on rank 0: piece, place in the whole, values; collective, to be exhausted on every rank.

    On the other ranks it yields nothing. A block's values are valid until the next one. Of parts that several ranks
    have, as replicas do, the first comes.
    """
    for piece, pipe in _with_pipes(world, pieces):
        for rank in _distinct(piece.places):
            for here, place in piece.blocks(rank):
                if rank == 0:
                    if world.rank == 0:
                        yield piece, place, piece.array[here]
                elif world.rank == 0:
                    yield piece, place, pipe.get(rank, shape_of(place), piece.dtype)
                elif world.rank == rank:
                    pipe.put(0, piece.array[here])


def spread(world: Transport, pieces: Iterable[Piece], read: Callable[[Piece, Slices], np.ndarray]) -> None:
    """Fill every rank's part from `read(piece, place)`, which is called on rank 0 alone; collective.

    What has one place is read once and given to all ranks. If `read` raises, so does this, on rank 0, once the other
    ranks have got something.
    """
    failure: Exception | None = None

    def block(piece: Piece, place: Slices) -> np.ndarray:
        nonlocal failure
        if failure is None:
            try:
                return np.asarray(read(piece, place), piece.dtype).reshape(shape_of(place))
            except Exception as problem:
                failure = problem
        return np.zeros(shape_of(place), piece.dtype)

    for piece, pipe in _with_pipes(world, pieces):
        if len(piece.places) == 1:
            for here, place in piece.blocks(0):
                piece.array[here] = world.bcast(block(piece, place) if world.rank == 0 else None)
            continue
        for rank in range(world.size):
            for here, place in piece.blocks(rank):
                if rank == 0:
                    if world.rank == 0:
                        piece.array[here] = block(piece, place)
                elif world.rank == 0:
                    pipe.put(rank, block(piece, place))
                elif world.rank == rank:
                    piece.array[here] = pipe.get(0, shape_of(place), piece.dtype)
    if failure is not None:
        raise failure


def _with_pipes(world: Transport, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, Pipe]]:
    """Yield each piece with a pipe that is wide enough for its blocks."""
    pipe = Pipe(world, 0)
    for piece in pieces:
        if piece.largest != len(pipe.buffer):
            pipe = Pipe(world, piece.largest)
        yield piece, pipe


def _distinct(places: Sequence[Sequence[Strip]]) -> list[int]:
    """Return the ranks whose part no earlier rank has."""
    texts = [str(place) for place in places]
    return [rank for rank, text in enumerate(texts) if texts.index(text) == rank]
