"""A pass block by block, in training too, up to where something first sees the whole image.

What comes before, the *trunk*, is one step of the plan: each rank computes its tiles of what the rest, the *head*,
reads of it, one block after the other, and keeps those alone. On the way back each block is computed once more, and
takes its part of the gradient further. Blocks overlap in what they read, not in what they give: sums are exact.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import ConfigError
from ..memory import words
from .blocked import Blocks, at_least_one
from .capture import lowered
from .errors import UnsupportedOperator
from .graph import IN_PLACE, Value
from .in_blocks import BlockLowering, Ranged, Traced, ids_of
from .layout import Layout, Mesh, axes_of, shape_of
from .lower import Lowering
from .plan import TorchPlan
from .steps import Where


class _Beyond:
    """Stands for a value of the head while the trunk is looked for."""

    id = -1


BEYOND = _Beyond()
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


class _OfProgram(Lowering):
    """Knows the operators of the program, which a trunk is made of, from those that rules call.

    Attributes
    ----------
    given : list of Value
        What is given from outside.
    ruling : bool
        Whether a rule is being called.
    """

    def __init__(self, *about: Any, **more: Any) -> None:
        super().__init__(*about, **more)
        self.given, self.ruling = list[Value](), False

    def input(self, layout: Layout, dtype: torch.dtype, kind: str = "value") -> Value:
        """Return a new value that is given from outside."""
        self.given.append(super().input(layout, dtype, kind))
        return self.given[-1]

    def call(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what an operator gives."""
        return (self.ruled if self.ruling else self.of_program)(target, args, kwargs)

    def ruled(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what an operator gives by its rule."""
        before, self.ruling = self.ruling, True
        try:
            return super().call(target, args, kwargs)
        finally:
            self.ruling = before

    @abstractmethod
    def of_program(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what an operator of the program gives."""


class _Search(_OfProgram, BlockLowering):
    """Lowers for blocks what can be."""

    def __init__(self, spatial: int) -> None:
        super().__init__(spatial, samples=True)
        self.noted, self.kept = list[_Noted](), set[int]()

    def of_program(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what an operator gives, or that it is beyond the trunk."""
        leaves, why = pytree.tree_leaves((args, kwargs)), None
        found: Any = BEYOND
        if BEYOND not in leaves:
            try:
                found = self.ruled(target, args, kwargs)
            except UnsupportedOperator as refusal:
                why = refusal
        self.noted.append(_Noted([leaf.id for leaf in leaves if isinstance(leaf, Value)], found, why))
        return found

    def gathered(self, value: Value, dims: Iterable[int] | None = None) -> Any:
        """Return a value for what is computed whole, which is beyond the trunk."""
        if value is BEYOND:
            return value
        if self.ruling:
            return super().gathered(value, dims)
        self.kept.add(value.id)
        return BEYOND if value.axes else value


class Trunk(Traced):
    """What of a captured module can go block by block, samples apart too.

    Attributes
    ----------
    outputs : list of Value
        What the head reads.
    found : for each operator what it gives if it is the trunk's, else None
    why : UnsupportedOperator or None
        What ended the trunk.
    """

    def __init__(self, program: Any, shape: Sequence[int], gather_at: Sequence[str]) -> None:
        search = _Search(len(shape) - 2)
        layout = search.mesh.image(shape)
        plan, _ = lowered(program, search.mesh, 0, [layout], gather_at, lowering=search)
        (image,) = plan.inputs
        if search.key is not None:
            plan.buffers[KEY] = search.key.id
        noted, self.given = search.noted, [value.id for value in search.given]
        read = search.kept | {out for out in plan.outputs if isinstance(out, int)}
        depends, made = {image}, dict[int, int]()
        for number, note in enumerate(noted):
            for value in ids_of(note.found):
                made.setdefault(value, number)
                if not depends.isdisjoint(note.read):
                    depends.add(value)
        head = {number for number, note in enumerate(noted) if note.found is BEYOND}
        while True:
            lost: set[int] = set()
            for number, note in enumerate(noted):
                if number in head or not lost.isdisjoint(note.read):
                    head.add(number)
                    lost.update(value for value in ids_of(note.found) if made[value] == number)
            reads = read.union(*(noted[number].read for number in head))
            cuts = sorted(value for value in reads & depends - lost if value != image)
            odd = {value for value in cuts if not _is_box(search.values[value].layout, axes_of(layout))}
            if not odd:
                break
            head.update(made[value] for value in odd)  # of which tiles are no boxes
        self.found = [
            note.found if number not in head and not depends.isdisjoint(note.read) else None
            for number, note in enumerate(noted)
        ]
        self.why = next((note.why for note in noted if note.why is not None), None)
        super().__init__(search, plan, shape, [search.values[value] for value in cuts])

    def layouts(self, mesh: Mesh) -> list[Layout]:
        """Return how ranks have the outputs."""
        return [tuple((mesh.atom(atom.extent, atom.axis),) for (atom,) in out.layout) for out in self.outputs]


class HeadLowering(_OfProgram):
    """Lowers a module whose trunk is one step, which goes block by block.

    Parameters
    ----------
    parts : tuple of int
        Into how many blocks a rank cuts its tiles along each axis of the mesh.
    """

    def __init__(self, mesh: Mesh, rank: int, trunk: Trunk, parts: Sequence[int]) -> None:
        super().__init__(mesh, rank)
        self.trunk, self.parts = trunk, tuple(parts)
        self.blocks: Blocks | None = None
        self.tiles: list[Value] = []
        self._known: dict[int, Value] = {}
        self._next = 0

    def of_program(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what an operator gives, or what the trunk gives instead of it."""
        if not self._known:
            self._run_trunk()
        found = self.trunk.found[self._next]
        self._next += 1
        if found is not None:
            return pytree.tree_map(lambda leaf: self._known.get(leaf.id) if isinstance(leaf, Value) else leaf, found)
        return self.ruled(target, args, kwargs)

    def _run_trunk(self) -> None:
        trunk, where, self.where = self.trunk, self.where, Where(NAME, "", "")
        by_id = dict(zip(trunk.given, self.given, strict=True))
        if KEY in trunk.buffers:
            draws = self.draws
            by_id[trunk.buffers[KEY]], _ = self.random_key()
            self.draws = draws
        image = by_id[trunk.input]
        layouts = trunk.layouts(self.mesh)
        wants: dict[int, Any] = {}
        for dim, axis in enumerate(atom.axis for (atom,) in image.layout):
            if axis is not None:
                asked = (_ranges(layouts, {axis: part}) for part in range(self.mesh.parts[axis]))
                wants[dim] = axis, [[trunk.image(at_least_one(ranges, ranges))[dim]] for ranges in asked]
        wide = self.view(image, wants)
        first = [
            wants[dim][1][self.place[wants[dim][0]]][0][0] if dim in wants else 0 for dim in range(len(wide.local))
        ]
        blocks = self.blocks = Blocks(trunk, _ranges(layouts, dict(enumerate(self.place))), self.parts, first)
        given = [by_id[value] for value in (*trunk.parameters.values(), *trunk.buffers.values())]
        dtypes, axes = [out.dtype for out in trunk.outputs], axes_of(image.layout)
        self.tiles = self._locals(blocks, [wide, *given], layouts, dtypes, axes, several=True)
        self.steps[-1].key = None  # of some this rank may have no index
        self._known = {trunk.input: image}
        self._known.update((out.id, tile) for out, tile in zip(trunk.outputs, self.tiles, strict=True))
        self.where = where


def _ranges(layouts: Sequence[Layout], place: Mapping[int, int]) -> Ranged:
    """Return the range along each dimension that the rank at a place has; of axes that are left out, all."""
    return tuple(
        tuple(
            atom.ranges[place[atom.axis]] if atom.axis is not None and atom.axis in place else (0, atom.extent)
            for (atom,) in layout
        )
        for layout in layouts
    )


def _is_box(layout: Layout, axes: frozenset[int]) -> bool:
    return all(len(dim) == 1 for dim in layout) and axes_of(layout) == axes


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
    trunk, parts = Trunk(program, shape_of(layouts[0]), gather_at), [1] * len(mesh.parts)
    if trunk.outputs:
        lowering = HeadLowering(mesh, 0, trunk, parts)
        plan, _ = lowered(program, mesh, 0, layouts, gather_at, recompute=recompute, lowering=lowering)
        blocks = lowering.blocks
        assert blocks is not None
        extents, tiles = blocks.extents(), sum(value.nbytes for value in lowering.tiles)
        parts[0] = extents[0]
        needed = held(plan, training) + training * tiles
        while needed <= limit:
            blocks.parts = tuple(parts)
            inner, _ = blocks.plan([n // 2 for n in parts])
            found = (1 + training) * tiles + held(inner, training)
            if found <= limit:
                return HeadLowering(mesh, rank, trunk, parts)
            longest = max(range(len(parts)), key=lambda axis: extents[axis] / parts[axis])
            if extents[longest] == parts[longest]:
                needed = found
            parts[longest] = min(2 * parts[longest], extents[longest])
    told = f"a pass needs {words(needed + weights)}, and has {words(memory)}; use more ranks, or give more memory"
    if trunk.why is None:
        raise ConfigError(f"memory: {told}")
    remedy = f"with what comes after it, {told}"
    raise UnsupportedOperator(trunk.why, trunk.why.why, cannot="go block by block", remedy=remedy)
