"""The two ways over a tile's border: cells are fetched, and gradients go home.

This is what a scheme works with; it knows neither boxes nor messages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ..comm import Exchange, Message
from ..errors import ShapeError
from ..geometry import Piece
from .courier import Courier, Shape
from .local_fill import fill_locally, return_locally

if TYPE_CHECKING:
    from .frame import Frame


class Way(ABC):
    """One way over the border of one view, for one batch size.

    Attributes
    ----------
    sends, receives : pieces of the plan, one for each message
    memory : dict
        Belongs to the scheme; empty at first.
    """

    def __init__(self, frame: Frame, sends: Sequence[Piece], receives: Sequence[Piece], forward: bool) -> None:
        self.frame, self.sends, self.receives = frame, sends, receives
        self.direction = "forward" if forward else "backward"
        self.memory: dict[str, Any] = frame.border.memory.setdefault((frame.samples, self.direction), {})

    @property
    def training(self) -> bool:
        """Whether the pass at work trains; in evaluation there is no step before."""
        return self.frame.phase.training

    @property
    def step(self) -> int:
        """Number of the training step."""
        return self.frame.phase.step

    @abstractmethod
    def exchange(self) -> None:
        """Send and receive every cell, exactly."""

    @abstractmethod
    def drop(self) -> None:
        """Nothing crosses the border: cells of other tiles are zero, or gradients of theirs are forgotten."""

    @abstractmethod
    def fill(self, mode: str) -> None:
        """Fill cells of other tiles from the own ones ('zeros', 'reflect', 'replicate'); on the way home, its adjoint.

        'zeros' means the window's fill value; where that is infinite (max pooling), the nearest own cell.
        """

    @abstractmethod
    def outgoing(self) -> list[Any]:
        """Return the cells (n, *cells, C) that others wait for, one array for each message; not copies."""

    @abstractmethod
    def place(self, arrived: Sequence[Any]) -> None:
        """Put arrays in the place of what others would send, one for each message; on the way home, add them."""

    def courier(self, shape: Callable[[Shape], Shape] | None = None, dtype: Any = None) -> Courier:
        """Return a new courier, which carries arrays of `shape(message's shape)` and `dtype`; keep it in `memory`."""
        return Courier(self, shape, dtype)

    def joined(self, arrays: Sequence[Any]) -> Any:
        """Return arrays, one for each message, as one flat array, to be kept."""
        frame = self.frame
        parts = [frame.backend.to_host(array).ravel() for array in arrays]
        return np.concatenate([np.empty(0, frame.dtype), *parts])

    def parted(self, flat: Any, pieces: Sequence[Piece]) -> list[Any]:
        """Return the arrays (n, *cells, C) that were joined, those of `sends` or of `receives`."""
        shapes = [self.frame.strip_shape(piece) for piece in pieces]
        ends = np.cumsum([prod(shape) for shape in shapes], dtype=int)
        if len(flat) != ends[-1:].sum():
            raise ShapeError(f"{len(flat)} numbers for messages of {ends[-1:].sum()}")
        return [part.reshape(shape) for part, shape in zip(np.split(flat, ends[:-1]), shapes, strict=False)]

    def booked(self, exchange: Exchange) -> Exchange:
        """Return the exchange, entered into the array's books."""
        exchange.observers = self.frame.observers
        self.frame.border.booked.append((self.direction, exchange))
        return exchange


class Fetch(Way):
    """Cells of other tiles come into the view."""

    def exchange(self) -> None:
        """Fetch every cell, straight from array to array."""
        self._direct.run()

    @cached_property
    def _direct(self) -> Exchange:
        frame = self.frame
        ends = (
            [Message(piece.peer, frame.buffer, frame.index(box)) for piece, box in pieces]
            for pieces in ([(p, p.source) for p in self.sends], [(p, p.target) for p in self.receives])
        )
        return self.booked(frame.tiles.exchange(*ends))

    def drop(self) -> None:
        """Let cells of other tiles be zero."""
        for piece in self.receives:
            self.frame.buffer[self.frame.index(piece.target)] = 0

    def fill(self, mode: str) -> None:
        """Fill cells of other tiles from the own ones."""
        fill_locally(self.frame, mode)

    def outgoing(self) -> list[Any]:
        """Return own cells that other tiles see."""
        return [self.frame.buffer[self.frame.index(piece.source)] for piece in self.sends]

    def place(self, arrived: Sequence[Any]) -> None:
        """Put cells into the view."""
        for piece, cells in zip(self.receives, arrived, strict=True):
            target = self.frame.index(piece.target)
            self.frame.buffer[target] = cells.reshape(self.frame.buffer[target].shape)


class Home(Way):
    """Gradients of cells of other tiles go to their owners, who add them."""

    def exchange(self) -> None:
        """Send every gradient home, and add what comes."""
        self._usual.start(self.outgoing())
        self.place(self._usual.finish())

    @cached_property
    def _usual(self) -> Courier:
        return self.courier()

    def drop(self) -> None:
        """Forget the gradients of cells of other tiles."""

    def fill(self, mode: str) -> None:
        """Add the gradients of the cells that were filled to the own cells that they came from."""
        return_locally(self.frame, mode)

    def outgoing(self) -> list[Any]:
        """Return gradients of cells of other tiles."""
        return [self.frame.gradient[self.frame.index(piece.target)] for piece in self.sends]

    def place(self, arrived: Sequence[Any]) -> None:
        """Add gradients that other tiles have of own cells."""
        for piece, cells in zip(self.receives, arrived, strict=True):
            own = self.frame.gradient[self.frame.index(piece.source)]
            own += cells.reshape(own.shape)
