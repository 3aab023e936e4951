"""A pass block by block, in training too, up to where something first sees the whole image.

What comes before, the *trunk*, is one step of the plan: each rank computes its tiles of what the rest, the *head*,
reads of it, one block after the other, and keeps those alone. On the way back each block is computed once more, and
takes its part of the gradient further. Blocks overlap in what they read, not in what they give: sums are exact.

A norm with live statistics ends the trunk, unless memory does not suffice: then a sweep over the blocks of what comes
before it finds them, and they are given to the blocks of later sweeps, as parameters are, with a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import ConfigError
from ..system.memory import words
from .blocked import Blocks, Sums
from .capture import lowered
from .errors import UnsupportedOperator
from .functions import Moments
from .graph import IN_PLACE, Value
from .in_blocks import BlockLowering, Statistics, Traced, ids_of
from .layout import Layout, Mesh, axes_of, is_box, shape_of, whole
from .plan import TorchPlan
from .program_lowering import ProgramLowering, laid, ranges_at
from .steps import Where


class _OutsideTrunk:
    """Stands for a value of the head while the trunk is looked for; after that, for one inside of the trunk."""

    id = -1


BEYOND = _OutsideTrunk()
COPIES = 4
"""of weights: they, their gradients, and what an optimiser remembers"""
KEY = ""
"""the name under which blocks are given what random numbers are keyed by, beside buffers"""
NAME = "blocks"
"""of the step that is the trunk"""


class _Noted(NamedTuple):
    """An operator of the program: the values that it reads and gives, and why it is none of the trunk's."""

    read: list[int]
    found: Any
    why: UnsupportedOperator | None
    live: list[Statistics]


