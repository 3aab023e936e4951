"""The plan of a module in an experiment, as runs and `neondist check` ask of plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..geometry import GridShape
from ..plan.blocks import COPIES
from .graph import Value
from .plan import TorchPlan


@dataclass(frozen=True)
class ModulePlan:
    """What a run, and `neondist check`, asks of a plan; it has no layers of neondist."""

    grid: GridShape
    input_shape: tuple[int, ...]
    batch_size: int
    steps: TorchPlan
    weights: int
    memory: int | None = None
    blocks: str = ""
    streams = False
    wide_tiles = None

    @property
    def needed(self) -> int:
        """The bytes of a rank in a pass without a way back, weights, images and outputs included."""
        ends = self.steps.inputs[0], self.output.id
        return self.weights + self.steps.peak()[0] + COPIES * sum(self.steps.values[end].nbytes for end in ends)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The first output's global shape, channels last, without the batch."""
        shape = self.output.shape[1:]
        return (*shape[1:], *shape[:1])

    @property
    def output(self) -> Value:
        """The first output that is a tensor."""
        return self.steps.values[next(out for out in self.steps.outputs if isinstance(out, int))]

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def costs(self) -> list[Any]:
        """Return nothing: of each layer."""
        return []

    def table(self) -> str:
        """Return the steps that communicate."""
        return f"{self.steps.describe()}{self.blocks}"

    describe = table
