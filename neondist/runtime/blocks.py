"""A network at work block after block, on this process alone."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..errors import ConfigError
from ..halo import Phase
from ..layers import Context
from ..plan.blocks import KINDS, BlockPlan
from .arena import Blocks
from .layer_task import LayerTask
from .section import Section
from .strips import on_strip


class Blockwise:
    """Executor of the blocks of a plan.

    Parameters
    ----------
    planned : BlockPlan
    context : Context
        Of the built layers.
    """

    def __init__(self, planned: BlockPlan, context: Context) -> None:
        self.planned, self.context = planned, context
        self._memory = Blocks(1, context.dtype, context.backend)
        self._sections: dict[tuple[int, ...], Section] = {}

    def run(self, number: int, x: Any) -> Any:
        """Return a block of the output (n, *block, C), a new array.

        Parameters
        ----------
        x : array (n, *cells, C)
            The cells of the image that `planned.image(number)` says.
        """
        section = self._section(number)
        (run,) = section.forward([x], [Phase(False, 0, 0)])
        y = run.output.copy()
        run.close()
        return y

    def _section(self, number: int) -> Section:
        kind = self.planned.kind(number)
        section = self._sections.pop(kind, None) or self._made(number)
        self._sections[kind] = section
        if len(self._sections) > KINDS:
            del self._sections[next(iter(self._sections))]
            gc.collect()  # its layers know each other, and hold arrays as large as a block
        return section

    def _made(self, number: int) -> Section:
        planned, context = self.planned.section, self.context
        length = planned.live_ranges(number).length
        if length > self._memory.length:
            self._memory, self._sections = Blocks(1, context.dtype, context.backend), {}
            self._memory.provide(max(length, self.planned.longest))
        inside = replace(context, grid=context.grid.of_strip(self.planned.grid, number))
        made = {
            id(step.layer): on_strip(step.layer, planned.placed[id(step.layer)], number, inside)
            for step in self.planned.graph.steps
            if step.layer is not None
        }
        return Section(planned, inside, number, self._memory, made, _Alone)


class _Alone(LayerTask):
    """A layer that has nothing to reduce in a pass that trains nothing."""

    def combined(self, direction: str, mine: list[Any], counts: Sequence[int]) -> list[Any]:
        """Refuse a partial result."""
        if any(one is not None for one in mine):
            raise ConfigError(f"layer '{self.name}': sums over the whole image; leave out --block")
        return mine
