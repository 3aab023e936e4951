"""What every exchange policy says of itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from ...errors import PlanError
from ...registry import Registered
from ..exchange import HaloExchange

Fill: TypeAlias = Literal["zeros", "reflect", "replicate"]
"""What may stand for cells of other tiles."""


class ExchangePolicy(Registered, ABC):
    """A border scheme: how cells of other tiles reach a view in fprop (`forward`), and what returns in bprop.

    A policy keeps nothing itself, since one object may serve all layers of a model: `halo.memory` is for that.

    Attributes
    ----------
    exact : bool
        True if outputs and gradients are those of one process.
    formula : str
        What is sent, in words: n samples, c channels, an inner tile of h x w cells, a window of radius O.
    """

    exact = False
    #: how exact gradients reach other tiles: 'scatter', or 'gather' or 'auto', which a convolution understands
    gradients = "scatter"
    #: names of flat arrays in `halo.memory` that later training steps need, for checkpoints
    remembers: Sequence[str] = ()
    formula = "each way H = n c (2 O (h + w) + 4 O²) numbers"

    @property
    def has_memory(self) -> bool:
        """Whether it keeps something from one training step for the next."""
        return bool(self.remembers) or type(self).remembered is not ExchangePolicy.remembered

    @abstractmethod
    def forward(self, halo: HaloExchange) -> None:
        """Let cells cross."""

    @abstractmethod
    def backward(self, halo: HaloExchange) -> None:
        """Let gradients cross."""

    def remembered(self, halo: HaloExchange) -> list[Any]:
        """Return what later training steps need of `halo.memory`: flat arrays of the cells' dtype.

        They go into checkpoints, and are put back where a step is skipped. All ranks return as many.
        """
        return [halo.memory[name] for name in self.remembers if name in halo.memory]

    def remember(self, halo: HaloExchange, arrays: Sequence[Any]) -> None:
        """Make `halo.memory` what it was when `remembered` returned this, on the same grid; it may start messages.

        Nothing is under way then. Without arrays there was nothing to remember.
        """
        for name in self.remembers:
            halo.memory.pop(name, None)
        if arrays:
            halo.memory.update(zip(self.remembers, arrays, strict=True))

    def message_bytes(self, numbers: int, itemsize: int, direction: str) -> int:
        """Return the bytes of one message that stands for so many numbers of the halo.

        Parameters
        ----------
        itemsize : int
            Bytes of a number.
        direction : 'forward' or 'backward'
        """
        return numbers * itemsize

    def exchanges(self, direction: str) -> tuple[int, float, int]:
        """Return how many exchanges of all messages a call of `forward`, or of `backward`, starts.

        Returns
        -------
        least, mean, most
            The mean is that of many training steps.
        """
        return 1, 1, 1

    def check_messages(self, numbers: Sequence[int], sent: Sequence[int], itemsize: int, direction: str) -> None:
        """Raise PlanError if messages that stand for so many numbers have other bytes than `message_bytes` says."""
        declared = [self.message_bytes(n, itemsize, direction) for n in numbers]
        if list(sent) != declared:
            raise PlanError(
                f"scheme {type(self).__name__} sends messages of {list(sent)} bytes {direction}, but its message_bytes"
                f" says {declared}; make them agree (docs/adding_a_scheme.md)"
            )

    def check_exchanges(self, count: int, direction: str) -> None:
        """Raise PlanError if a call has started another number of exchanges than `exchanges` says."""
        least, _, most = self.exchanges(direction)
        if not least <= count <= most:
            raise PlanError(
                f"scheme {type(self).__name__} has exchanged {count} times in one call {direction}, but its exchanges"
                f" says {least} to {most}; make them agree (docs/adding_a_scheme.md)"
            )

    def mean_bytes(self, messages: Sequence[int], itemsize: int, direction: str) -> float:
        """Return the bytes of messages of so many numbers, in the mean of many training steps."""
        return self.exchanges(direction)[1] * sum(self.message_bytes(n, itemsize, direction) for n in messages)
