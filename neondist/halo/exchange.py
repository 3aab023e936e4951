"""Halo exchange of one view: gathering of halo cells from their owners, and the adjoint, which scatters and adds.

Policies use this interface, and depend on neither boxes nor messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..arrays.namespace import namespace
from ..backends import Kernels
from ..comm import Exchange, Message
from ..geometry import Box, HaloPlan, Lattice
from .padding import add_gradients_locally, fill_locally

Shape = tuple[int, ...]
Region = tuple[int, tuple[slice, ...]]
"""Peer of a message, and the index of its cells in the buffer."""


class HaloRecord:
    """Halo cells that a pass has received under stateful schemes, which a repeated pass reuses."""

    def __init__(self, results: Mapping[Any, Sequence[Any]] | None = None) -> None:
        self._results: dict[Any, list[Any]] = {}
        self._remaining = None if results is None else {key: iter(arrays) for key, arrays in results.items()}

    def repeated(self) -> HaloRecord:
        """Return the record for a repeated pass."""
        return HaloRecord(self._results)

    def exchange_once(
        self, key: Any, exchange: Callable[[], None], save: Callable[[], Any], restore: Callable[[Any], None]
    ) -> None:
        """Exchange and save the received cells, or restore them in a repeated pass, in the order of calls."""
        saved = None if self._remaining is None else next(self._remaining.get(key, iter(())), None)
        if saved is not None:
            restore(saved)
            return
        exchange()
        if self._remaining is None:
            self._results.setdefault(key, []).append(save())


class Phase(NamedTuple):
    """Purpose of a pass.

    Attributes
    ----------
    training : bool
    step : int
        Number of the training step.
    first_sample : int
        The replica's first sample in the batch.
    record : HaloRecord or None
        Received cells of stateful schemes, if the pass may be repeated.
    """

    training: bool = True
    step: int = 0
    first_sample: int = 0
    record: HaloRecord | None = None

    def repeated(self) -> Phase:
        """Return the phase in which a pass is repeated."""
        return self if self.record is None else self._replace(record=self.record.repeated())


DEFAULT_PHASE = Phase()  # for calls without a phase


class ExchangeBuffer(Protocol):
    """Interface that an exchange requires of its buffer."""

    plan: HaloPlan
    kernels: Kernels
    phase: Phase
    cells: Any
    gradient: Any

    def index(self, cells: Box | Lattice) -> tuple[slice, ...]:
        """Return the index, in the buffer, of cells given in image coordinates."""

    def create_exchange(self, halo: HaloExchange, sends: list[Message], receives: list[Message]) -> Exchange:
        """Return a new exchange of messages, and record it."""


class HaloExchange:
    """Exchange of cells between tiles for one view, in one pass, for one batch size. Collective.

    Parameters
    ----------
    buffer : ExchangeBuffer
    direction : 'forward' or 'backward'
        The pass.
    adds : bool
        False: gather cells of other tiles. True (the adjoint): send their gradients to the owners, which add them.

    Attributes
    ----------
    memory : dict
        State of the policy; initially empty.
    """

    def __init__(self, buffer: ExchangeBuffer, direction: str, adds: bool, memory: dict[str, Any]) -> None:
        self.buffer, self.direction, self.adds, self.memory = buffer, direction, adds, memory
        owned_regions = [(piece.peer, buffer.index(piece.source)) for piece in buffer.plan.sends]
        ghost_regions = [(piece.peer, buffer.index(piece.target)) for piece in buffer.plan.receives]
        self.sends, self.receives = (ghost_regions, owned_regions) if adds else (owned_regions, ghost_regions)

    @property
    def training(self) -> bool:
        """Whether the current pass is a training pass; evaluation has no previous step."""
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
        if self.adds or self.buffer.kernels.packs_copies:
            self._packed_exchange.start(self.outgoing())
            self.unpack(self._packed_exchange.wait())
        else:
            self._unpacked_exchange.run()

    def drop(self) -> None:
        """Send nothing: set cells of other tiles to zero, or drop their gradients."""
        for _, cells in () if self.adds else self.receives:
            self.array[cells] = 0

    def fill(self, mode: str) -> None:
        """Fill cells of other tiles from the tile's own cells ('zeros', 'reflect', 'replicate'), or run the adjoint.

        'zeros' stands for the window's fill value or, if that is infinite (max pooling), the nearest own cell.
        """
        (add_gradients_locally if self.adds else fill_locally)(self.array, self.buffer.plan, self.buffer.index, mode)

    def outgoing(self) -> list[Any]:
        """Return views (n, *cells, C) of the cells to send, one array for each message."""
        array = self.array
        return [array[cells] for _, cells in self.sends]

    def unpack(self, messages: Sequence[Any]) -> None:
        """Store arrays, one for each message, as if they had been received; gradients are added."""
        array, target_indices, kernels = self.array, [cells for _, cells in self.receives], self.buffer.kernels
        target_cells = [array[box] for box in target_indices]
        messages = [message.reshape(place.shape) for message, place in zip(messages, target_cells, strict=True)]
        if self.adds:
            kernels.add_boxes(array, target_indices, messages)
        else:
            kernels.copy_each(messages, target_cells)

    def packed(self, message_shape: Callable[[Shape], Shape] | None = None, dtype: Any = None) -> PackedExchange:
        """Return a packed exchange with messages of `message_shape(shape)` and `dtype`; default: those of the cells."""
        return PackedExchange(self, message_shape, dtype)

    @cached_property
    def _unpacked_exchange(self) -> Exchange:
        """Exchange between the arrays themselves, without packing."""
        ends = ([Message(peer, self.array, cells) for peer, cells in part] for part in (self.sends, self.receives))
        return self.buffer.create_exchange(self, *ends)

    @cached_property
    def _packed_exchange(self) -> PackedExchange:
        return self.packed()


class PackedExchange:
    """Exchange through contiguous buffers, for messages of other dtypes and sizes, and for overlap with computation.

    Attributes
    ----------
    outgoing, incoming : flat arrays
        Concatenated outgoing and received messages.
    """

    def __init__(self, halo: HaloExchange, shape: Callable[[Shape], Shape] | None = None, dtype: Any = None) -> None:
        self.kernels = halo.buffer.kernels
        self.outgoing, self.sends, sends = _create_messages(halo, halo.sends, shape, dtype)
        self.incoming, self.receives, receives = _create_messages(halo, halo.receives, shape, dtype)
        self.exchange = halo.buffer.create_exchange(halo, sends, receives)

    def start(self, messages: Sequence[Any] | None = None) -> None:
        """Start sending copies of arrays, one per message, or the contents of `outgoing`; call `wait` to finish."""
        if messages is not None:
            self.kernels.copy_each(messages, self.sends)
        self.exchange.start()

    def wait(self) -> list[Any]:
        """Return the received arrays, one for each message, valid until the next `start`."""
        self.exchange.finish()
        return self.receives


def _create_messages(
    halo: HaloExchange, regions: Sequence[Region], message_shape: Callable[[Shape], Shape] | None, dtype: Any
) -> tuple[Any, list[Any], list[Message]]:
    """Return a flat array, its parts (one for each message), and the messages."""
    cells = halo.buffer.cells
    shapes = [cells[index].shape for _, index in regions]
    shapes = shapes if message_shape is None else [message_shape(size) for size in shapes]
    message_ends = list(accumulate(map(prod, shapes), initial=0))
    flat = namespace(cells).zeros((message_ends[-1],), np.dtype(dtype or cells.dtype))
    message_arrays = [flat[lo:hi].reshape(size) for (lo, hi), size in zip(pairwise(message_ends), shapes, strict=True)]
    slices = [(slice(lo, hi),) for lo, hi in pairwise(message_ends)]
    return flat, message_arrays, [Message(peer, flat, cut) for (peer, _), cut in zip(regions, slices, strict=True)]
