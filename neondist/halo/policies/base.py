"""Base class of exchange policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from ...errors import PlanMismatchError
from ...registry import Registered
from ...terminal.console import counted
from ..exchange import HaloExchange

Fill: TypeAlias = Literal["zeros", "reflect", "replicate"]
"""Ways of filling cells of other tiles that are not exchanged."""


class ExchangePolicy(Registered, ABC):
    """A border scheme: the exchange of halo cells in fprop (`forward`) and of their gradients in bprop (`backward`).

    The object has no state, because all layers of a model may share it; state is kept in `halo.memory`.

    Attributes
    ----------
    exact : bool
        True if outputs and gradients equal those of one process.
    formula : str
        Message volume for n samples, c channels, an inner tile of h x w cells and a window of radius O, as text.
    """

    exact = False
    #: exchange of exact gradients: 'scatter', or, for convolutions, 'gather' or 'auto'
    gradients = "scatter"
    #: names of flat arrays in `halo.memory` that later training steps need, for checkpoints
    state_names: Sequence[str] = ()
    formula = "each way H = n c (2 O (h + w) + 4 O²) elements"

    @property
    def is_stateful(self) -> bool:
        """Whether the exchanges of a training pass depend on earlier steps, and so cannot simply be repeated."""
        return bool(self.state_names) or type(self).get_state is not ExchangePolicy.get_state

    @property
    def reuses_cells(self) -> bool:
        """Whether a training step uses cells of earlier steps."""
        return self.is_stateful

    @abstractmethod
    def forward(self, halo: HaloExchange) -> None:
        """Exchange halo cells."""

    @abstractmethod
    def backward(self, halo: HaloExchange) -> None:
        """Exchange gradients of halo cells."""

    def get_state(self, halo: HaloExchange) -> list[Any]:
        """Return the part of `halo.memory` that later training steps need, as flat arrays of the cells' dtype.

        Checkpoints store the arrays, and a skipped step restores them. All ranks return the same number of arrays.
        """
        return [halo.memory[name] for name in self.state_names if name in halo.memory]

    def set_state(self, halo: HaloExchange, arrays: Sequence[Any]) -> None:
        """Restore `halo.memory` from a result of `get_state` on the same grid; may start messages.

        No messages are pending when this method is called. If `arrays` is empty, clear the state.
        """
        for name in self.state_names:
            halo.memory.pop(name, None)
        if arrays:
            halo.memory.update(zip(self.state_names, arrays, strict=True))

    def message_bytes(self, num_elements: int, itemsize: int, direction: str) -> int:
        """Return the size in bytes of a message for this number of halo elements.

        Parameters
        ----------
        itemsize : int
            Bytes per element.
        direction : 'forward' or 'backward'
        """
        return num_elements * itemsize

    def exchanges_per_call(self, direction: str) -> tuple[int, float, int]:
        """Return the number of exchanges that a call of `forward`, or of `backward`, starts.

        Returns
        -------
        least, mean, most
            The mean is over many training steps.
        """
        return 1, 1, 1

    def check_message_sizes(self, elements: Sequence[int], sent: Sequence[int], itemsize: int, direction: str) -> None:
        """Raise PlanMismatchError if messages for these numbers of elements differ in size from `message_bytes`."""
        declared_bytes = [self.message_bytes(n, itemsize, direction) for n in elements]
        if list(sent) != declared_bytes:
            raise PlanMismatchError(
                f"scheme {type(self).__name__} sends messages of {list(sent)} bytes in {direction}, but its"
                f" message_bytes returns {declared_bytes}; make them agree (docs/adding_a_scheme.md)"
            )

    def check_exchange_count(self, count: int, direction: str) -> None:
        """Raise PlanMismatchError if the number of exchanges started by a call differs from `exchanges_per_call`."""
        min_count, _, max_count = self.exchanges_per_call(direction)
        if not min_count <= count <= max_count:
            times = counted(count, "time")
            raise PlanMismatchError(
                f"scheme {type(self).__name__} has exchanged {times} in one call of {direction}, but its"
                f" exchanges_per_call declares {min_count} to {max_count}; make them agree (docs/adding_a_scheme.md)"
            )

    def mean_bytes(self, messages: Sequence[int], itemsize: int, direction: str) -> float:
        """Return the bytes of messages for these numbers of elements, averaged over many training steps."""
        return self.exchanges_per_call(direction)[1] * sum(self.message_bytes(n, itemsize, direction) for n in messages)
