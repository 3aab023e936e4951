"""Block-wise passes, in training too, up to the first operator that depends on the whole image.

The operators before it, the *trunk*, are one step of the plan: each rank computes its tiles of the values that the
rest, the *head*, reads, one block after the other, and keeps only those. In the backward pass each block is recomputed
and passes on its part of the gradient. Blocks overlap in their inputs, not in their outputs: sums are exact.

A norm with live statistics ends the trunk, unless memory does not suffice: then a sweep over the blocks before the norm
computes its statistics, which are passed to the blocks of later sweeps with a gradient, as parameters are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...errors import ConfigError
from ...system.memory import words
from ..capture.capture import lower_program
from ..exchange.functions import Moments
from ..ir.errors import UnsupportedOperator
from ..ir.graph import IN_PLACE, Value
from ..ir.layout import Layout, Mesh, axes_of, is_box, shape_of, whole
from ..lowering.plan import TorchPlan
from ..lowering.steps import Where
from .blocked import Blocks, Sums
from .in_blocks import BlockLowering, Statistics, Traced, ids_of
from .program_lowering import ProgramLowering, laid, ranges_at


class _OutsideTrunk:
    """Placeholder: a value of the head while the trunk is searched, later a value inside the trunk."""

    id = -1


BEYOND = _OutsideTrunk()
COPIES = 4
"""of weights: values, gradients and optimiser state"""
KEY = ""
"""Name of the random seed among the buffers passed to blocks."""
NAME = "blocks"
"""Name of the trunk's step."""


class _OperatorRecord(NamedTuple):
    """Operator of the program: the values that it reads and returns, and the reason why it is not in the trunk."""

    read: list[int]
    result: Any
    why: UnsupportedOperator | None
    live: list[Statistics]


