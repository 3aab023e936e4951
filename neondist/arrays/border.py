"""How the borders of one array are treated: its scheme, what that remembers, and what was sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..comm import Exchange

if TYPE_CHECKING:
    from .way import Way


class Carrier(Protocol):
    """Who fills the cells of other tiles in fprop, and what returns in bprop; the schemes are such."""

    def forward(self, way: Way) -> None:
        """Carry cells, or what stands for them, over the borders in fprop."""

    def backward(self, way: Way) -> None:
        """Carry their gradients in bprop."""

    def remembered(self, way: Way) -> list[Any]:
        """Return what later steps need of `way.memory`."""

    def remember(self, way: Way, arrays: Sequence[Any]) -> None:
        """Fill `way.memory` from that."""


class Exact:
    """Every cell travels, both ways."""

    def forward(self, way: Way) -> None:
        """Exchange."""
        way.exchange()

    backward = forward

    def remembered(self, way: Way) -> list[Any]:
        """Return nothing."""
        return []

    def remember(self, way: Way, arrays: Sequence[Any]) -> None:
        """Do nothing."""


@dataclass
class Border:
    """What the frames of one array share.

    Attributes
    ----------
    scheme : Carrier
    reverse : bool
        True where the halo adds in fprop and is fetched in bprop, as under a transposed convolution.
    memory : dict of (samples, direction) to dict
        What the scheme keeps from step to step.
    booked : list of (direction, Exchange)
        Every exchange of the array, 'forward' or 'backward'; each counts its runs.
    """

    scheme: Carrier = field(default_factory=Exact)
    reverse: bool = False
    memory: dict[tuple[int, str], dict[str, Any]] = field(default_factory=dict)
    booked: list[tuple[str, Exchange]] = field(default_factory=list)

    def carry(self, way: Way) -> None:
        """Let the scheme carry cells or gradients this way."""
        (self.scheme.forward if way.direction == "forward" else self.scheme.backward)(way)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent."""
        return sum(exchange.runs * exchange.bytes_sent for _, exchange in self.booked)

    def settle(self) -> None:
        """Wait for all that is under way: nothing may arrive any more where a buffer has been."""
        for _, exchange in self.booked:
            exchange.finish()
