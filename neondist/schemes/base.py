"""What every scheme says of itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from ..arrays import Way
from ..machine import Figures
from ..registry import Registered

Fill: TypeAlias = Literal["zeros", "reflect", "replicate"]
"""What may stand for cells of other tiles."""


class Scheme(Registered, ABC):
    """Decides how cells of other tiles reach a view in fprop (`forward`), and what returns in bprop (`backward`).

    A scheme keeps nothing itself, since one object may serve all layers of a model: `way.memory` is for that.

    Attributes
    ----------
    exact : bool
        True if outputs and gradients are those of one process.
    formula : str
        What is sent, in words: n samples, c channels, an inner tile of h x w cells, a window of radius O.
    """

    exact = False
    #: how many layers with windows make a run that computes cells of other tiles; 1: there are no runs
    run = 1
    #: whether tiles of the image are read with all that they depend on
    reads_wide = False
    #: how layers that normalise over the whole image add up, where they are in a run: None refuses them
    statistics: str | None = "global"
    #: how exact gradients reach other tiles: 'scatter', or 'gather' or 'auto', which a convolution understands
    way_back = "scatter"
    #: names of flat arrays (`way.joined`) in `way.memory` that later training steps need, for checkpoints
    remembers: Sequence[str] = ()
    formula = "each way H = n c (2 O (h + w) + 4 O²) numbers"

    @property
    def has_memory(self) -> bool:
        """Whether it keeps something from one training step for the next."""
        return bool(self.remembers) or type(self).remembered is not Scheme.remembered

    @abstractmethod
    def forward(self, way: Way) -> None:
        """Carry cells over the border."""

    @abstractmethod
    def backward(self, way: Way) -> None:
        """Carry gradients over the border."""

    def remembered(self, way: Way) -> list[Any]:
        """Return what later training steps need of `way.memory`: flat arrays of the cells' dtype.

        They go into checkpoints, and are put back where a step is skipped. All ranks return as many.
        """
        return [way.memory[name] for name in self.remembers if name in way.memory]

    def remember(self, way: Way, arrays: Sequence[Any]) -> None:
        """Make `way.memory` what it was when `remembered` returned this, on the same grid; it may start messages.

        Nothing is under way then. Without arrays there was nothing to remember.
        """
        for name in self.remembers:
            way.memory.pop(name, None)
        if arrays:
            way.memory.update(zip(self.remembers, arrays, strict=True))

    def figures(self, ranks: int, samples: int | None = None) -> Figures | None:
        """Return the figures from which a planner chooses the runs; None: they are as long as `run`.

        Parameters
        ----------
        ranks : int
            Of the grid.
        samples : int, optional
            Of a replica in a step.
        """
        return None

    def forward_bytes(self, messages: Sequence[int], itemsize: int) -> float:
        """Return the bytes that messages of so many numbers take in fprop, in the mean of many training steps."""
        return sum(messages) * itemsize

    def backward_bytes(self, messages: Sequence[int], itemsize: int) -> float:
        """Return the same for bprop."""
        return self.forward_bytes(messages, itemsize)