class _Search(ProgramLowering, BlockLowering):
    """Lowering for blocks of all operators that can be computed so."""

    def __init__(self, spatial: int, live: int) -> None:
        super().__init__(spatial, axes=frozenset(range(spatial + 1)))
        self.records, self.kept, self.live = list[_OperatorRecord](), set[int](), live

    def lower_program_call(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the values of an operator, or BEYOND if it is not in the trunk."""
        leaves, why, before = pytree.tree_leaves((args, kwargs)), None, len(self.statistics)
        result: Any = BEYOND
        if BEYOND not in leaves:
            try:
                result = self.lower_by_rule(target, args, kwargs)
            except UnsupportedOperator as refusal:
                why = refusal
        read, live = [leaf.id for leaf in leaves if isinstance(leaf, Value)], list(self.statistics.values())[before:]
        self.records.append(_OperatorRecord(read, result, why, live))
        return result

    @property
    def takes_norms(self) -> bool:
        """Whether another norm may receive its statistics as inputs."""
        return len(self.statistics) < self.live

    def gathered(self, value: Value, dims: Iterable[int] | None = None) -> Any:
        """Return a value for replicated work, which is not in the trunk."""
        if value is BEYOND:
            return value
        if self.in_rule:
            return super().gathered(value, dims)
        self.kept.add(value.id)
        return BEYOND if value.axes else value


class Trunk(Traced):
    """Part of a captured module that can be computed block by block, with samples separated too.

    Attributes
    ----------
    outputs : list of Value
        Values that the head reads.
    results : for each operator its result if it is in the trunk, else None
    norms : dict of int to Statistics
        Live norms by the number of their operator; at most `live`.
    sweeps : list of Traced
        For each of them, the computation of its input from the statistics of the previous ones.
    why : UnsupportedOperator or None
        Error of the operator that ends the trunk.
    """

    def __init__(self, program: Any, shape: Sequence[int], gather_at: Sequence[str], live: int = 0) -> None:
        search = _Search(len(shape) - 2, live)
        layout = search.mesh.image(shape)
        plan, _ = lower_program(program, search.mesh, 0, [layout], gather_at, lowering=search)
        (image,) = plan.inputs
        if search.key is not None:
            plan.buffers[KEY] = search.key.id
        for norm in search.statistics.values():
            plan.buffers |= {f"{value.id}": value.id for value in (norm.mean, norm.variance)}
        records, self.input_ids = search.records, [value.id for value in search.input_values]
        read = search.kept | {out for out in plan.outputs if isinstance(out, int)}
        depends, producers = {image}, dict[int, int]()
        for number, record in enumerate(records):
            for value in ids_of(record.result):
                producers.setdefault(value, number)
                if not depends.isdisjoint(record.read):
                    depends.add(value)
        head = {number for number, record in enumerate(records) if record.result is BEYOND}
        moments = {value for record in records if record.live for value in ids_of(record.result)[1:]}  # a few numbers
        while True:
            lost: set[int] = set()
            for number, record in enumerate(records):
                if number in head or not lost.isdisjoint(record.read):
                    head.add(number)
                    lost.update(value for value in ids_of(record.result) if producers[value] == number)
            reads = read.union(*(records[number].read for number in head))
            cuts = sorted(value for value in reads & depends - lost - moments if value != image)
            odd = {value for value in cuts if not is_box(search.values[value].layout, axes_of(layout))}
            if not odd:
                break
            head.update(producers[value] for value in odd)  # their tiles are not boxes
        self.results = [
            record.result if number not in head and not depends.isdisjoint(record.read) else None
            for number, record in enumerate(records)
        ]
        self.why = next((record.why for record in records if record.why is not None), None)
        super().__init__(search, plan, shape, [search.values[value] for value in cuts])
        self.norms = {at: record.live[0] for at, record in enumerate(records) if record.live and at not in head}
        self.sweeps = [Traced(search, plan, shape, [norm.x]) for norm in self.norms.values()]


class HeadLowering(ProgramLowering):
    """Lowering of a module whose trunk is one step, computed block by block.

    Parameters
    ----------
    parts : tuple of int
        Number of blocks of this rank's tiles along each axis of the mesh.
    """

    in_parts = True

    def __init__(self, mesh: Mesh, rank: int, trunk: Trunk, parts: Sequence[int]) -> None:
        super().__init__(mesh, rank)
        self.trunk, self.parts = trunk, tuple(parts)
        self.blocks: Blocks | None = None
        self.tiles: list[Value] = []
        self._local_values: dict[int, Value] = {}
        self._statistics: dict[int, tuple[Value, Value]] = {}  # by the id of a placeholder for the normalised value

    @property
    def note(self) -> str:  # type: ignore[override]
        """Description of the part computed block by block."""
        text = f"memory: {' x '.join(map(str, self.parts))} blocks per rank (samples x space)"
        if self.trunk.norms:
            text += f", after {len(self.trunk.norms)} sweeps for the statistics of norms,"
        if self.trunk.why is not None:
            text += f" up to {self.trunk.why.operator} in module '{self.trunk.why.module}'"
        return text

    def lower_program_call(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the values of an operator, or those that the trunk returns for it."""
        if not self._local_values:
            self._run_trunk()
        number, result = self.number, self.trunk.results[self.number]
        if result is None:
            return self.lower_by_rule(target, args, kwargs)
        if number in self.trunk.norms and isinstance(result, tuple):  # its running statistics
            norm = self.trunk.norms[number]
            x = self.input(laid(norm.x, self.mesh), norm.x.dtype)
            self._statistics[x.id] = self._local_values[norm.mean.id], self._local_values[norm.variance.id]
            kept = zip(result[1:], self.lower_by_rule(target, (x, *args[1:]), kwargs)[1:], strict=True)
            self._local_values.update((old.id, new) for old, new in kept if old is not None)
        return pytree.tree_map(
            lambda leaf: self._local_values.get(leaf.id, BEYOND) if isinstance(leaf, Value) else leaf, result
        )

    def normalise(
        self, x: Value, weight: Value | None, bias: Value | None, moments: Moments, groups: Layout
    ) -> tuple[Value, Value, Value]:
        """Return x normalised, or x with the statistics that the trunk has computed."""
        if x.id in self._statistics:
            return x, *self._statistics[x.id]
        return super().normalise(x, weight, bias, moments, groups)

    def _run_trunk(self) -> None:
        trunk, where, self.where = self.trunk, self.where, Where(NAME, "", "")
        by_id = dict(zip(trunk.input_ids, self.input_values, strict=True))
        if KEY in trunk.buffers:
            draws = self.draws
            by_id[trunk.buffers[KEY]], _ = self.random_key()
            self.draws = draws
        (image,) = (by_id[value.id] for value in trunk.inputs)
        traced = *trunk.sweeps, trunk
        layouts = [[laid(out, self.mesh) for out in part.outputs] for part in traced]
        (view,), first = self.input_views([image], self.input_ranges(traced, layouts, [image.layout]))
        axes, own_ranges = axes_of(image.layout), [ranges_at(part, dict(enumerate(self.place))) for part in layouts]

        def run_blocks(blocks: Blocks, outs: Sequence[Layout], partial: bool = False) -> list[Value]:
            traced_part = blocks.traced
            state = [by_id[value] for value in (*traced_part.parameters.values(), *traced_part.buffers.values())]
            dtypes = [out.dtype for out in traced_part.outputs]
            results = self._locals(blocks, [view, *state], outs, dtypes, axes, several=True, partial=partial)
            self.steps[-1].key = None  # this rank may have no index of some outputs
            return results

        for part, own, norm in zip(trunk.sweeps, own_ranges[:-1], trunk.norms.values(), strict=True):
            self.where = Where(NAME, "", "")
            sums = Sums(norm.moments, part, own, self.parts, first)
            (rows,) = run_blocks(sums, [whole(sums.shape)], partial=True)
            rows.axes = axes
            self.where = Where("statistics", "", "")
            by_id[norm.mean.id] = mean = self._mean(sums.total, [rows], norm)
            by_id[norm.variance.id] = self._mean(sums.squares, [rows, mean], norm)
        self.where = Where(NAME, "", "")
        blocks = self.blocks = Blocks(trunk, own_ranges[-1], self.parts, first)
        self.tiles = run_blocks(blocks, layouts[-1])
        self._local_values = {**by_id, trunk.inputs[0].id: image}
        self._local_values.update((out.id, tile) for out, tile in zip(trunk.outputs, self.tiles, strict=True))
        self.where = where

    def _mean(self, run: Callable[..., torch.Tensor], args: Sequence[Value], norm: Statistics) -> Value:
        total = self.reduced(run, args, args[0].axes, norm.mean.layout)
        return self.local(lambda a: a / norm.moments.number, [total], total.layout)


def peak_bytes(plan: TorchPlan, training: bool) -> int:
    """Return the bytes of a plan's values that a rank holds at once.

    In training these are all values and the gradients of one step, without the memory of the trunk's blocks.
    """
    if not training:
        return plan.peak()[0]
    of_steps = ((*step.inputs, *step.outputs) for step in plan.steps if step.name != NAME)
    largest = max((sum(plan.values[value].nbytes for value in ids) for ids in of_steps), default=0)
    over = [plan.values[step.outputs[0]] for step in plan.steps if step.run in IN_PLACE.values()]
    return plan.memory(plan.rank) + 2 * largest - sum(value.nbytes for value in over)


def fitted(
    program: Any,
    mesh: Mesh,
    rank: int,
    layouts: Sequence[Layout],
    gather_at: Sequence[str],
    recompute: bool,
    memory: int,
    module: nn.Module,
) -> HeadLowering | None:
    """Return a block-wise lowering with which a pass fits in a rank's memory; None: blocks are not needed.

    The first rank, whose tiles are the largest, decides for all ranks.

    Raises
    ------
    UserError
        A pass does not fit in memory; names the operator that ends the trunk.
    """
    weights = COPIES * sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    limit, training = memory - weights, module.training
    plan, _ = lower_program(program, mesh, 0, layouts, gather_at, recompute=recompute)
    needed = peak_bytes(plan, training)
    if needed <= limit:
        return None
    live = 0
    while True:
        trunk = Trunk(program, shape_of(layouts[0]), gather_at, live)
        if trunk.outputs:
            lowering = HeadLowering(mesh, 0, trunk, [1] * len(mesh.parts))
            plan, _ = lower_program(program, mesh, 0, layouts, gather_at, recompute=recompute, lowering=lowering)
            needed, parts = _cut_to_fit(lowering, plan, limit, training)
            if needed <= limit:
                return HeadLowering(mesh, rank, trunk, parts)
        if len(trunk.norms) < live:
            break
        live += 1 + live // 3  # each norm costs another sweep
    shortage = (
        f"a pass needs {words(needed + weights)}, but only {words(memory)} are available; use more ranks, or"
        " give more memory"
    )
    if trunk.why is None:
        raise ConfigError(f"memory: {shortage}")
    remedy = f"together with the operators after it, {shortage}"
    raise UnsupportedOperator(trunk.why, trunk.why.why, cannot="be computed block by block", remedy=remedy)


def _cut_to_fit(lowering: HeadLowering, plan: TorchPlan, limit: int, training: bool) -> tuple[int, list[int]]:
    """Divide a lowered trunk until a pass fits in `limit` bytes, or no further; return the bytes and the parts."""
    blocks, parts = lowering.blocks, list(lowering.parts)
    assert blocks is not None
    extents, tiles = blocks.extents(), sum(value.nbytes for value in lowering.tiles)
    parts[0] = extents[0]
    needed = peak_bytes(plan, training) + training * tiles
    while needed <= limit:
        blocks.parts = tuple(parts)
        # an inner block, and the one at the corner, which has both ends of an image that wraps around
        inner = [blocks.plan(place)[0] for place in ([n // 2 for n in parts], [0] * len(parts))]
        needed_now = (1 + training) * tiles + max(peak_bytes(plan, training) for plan in inner)
        longest = max(range(len(parts)), key=lambda axis: extents[axis] / parts[axis])
        if needed_now <= limit or extents[longest] == parts[longest]:
            return needed_now, parts
        parts[longest] = min(2 * parts[longest], extents[longest])
    return needed, parts
