"""Block-wise inference in one process."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

from ..errors import ConfigError
from ..halo import Phase
from ..layers import ModelContext
from ..plan.blocks import MAX_CACHED_BLOCK_KINDS, BlockPlan
from .arena import BlockPool
from .layer_task import LayerTask
from .section import Section
from .strips import section_of_strip_or_block


class BlockwiseExecutor:
    """Executor of the blocks of a plan."""

    def __init__(self, block_plan: BlockPlan, context: ModelContext) -> None:
        self.block_plan, self.context = block_plan, context
        self._pool = BlockPool(1, context.dtype, context.backend)
        self._sections: dict[tuple[int, ...], Section] = {}

    def run(self, block_number: int, x: Any) -> Any:
        """Return a block of the output (n, *block, C), a new array.

        Parameters
        ----------
        x : array (n, *cells, C)
            Cells of the image in `block_plan.input_box(block_number)`.
        """
        section = self._section(block_number)
        (block_pass,) = section.forward([x], [Phase(False, 0, 0)])
        y = block_pass.output.copy()
        block_pass.close()
        return y

    def _section(self, block_number: int) -> Section:
        block_kind = self.block_plan.position_independent_key(block_number)
        section = self._sections.pop(block_kind, None) or self._new_section(block_number)
        self._sections[block_kind] = section
        if len(self._sections) > MAX_CACHED_BLOCK_KINDS:
            del self._sections[next(iter(self._sections))]
            gc.collect()  # reference cycles of layers hold arrays as large as a block
        return section

    def _new_section(self, block_number: int) -> Section:
        planned_section, context = self.block_plan.section, self.context
        num_elements = planned_section.memory_plan(block_number).num_elements
        if num_elements > self._pool.elements_per_sample:
            self._pool, self._sections = BlockPool(1, context.dtype, context.backend), {}
            self._pool.reserve(max(num_elements, self.block_plan.max_network_array_elements))
        return section_of_strip_or_block(planned_section, context, block_number, self._pool, _ReductionRejectingTask)


class _ReductionRejectingTask(LayerTask):
    """Inference task of a layer that must not have reductions."""

    def combine_partials(self, direction: str, partials: list[Any], counts: Sequence[int]) -> list[Any]:
        """Raise ConfigError if there is a partial result."""
        if any(partial is not None for partial in partials):
            raise ConfigError(f"layer '{self.name}' reduces over the whole image, not over a block; leave out --block")
        return partials
