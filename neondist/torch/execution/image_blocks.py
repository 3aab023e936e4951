"""Block-wise computation of a captured module whose output is an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from ...comm import ProcessGrid
from ...geometry import Box
from ...plan.blocks import IMAGE_COPIES, OutputBlocks
from ..capture.capture import lower_program
from ..exchange.mesh_comm import MeshComm
from ..ir.graph import Value
from ..ir.layout import Shape, axes_of
from ..lowering.plan import TorchPlan
from .block_lowering import AxisRanges, BlockLowering, TracedSubgraph, crop_block
from .runner import PlanRunner


class TracedImageModule(TracedSubgraph):
    """Captured module that can be computed in blocks of its first output, an image.

    Parameters
    ----------
    program
        Result of `capture_module` for the module in evaluation mode.
    shape : (1, C, *spatial)
        Shape of the image.
    remedy : str
        Remedy in the message about an operator that cannot be computed block by block.

    Raises
    ------
    UnsupportedOperator
        An operator depends on more than a bounded neighbourhood (the message names the operator, the module's path,
        and the file and line), or the first output is not an image or does not depend on the input.
    """

    def __init__(self, program: Any, shape: Sequence[int], gather_at: Sequence[str], remedy: str) -> None:
        lowering = BlockLowering(len(shape) - 2, remedy)
        mesh = lowering.mesh
        plan, _ = lower_program(program, mesh, 0, [mesh.image_layout(shape)], gather_at, lowering=lowering)
        output = lowering.values[next(out for out in plan.outputs if isinstance(out, int))]
        layout = output.layout
        if len(layout) != len(shape) or axes_of(layout[:2]) or any(len(dim) > 1 for dim in layout):
            lowering.refuse(f"the output, of shape {output.shape}, is not an image")
        names_by_id = {at: name for name, at in (plan.parameters | plan.buffers).items()}
        super().__init__(lowering, [lowering.values[at] for at in (*plan.inputs, *names_by_id)], [output])
        if [value.id for value in self.inputs[:1]] != plan.inputs:
            lowering.refuse("the output does not depend on the image")
        #: names of the parameters and buffers among the inputs, in the order of `inputs`
        self.state_input_names = [names_by_id[value.id] for value in self.inputs[1:]]

    @property
    def extent(self) -> Shape:
        """The spatial extent of the output."""
        return self.outputs[0].shape[2:]

    def divide_into_blocks(self, size: Sequence[int], overlap: int = 0) -> ModuleBlocks:
        """Return the division of the output into blocks of a given size."""
        return ModuleBlocks(self, size, overlap)

    def output_box_ranges(self, box: Box) -> AxisRanges:
        """Return the ranges of a box of the output."""
        return ((*((0, n) for n in self.outputs[0].shape[:2]), *box.axes()),)


class ModuleBlocks(OutputBlocks):
    """Blocks of a traced module's output; the counterpart of `plan.blocks.BlockPlan` for layers.

    Parameters
    ----------
    size : (*spatial,)
        Extents of a block; the last blocks along an axis may be smaller.
    overlap : int
        Number of cells by which a block extends beyond its own cells.
    """

    def __init__(self, traced: TracedImageModule, size: Sequence[int], overlap: int = 0) -> None:
        super().__init__(traced.extent, size, overlap)
        self.traced = traced
        self._comm = MeshComm(ProcessGrid.serial(), len(self.size))

    def input_box(self, number: int) -> Box:
        """Return the cells of the image that a block depends on."""
        return Box.from_ranges(self.traced.source_ranges(self.traced.output_box_ranges(self.output_box(number)))[0][2:])

    def run(
        self, number: int, x: torch.Tensor, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return a block of the output (1, C, *block) from the cells of the image that it depends on."""
        ranges = self.traced.output_box_ranges(self.output_box(number))
        plan = self.traced.plan_for(ranges)
        state = {**parameters, **buffers}
        (y,) = PlanRunner(self._comm, plan)([x, *(state[name] for name in self.traced.state_input_names)], {}, {})
        return crop_block(y, _first_output(plan).layout, ranges[0])

    @cached_property
    def max_block_memory(self) -> int:
        """Largest number of bytes that a block needs: values of the module, the image and the output."""
        return max(peak + IMAGE_COPIES * image_bytes for peak, image_bytes, _ in self._peak_bytes_by_block)

    def layer_with_largest_arrays(self) -> str:
        """Return the name of the step at which memory use peaks."""
        return max(self._peak_bytes_by_block)[2]

    @cached_property
    def _peak_bytes_by_block(self) -> list[tuple[int, int, str]]:
        block_peaks = []
        for number in self.possibly_largest_blocks:
            plan = self.traced.plan_for(self.traced.output_box_ranges(self.output_box(number)))
            image_bytes = sum(plan.values[at].nbytes for at in (plan.inputs[0], _first_output(plan).id))
            peak, name = plan.peak()
            block_peaks.append((peak, image_bytes, name))
        return block_peaks


def _first_output(plan: TorchPlan) -> Value:
    return plan.values[plan.outputs[0]]