class _Search(ProgramLowering, BlockLowering):
    """Lowers for blocks what can be."""

    def __init__(self, spatial: int, live: int) -> None:
        super().__init__(spatial, axes=frozenset(range(spatial + 1)))
        self.noted, self.kept, self.live = list[_Noted](), set[int](), live

    def lower_program_call(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what an operator gives, or that it is beyond the trunk."""
        leaves, why, before = pytree.tree_leaves((args, kwargs)), None, len(self.statistics)
        found: Any = BEYOND
        if BEYOND not in leaves:
            try:
                found = self.ruled(target, args, kwargs)
            except UnsupportedOperator as refusal:
                why = refusal
        read, live = [leaf.id for leaf in leaves if isinstance(leaf, Value)], list(self.statistics.values())[before:]
        self.noted.append(_Noted(read, found, why, live))
        return found

    @property
    def takes_norms(self) -> bool:
        """Whether one more norm may have statistics that blocks are given."""
        return len(self.statistics) < self.live

    def gathered(self, value: Value, dims: Iterable[int] | None = None) -> Any:
        """Return a value for what is computed whole, which is beyond the trunk."""
        if value is BEYOND:
            return value
        if self.ruling:
            return super().gathered(value, dims)
        self.kept.add(value.id)
        return BEYOND if value.axes else value


class Trunk(Traced):
    """Part of a captured module that can be computed block by block, with samples separated too.

    Attributes
    ----------
    outputs : list of Value
        What the head reads.
    found : for each operator what it gives if it is the trunk's, else None
    norms : dict of int to Statistics
        Of those operators that are live norms; at most `live`.
    sweeps : list of Traced
        What each of them takes its statistics of, given those of the ones before.
    why : UnsupportedOperator or None
        What ended the trunk.
    """

    def __init__(self, program: Any, shape: Sequence[int], gather_at: Sequence[str], live: int = 0) -> None:
        search = _Search(len(shape) - 2, live)
        layout = search.mesh.image(shape)
        plan, _ = lowered(program, search.mesh, 0, [layout], gather_at, lowering=search)
        (image,) = plan.inputs
        if search.key is not None:
            plan.buffers[KEY] = search.key.id
        for norm in search.statistics.values():
            plan.buffers |= {f"{value.id}": value.id for value in (norm.mean, norm.variance)}
        noted, self.given = search.noted, [value.id for value in search.given]
        read = search.kept | {out for out in plan.outputs if isinstance(out, int)}
        depends, made = {image}, dict[int, int]()
        for number, note in enumerate(noted):
            for value in ids_of(note.found):
                made.setdefault(value, number)
                if not depends.isdisjoint(note.read):
                    depends.add(value)
        head = {number for number, note in enumerate(noted) if note.found is BEYOND}
        beside = {value for note in noted if note.live for value in ids_of(note.found)[1:]}  # a few numbers
        while True:
            lost: set[int] = set()
            for number, note in enumerate(noted):
                if number in head or not lost.isdisjoint(note.read):
                    head.add(number)
                    lost.update(value for value in ids_of(note.found) if made[value] == number)
            reads = read.union(*(noted[number].read for number in head))
            cuts = sorted(value for value in reads & depends - lost - beside if value != image)
            odd = {value for value in cuts if not is_box(search.values[value].layout, axes_of(layout))}
            if not odd:
                break
            head.update(made[value] for value in odd)  # of which tiles are no boxes
        self.found = [
            note.found if number not in head and not depends.isdisjoint(note.read) else None
            for number, note in enumerate(noted)
        ]
        self.why = next((note.why for note in noted if note.why is not None), None)
        super().__init__(search, plan, shape, [search.values[value] for value in cuts])
        self.norms = {number: note.live[0] for number, note in enumerate(noted) if note.live and number not in head}
        self.sweeps = [Traced(search, plan, shape, [norm.x]) for norm in self.norms.values()]


class HeadLowering(ProgramLowering):
    """Lowers a module whose trunk is one step, which goes block by block.

    Parameters
    ----------
    parts : tuple of int
        Into how many blocks a rank cuts its tiles along each axis of the mesh.
    """

    in_parts = True

    def __init__(self, mesh: Mesh, rank: int, trunk: Trunk, parts: Sequence[int]) -> None:
        super().__init__(mesh, rank)
        self.trunk, self.parts = trunk, tuple(parts)
        self.blocks: Blocks | None = None
        self.tiles: list[Value] = []
        self._known: dict[int, Value] = {}
        self._statistics: dict[int, tuple[Value, Value]] = {}  # by the value that stands for what they are of

    @property
    def note(self) -> str:  # type: ignore[override]
        """Description of the part computed block by block."""
        found = f"memory: each rank goes in {' x '.join(map(str, self.parts))} blocks (samples x space)"
        if self.trunk.norms:
            found += f", after {len(self.trunk.norms)} sweeps for the statistics of norms,"
        if self.trunk.why is not None:
            found += f" up to {self.trunk.why.operator} in module '{self.trunk.why.module}'"
        return found

    def lower_program_call(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what an operator gives, or what the trunk gives instead of it."""
        if not self._known:
            self._run_trunk()
        number, found = self.number, self.trunk.found[self.number]
        if found is None:
            return self.ruled(target, args, kwargs)
        if number in self.trunk.norms and isinstance(found, tuple):  # what it remembers of its statistics
            norm = self.trunk.norms[number]
            x = self.input(laid(norm.x, self.mesh), norm.x.dtype)
            self._statistics[x.id] = self._known[norm.mean.id], self._known[norm.variance.id]
            kept = zip(found[1:], self.ruled(target, (x, *args[1:]), kwargs)[1:], strict=True)
            self._known.update((old.id, new) for old, new in kept if old is not None)
        return pytree.tree_map(
            lambda leaf: self._known.get(leaf.id, BEYOND) if isinstance(leaf, Value) else leaf, found
        )

    def normalise(
        self, x: Value, weight: Value | None, bias: Value | None, moments: Moments, groups: Layout
    ) -> tuple[Value, Value, Value]:
        """Return x normalised, or statistics that the trunk has found."""
        if x.id in self._statistics:
            return x, *self._statistics[x.id]
        return super().normalise(x, weight, bias, moments, groups)

    def _run_trunk(self) -> None:
        trunk, where, self.where = self.trunk, self.where, Where(NAME, "", "")
        by_id = dict(zip(trunk.given, self.given, strict=True))
        if KEY in trunk.buffers:
            draws = self.draws
            by_id[trunk.buffers[KEY]], _ = self.random_key()
            self.draws = draws
        (image,) = (by_id[value.id] for value in trunk.inputs)
        traced = *trunk.sweeps, trunk
        layouts = [[laid(out, self.mesh) for out in each.outputs] for each in traced]
        (wide,), first = self.wide([image], self.wanted(traced, layouts, [image.layout]))
        axes, here = axes_of(image.layout), [ranges_at(each, dict(enumerate(self.place))) for each in layouts]

        def of_blocks(blocks: Blocks, outs: Sequence[Layout], partial: bool = False) -> list[Value]:
            of = blocks.traced
            given = [by_id[value] for value in (*of.parameters.values(), *of.buffers.values())]
            dtypes = [out.dtype for out in of.outputs]
            found = self._locals(blocks, [wide, *given], outs, dtypes, axes, several=True, partial=partial)
            self.steps[-1].key = None  # of some this rank may have no index
            return found

        for each, own, norm in zip(trunk.sweeps, here[:-1], trunk.norms.values(), strict=True):
            self.where = Where(NAME, "", "")
            sums = Sums(norm.moments, each, own, self.parts, first)
            (rows,) = of_blocks(sums, [whole(sums.shape)], partial=True)
            rows.axes = axes
            self.where = Where("statistics", "", "")
            by_id[norm.mean.id] = mean = self._mean(sums.total, [rows], norm)
            by_id[norm.variance.id] = self._mean(sums.squares, [rows, mean], norm)
        self.where = Where(NAME, "", "")
        blocks = self.blocks = Blocks(trunk, here[-1], self.parts, first)
        self.tiles = of_blocks(blocks, layouts[-1])
        self._known = {**by_id, trunk.inputs[0].id: image}
        self._known.update((out.id, tile) for out, tile in zip(trunk.outputs, self.tiles, strict=True))
        self.where = where

    def _mean(self, run: Callable[..., torch.Tensor], args: Sequence[Value], norm: Statistics) -> Value:
        found = self.reduced(run, args, args[0].axes, norm.mean.layout)
        return self.local(lambda a: a / norm.moments.number, [found], found.layout)


def held(plan: TorchPlan, training: bool) -> int:
    """Return the bytes of a plan's values that a rank holds at once.

    In training those are all, and the gradients of one step, without what the trunk's blocks take.
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
    """Return what lowers a module so that a pass takes no more memory than a rank has; None: it does so whole.

    All ranks do as the first one, whose tiles are the largest, has to.

    Raises
    ------
    UserError
        It takes more; names the operator that ends the trunk.
    """
    weights = COPIES * sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    limit, training = memory - weights, module.training
    plan, _ = lowered(program, mesh, 0, layouts, gather_at, recompute=recompute)
    needed = held(plan, training)
    if needed <= limit:
        return None
    live = 0
    while True:
        trunk = Trunk(program, shape_of(layouts[0]), gather_at, live)
        if trunk.outputs:
            lowering = HeadLowering(mesh, 0, trunk, [1] * len(mesh.parts))
            plan, _ = lowered(program, mesh, 0, layouts, gather_at, recompute=recompute, lowering=lowering)
            needed, parts = _in_parts(lowering, plan, limit, training)
            if needed <= limit:
                return HeadLowering(mesh, rank, trunk, parts)
        if len(trunk.norms) < live:
            break
        live += 1 + live // 3  # each more costs another sweep
    told = (
        f"a pass needs {words(needed + weights)}, but only {words(memory)} are available; use more ranks, or"
        " give more memory"
    )
    if trunk.why is None:
        raise ConfigError(f"memory: {told}")
    remedy = f"with what comes after it, {told}"
    raise UnsupportedOperator(trunk.why, trunk.why.why, cannot="be computed block by block", remedy=remedy)


def _in_parts(lowering: HeadLowering, plan: TorchPlan, limit: int, training: bool) -> tuple[int, list[int]]:
    """Cut a lowered trunk until a pass takes no more bytes, or no cut is left; return what it takes, and the parts."""
    blocks, parts = lowering.blocks, list(lowering.parts)
    assert blocks is not None
    extents, tiles = blocks.extents(), sum(value.nbytes for value in lowering.tiles)
    parts[0] = extents[0]
    needed = held(plan, training) + training * tiles
    while needed <= limit:
        blocks.parts = tuple(parts)
        # one inside, and that at the corner, which has both ends of an image that wraps around
        inner = [blocks.plan(place)[0] for place in ([n // 2 for n in parts], [0] * len(parts))]
        found = (1 + training) * tiles + max(held(plan, training) for plan in inner)
        longest = max(range(len(parts)), key=lambda axis: extents[axis] / parts[axis])
        if found <= limit or extents[longest] == parts[longest]:
            return found, parts
        parts[longest] = min(2 * parts[longest], extents[longest])
    return needed, parts
