"""State of gradient synchronisation in a checkpoint: error feedback of each rank, and what is the same on all.

Of other numbers of ranks each takes over the sum of a range of the file's ranks, so that the sum over all ranks, which
is what the next steps add to the gradients, stays the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...comm import Transport
from ...errors import DataError
from ...geometry import Box, split
from ...parallel import SyncState
from .pieces import Piece
from .read import Opened

GROUP = "synchronisation"
"""The group of the arrays in the file."""
MOST = 1 << 20  # ranks


def sync_pieces(states: Sequence[SyncState], world: Transport) -> list[Piece]:
    """Return what each rank writes: arrays that differ over the ranks get an axis of ranks in front."""
    return [_piece(state, state.array if state.replicated else state.array[None], world) for state in states]


def restore_sync(file: Opened, states: Sequence[SyncState], world: Transport) -> str:
    """Fill in what a checkpoint has of these arrays; others become 0, or stay if they are replicated; collective.

    Returns
    -------
    str
        A note on what is dropped; empty if nothing is.

    Raises
    ------
    DataError
        On every rank: an array has another shape than the model's parameter.
    """
    there = file.facts.group(GROUP)
    known = {state.name for state in states}
    dropped = sorted(name for name in there if name not in known and name.endswith("/error_feedback"))
    for state in states:
        shape = there.get(state.name)
        if state.replicated:
            if shape == state.array.shape:
                file.fill([_piece(state, state.array, world)])
            continue
        if shape is not None and (shape[1:] != state.array.shape or not 0 < shape[0] <= MOST):
            raise DataError(
                f"{file.facts.path}: '{GROUP}/{state.name}' has shape {list(shape)}; expected"
                f" {['ranks', *state.array.shape]}, so name another file, or run without --resume"
            )
        writers = 0 if shape is None else shape[0]
        lo, hi = split(writers, world.size, world.rank)
        part = np.zeros((hi - lo, *state.array.shape), state.array.dtype)
        if writers:
            file.fill([_piece(state, part, world, writers)])
        state.array[...] = part.sum(axis=0)
    return f"error feedback is dropped, since these are not compressed: {', '.join(dropped)}" if dropped else ""


def _piece(state: SyncState, array: np.ndarray, world: Transport, writers: int | None = None) -> Piece:
    shape = state.array.shape
    if state.replicated:
        return Piece(f"{GROUP}/{state.name}", shape, array, [Box.of(shape)])
    total, nothing = world.size if writers is None else writers, (0,) * len(shape)
    bounds = (split(total, world.size, rank) for rank in range(world.size))
    boxes = [Box((lo, *nothing), (hi, *shape)) for lo, hi in bounds]
    return Piece(f"{GROUP}/{state.name}", (total, *shape), array, boxes)
