"""A captured module block after block of its output, an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import product
from typing import Any

import torch

from ..comm import ProcessGrid
from ..geometry import Box
from ..plan.blocks import COPIES, cut_into, number_of
from .capture import lowered
from .graph import Value
from .in_blocks import BlockLowering, Ranged, Traced, part_of_block
from .layout import Shape, axes_of
from .mesh_comm import MeshComm
from .plan import TorchPlan
from .run import Runner


class TracedImage(Traced):
    """A captured module that can go in blocks of its first output, an image.

    Parameters
    ----------
    program
        What `captured` returned, in evaluation.
    shape : (1, C, *spatial)
        Of the image.
    remedy : str
        What a message about what cannot go so ends with.

    Raises
    ------
    UnsupportedOperator
        It sees more than a bounded neighbourhood: names the operator, the module's path and the user's file and line.
    """

    def __init__(self, program: Any, shape: Sequence[int], gather_at: Sequence[str], remedy: str) -> None:
        first = BlockLowering(len(shape) - 2, remedy)
        plan, _ = lowered(program, first.mesh, 0, [first.mesh.image(shape)], gather_at, lowering=first)
        output = first.values[next(out for out in plan.outputs if isinstance(out, int))]
        layout = output.layout
        if len(layout) != len(shape) or axes_of(layout[:2]) or any(len(dim) > 1 for dim in layout):
            first.refuse(f"the output, of shape {output.shape}, is not an image")
        super().__init__(first, plan, shape, [output])

    @property
    def extent(self) -> Shape:
        """The spatial extent of the output."""
        return self.outputs[0].shape[2:]

    def blocks(self, size: Sequence[int], beyond: int = 0) -> ModuleBlocks:
        """Return the blocks of a size."""
        return ModuleBlocks(self, size, beyond)

    def wanted(self, box: Box) -> Ranged:
        """Return the ranges of a box of the output."""
        return ((*((0, n) for n in self.outputs[0].shape[:2]), *box.axes()),)


class ModuleBlocks:
    """The blocks of a traced module's output; as `plan.blocks.BlockPlan` for layers.

    Parameters
    ----------
    traced : TracedImage
    size : (*spatial,)
        Of a block; those at the end of an axis may be smaller.
    beyond : int
        Cells after its own that a block also has.
    """

    def __init__(self, traced: TracedImage, size: Sequence[int], beyond: int = 0) -> None:
        self.traced, self.size = traced, tuple(size)
        self.cells = cut_into(traced.extent, self.size, beyond)
        self._wires = MeshComm(ProcessGrid.serial(), len(self.size))

    def __len__(self) -> int:
        return self.cells.tiles

    def coords(self, number: int) -> tuple[int, ...]:
        """Return a block's place among the others."""
        return self.cells.coords(number)

    def output(self, number: int) -> Box:
        """Return the cells of the output that a block is."""
        return self.cells.box(number)

    def image(self, number: int) -> Box:
        """Return the cells of the image that it depends on."""
        ranges = self.traced.image(self.traced.wanted(self.output(number)))[2:]
        return Box(tuple(lo for lo, _ in ranges), tuple(hi for _, hi in ranges))

    def run(
        self, number: int, x: torch.Tensor, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return a block of the output (1, C, *block), given the cells of the image that it depends on."""
        wanted = self.traced.wanted(self.output(number))
        plan = self.traced.plan(wanted)
        (y,) = Runner(self._wires, plan)([x], parameters, buffers)
        return part_of_block(y, _output(plan).layout, wanted[0])

    @cached_property
    def largest(self) -> int:
        """The bytes that a block needs at most: values of the module, the image and the output."""
        return max(peak + COPIES * ends for peak, ends, _ in self._costs)

    @property
    def largest_image(self) -> Box:
        """The most cells of the image that a block depends on."""
        return max((self.image(number) for number in self._longest), key=lambda box: box.size)

    def heaviest(self) -> str:
        """Return the step at which most is needed."""
        return max(self._costs)[2]

    @property
    def _longest(self) -> list[int]:
        """The blocks among which is the one that needs most: inside, and at the image's borders."""
        ends = [sorted({0, count // 2}) for count in self.cells.parts]
        return [number_of(place, self.cells.parts) for place in product(*ends)]

    @cached_property
    def _costs(self) -> list[tuple[int, int, str]]:
        found = []
        for number in self._longest:
            plan = self.traced.plan(self.traced.wanted(self.output(number)))
            ends = sum(plan.values[at].nbytes for at in (plan.inputs[0], _output(plan).id))
            found.append((*plan.peak(), ends))
        return [(peak, ends, name) for peak, name, ends in found]


def _output(plan: TorchPlan) -> Value:
    return plan.values[plan.outputs[0]]
