"""The exchange of one view's halo: cells are gathered from their owners; the adjoint scatters gradients, and adds.

This is all that a policy sees; it knows neither boxes nor messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..arrays.namespace import namespace
from ..backends import Kernels
from ..comm import Exchange, Message
from ..geometry import Box, HaloPlan, Lattice
from .padding import fill_locally, return_locally

Shape = tuple[int, ...]
Region = tuple[int, tuple[slice, ...]]
"""The rank at the other end of a message, and where its cells are in the buffer."""


class Phase(NamedTuple):
    """Purpose of a pass: training or not, the step's number, and the first of the replica's samples in the batch."""

    training: bool = True
    step: int = 0
    first_sample: int = 0


WHOLE = Phase()
"""Of calls that do not say."""


class Buffer(Protocol):
    """Interface that an exchange needs of its buffer."""

    plan: HaloPlan
    kernels: Kernels
    phase: Phase
    cells: Any
    gradient: Any

    def index(self, cells: Box | Lattice) -> tuple[slice, ...]:
        """Return where cells of the image lie in it."""

    def planned(self, halo: HaloExchange, sends: list[Message], receives: list[Message]) -> Exchange:
        """Return an exchange of messages, which the array's record has from now on."""


class HaloExchange:
    """Exchange of cells between tiles for one view, in one pass, for one batch size; collective.

    Parameters
    ----------
    buffer : Buffer
    direction : 'forward' or 'backward'
        The pass.
    adds : bool
        False: cells of other tiles come into the view. True, the adjoint: their gradients go to the owners, who add.

    Attributes
    ----------
    memory : dict
        Belongs to the policy; empty at first.
    """

    def __init__(self, buffer: Buffer, direction: str, adds: bool, memory: dict[str, Any]) -> None:
        self.buffer, self.direction, self.adds, self.memory = buffer, direction, adds, memory
        owned = [(piece.peer, buffer.index(piece.source)) for piece in buffer.plan.sends]
        ghosts = [(piece.peer, buffer.index(piece.target)) for piece in buffer.plan.receives]
        self.sends, self.receives = (ghosts, owned) if adds else (owned, ghosts)

    @property
    def training(self) -> bool:
        """Whether the pass at work trains; in evaluation there is not a step before."""
        return self.buffer.phase.training

    @property
    def step(self) -> int:
        """Number of the training step."""
        return self.buffer.phase.step

    @property
    def array(self) -> Any:
        """The buffer's cells, or their gradients."""
        return self.buffer.gradient if self.adds else self.buffer.cells

    def exchange(self) -> None:
        """Send and receive every cell, exactly."""
        if self.adds or self.buffer.kernels.packs:
            self._packed.start(self.outgoing())
            self.unpack(self._packed.wait())
        else:
            self._direct.run()

    def drop(self) -> None:
        """Nothing crosses: cells of other tiles are zero, or gradients of theirs are forgotten."""
        for _, cells in () if self.adds else self.receives:
            self.array[cells] = 0

    def fill(self, mode: str) -> None:
        """Fill cells of other tiles from the own ones ('zeros', 'reflect', 'replicate'), or do the adjoint of that.

        'zeros' means the window's fill value; where that is infinite (max pooling), the nearest own cell.
        """
        (return_locally if self.adds else fill_locally)(self.array, self.buffer.plan, self.buffer.index, mode)

    def outgoing(self) -> list[Any]:
        """Return the cells (n, *cells, C) that others wait for, one array for each message; not copies."""
        array = self.array
        return [array[cells] for _, cells in self.sends]

    def unpack(self, messages: Sequence[Any]) -> None:
        """Put arrays in the place of what others would send, one for each message; gradients are added."""
        array, boxes, kernels = self.array, [cells for _, cells in self.receives], self.buffer.kernels
        places = [array[box] for box in boxes]
        messages = [message.reshape(place.shape) for message, place in zip(messages, places, strict=True)]
        if self.adds:
            kernels.add_boxes(array, boxes, messages)
        else:
            kernels.copy_each(messages, places)

    def packed(self, shape: Callable[[Shape], Shape] | None = None, dtype: Any = None) -> PackedExchange:
        """Return new messages of `shape(a message's shape)` and `dtype`; default: those of the cells."""
        return PackedExchange(self, shape, dtype)

    @cached_property
    def _direct(self) -> Exchange:
        """Straight from array to array."""
        ends = ([Message(peer, self.array, cells) for peer, cells in part] for part in (self.sends, self.receives))
        return self.buffer.planned(self, *ends)

    @cached_property
    def _packed(self) -> PackedExchange:
        return self.packed()


class PackedExchange:
    """Messages through contiguous buffers, so that they may change type or size, or travel while the step goes on.

    Attributes
    ----------
    outgoing, incoming : flat arrays
        What leaves and what has arrived, message after message.
    """

    def __init__(self, halo: HaloExchange, shape: Callable[[Shape], Shape] | None = None, dtype: Any = None) -> None:
        self.kernels = halo.buffer.kernels
        self.outgoing, self.sends, sends = _messages(halo, halo.sends, shape, dtype)
        self.incoming, self.receives, receives = _messages(halo, halo.receives, shape, dtype)
        self.exchange = halo.buffer.planned(halo, sends, receives)

    def start(self, messages: Sequence[Any] | None = None) -> None:
        """Send copies of these arrays, one for each message, or what `outgoing` holds; they travel until `wait`."""
        if messages is not None:
            self.kernels.copy_each(messages, self.sends)
        self.exchange.start()

    def wait(self) -> list[Any]:
        """Return what has arrived, an array for each message; valid until the next `start`."""
        self.exchange.finish()
        return self.receives


def _messages(
    halo: HaloExchange, regions: Sequence[Region], shape: Callable[[Shape], Shape] | None, dtype: Any
) -> tuple[Any, list[Any], list[Message]]:
    """Return a flat array, its parts, one for each message, and the messages."""
    cells = halo.buffer.cells
    shapes = [cells[where].shape for _, where in regions]
    shapes = shapes if shape is None else [shape(each) for each in shapes]
    ends = list(accumulate(map(prod, shapes), initial=0))
    flat = namespace(cells).zeros((ends[-1],), np.dtype(dtype or cells.dtype))
    parts = [flat[lo:hi].reshape(each) for (lo, hi), each in zip(pairwise(ends), shapes, strict=True)]
    cuts = [(slice(lo, hi),) for lo, hi in pairwise(ends)]
    return flat, parts, [Message(peer, flat, cut) for (peer, _), cut in zip(regions, cuts, strict=True)]
