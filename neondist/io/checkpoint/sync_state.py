"""State of gradient synchronisation in a checkpoint: error feedback of each rank, and replicated state.

If the number of ranks has changed, each rank restores the sum over a range of the ranks in the file. This preserves the
sum over all ranks, which is the term added to the next gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...comm import Transport
from ...errors import DataError
from ...geometry import Box, part_range
from ...parallel import SyncState
from .pieces import ArrayPart
from .read import CheckpointReader

SYNC_GROUP = "synchronisation"  # group of the arrays in the file
MAX_RANKS = 1 << 20  # limit on the number of ranks in a file


def sync_state_parts(states: Sequence[SyncState], world: Transport) -> list[ArrayPart]:
    """Return this rank's parts of the states; arrays that differ across ranks get a leading rank axis."""
    return [
        _sync_state_part(state, state.array if state.same_on_all_ranks else state.array[None], world)
        for state in states
    ]


def restore_sync_state(file: CheckpointReader, states: Sequence[SyncState], world: Transport) -> str:
    """Restore the states; keep replicated states that do not match, and set missing states of ranks to 0. Collective.

    Returns
    -------
    str
        Message on dropped state; '' if there is none.

    Raises
    ------
    DataError
        On every rank, if the shape of a state that is not replicated does not match the model's parameter.
    """
    shapes = file.contents.group(SYNC_GROUP)
    state_names = {state.name for state in states}
    dropped = sorted(name for name in shapes if name not in state_names and name.endswith("/error_feedback"))
    for state in states:
        shape = shapes.get(state.name)
        if state.same_on_all_ranks:
            if shape == state.array.shape:
                file.fill_parts([_sync_state_part(state, state.array, world)])
            continue
        if shape is not None and (shape[1:] != state.array.shape or not 0 < shape[0] <= MAX_RANKS):
            raise DataError(
                f"{file.contents.path}: '{SYNC_GROUP}/{state.name}' has shape {list(shape)}, expected"
                f" {['ranks', *state.array.shape]}; specify another file, or run without resume"
            )
        num_writers = 0 if shape is None else shape[0]
        lo, hi = part_range(num_writers, world.size, world.rank)
        own_arrays = np.zeros((hi - lo, *state.array.shape), state.array.dtype)
        if num_writers:
            file.fill_parts([_sync_state_part(state, own_arrays, world, num_writers)])
        state.array[...] = own_arrays.sum(axis=0)
    names = ", ".join(name.removesuffix("/error_feedback") for name in dropped)
    return f"error feedback is dropped for parameters that are no longer compressed: {names}" if dropped else ""


def _sync_state_part(
    state: SyncState, array: np.ndarray, world: Transport, writer_count: int | None = None
) -> ArrayPart:
    shape = state.array.shape
    if state.same_on_all_ranks:
        return ArrayPart(f"{SYNC_GROUP}/{state.name}", shape, array, [Box.of(shape)])
    num_writers, origin = world.size if writer_count is None else writer_count, (0,) * len(shape)
    writer_ranges = (part_range(num_writers, world.size, rank) for rank in range(world.size))
    boxes = [Box((lo, *origin), (hi, *shape)) for lo, hi in writer_ranges]
    return ArrayPart(f"{SYNC_GROUP}/{state.name}", (num_writers, *shape), array, boxes)
