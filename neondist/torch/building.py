"""Values as rules want them: seen by windows, whole, cut elsewhere, of another shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from ..geometry import Cells
from .graph import Pads, Value
from .layout import (
    Atom,
    Dim,
    Layout,
    Mesh,
    Unaligned,
    axes_of,
    local_shape,
    reshaped,
    shape_of,
    whole_along,
)
from .steps import StepList
from .transfer import Range, Transfer, Want

Ranges = Mapping[int, tuple[int | None, Sequence[Sequence[Range]]]]
"""For a dimension: an axis of the mesh, and for each of its parts the ranges that it wants to see."""
UsedIndices = Mapping[int, Sequence[Cells]]
"""For a dimension: the indices that each part uses; for one that is not cut, those that all ranks use."""


class Builder(StepList):
    """Builder of plans, used by rules."""

    def view(
        self,
        value: Value,
        wants: Ranges,
        context: Iterable[int] | None = None,
        pads: Mapping[int, Sequence[tuple[int, int]]] | None = None,
        fill: float = 0.0,
        window: bool = False,
        used: UsedIndices | None = None,
    ) -> Value:
        """Return what each rank wants to see of a value; gradients of what several saw are added.

        Parameters
        ----------
        wants : dict of dimension to (axis, ranges)
            Each part of the axis wants these ranges of the dimension; axis None: all want ranges[0]. Dimensions left
            out stay as they are.
        context : axes
            Those that cut what is computed from the view; default: the value's and those of `wants`.
        pads : dict of dimension to (before, after) for each part
            Indices of value `fill` around what is seen.
        window : bool
            Whether windows slide over it, so that a border scheme may stand for the exact exchange.
        used : dict of dimension to cells for each part
            The indices that results are computed from; others are not sent.
        """
        inside = self._inside(value, wants, context)
        lost = axes_of(value.layout) - inside  # along which all compute alike from now on
        value = self.gathered(value, [dim for dim, cut in enumerate(value.layout) if axes_of((cut,)) & lost])
        wanted = tuple(
            Want(dim, self.atom(value, dim), axis, tuple(tuple(r) for r in ranges))
            for dim, (axis, ranges) in sorted(wants.items())
        )
        around = {dim for dim, parts in (pads or {}).items() if any(any(pad) for pad in parts)}
        wanted = tuple(want for want in wanted if not want.own or want.dim in around)
        here: Pads = tuple(
            (dim, *parts[0 if wants[dim][0] is None else self.place[wants[dim][0]]])  # type: ignore[index]
            for dim, parts in sorted((pads or {}).items())
        )
        here = tuple(pad for pad in here if pad[1] or pad[2])
        source = self.enter(value, inside)
        if not wanted:
            return source
        transfer = Transfer(self.mesh, self._narrowed(value, wanted, used or {}))
        shape = list(transfer.shape(source.local, self.rank))
        for dim, before, after in here:
            shape[dim] += before + after
        found = self._value(tuple(shape), inside, value.dtype, source.kind)
        self._step("view", [source], [found], transfer=transfer, pads=here, fill=fill)
        inner = all(want.axis == want.source.axis and want.axis and want.dim > 1 for want in wanted)
        self.steps[-1].window = window and inner and not transfer.silent
        return found

    def _narrowed(self, value: Value, wanted: Sequence[Want], used: UsedIndices) -> tuple[Want, ...]:
        """Return the wants, restricted to indices that are used, along dimensions that are not cut too."""
        found = {want.dim: want for want in wanted}
        for dim, parts in used.items():
            atom = self.atom(value, dim)
            want = found.get(dim, Want(dim, atom, atom.axis, tuple((own,) for own in atom.ranges)))
            if any(sum(map(len, cells)) != hi - lo for cells, ((lo, hi),) in zip(parts, want.ranges, strict=True)):
                found[dim] = want._replace(used=tuple(parts))
        return tuple(want for _, want in sorted(found.items()))

    def _inside(self, value: Value, wants: Ranges, context: Iterable[int] | None) -> frozenset[int]:
        """Return the axes that cut what is computed from a view, which `view` is asked for."""
        asked = frozenset(axis for axis, _ in wants.values() if axis is not None)
        return (value.axes | asked) if context is None else frozenset(context)

    def gathered(self, value: Value, dims: Iterable[int] | None = None) -> Value:
        """Return a value of which every rank has all indices (of these dimensions), for what they compute alike."""
        rank = len(value.layout)
        chosen = set(range(rank)) if dims is None else {dim % rank for dim in dims}
        axes = axes_of(value.layout[dim] for dim in chosen)
        if not axes:
            return value
        expanded = self._atoms(value)
        wants = tuple(
            Want(at, atom, None, (((0, atom.extent),),))
            for at, (atom,) in enumerate(expanded.layout)
            if atom.axis in axes
        )
        rest = tuple((Atom(dim[0].extent),) if dim[0].axis in axes else dim for dim in expanded.layout)
        found = self._value(local_shape(rest, self.place), value.axes - axes, value.dtype, value.kind, rest)
        self._step("gather", [expanded], [found], transfer=Transfer(self.mesh, wants))
        return self.shaped(found, whole_along(value.layout, chosen))

    def recut(self, value: Value, layout: Layout) -> Value:
        """Return a value cut as `layout`, which has the same atoms but for where they are cut, and by which axis."""
        if value.layout == layout:
            return value
        expanded = self._atoms(value)
        target = [atom for dim in layout for atom in dim]
        target = _alike([dim[0] for dim in expanded.layout], target)
        wants = {
            dim: _own(new) for dim, (new, (old,)) in enumerate(zip(target, expanded.layout, strict=True)) if new != old
        }
        seen = self.view(expanded, wants, axes_of(layout))
        shape = local_shape(layout, self.place)
        if seen.local == shape and seen.layout_or_none == layout:
            return seen
        return self.local(lambda x: x.reshape(shape), [seen], layout)

    def reshape(self, value: Value, shape: Sequence[int]) -> Value:
        """Return a value of another global shape; where a cut would not fit, it is moved before."""
        if prod(shape) == 0:
            self.refuse("a tensor without elements is reshaped")
        for _ in range(2 * len(value.layout) + 2):
            try:
                return self.shaped(value, reshaped(value.layout, shape))
            except Unaligned as problem:
                if problem.multiple:
                    value = self.recut(value, tuple(_aligned(dim, problem, self.mesh) for dim in value.layout))
                else:  # no cut would do: every rank sees it whole
                    dims = [d for d, dim in enumerate(value.layout) if problem.atom in dim]
                    value = self.gathered(value, dims if axes_of(value.layout[d] for d in dims) else None)
        return self.refuse(f"a reshaping of {value.shape} to {tuple(shape)} splits a partitioned dimension")

    def shaped(self, value: Value, layout: Layout) -> Value:
        """Return a value whose part has the shape that `layout` says; nothing moves."""
        shape = local_shape(layout, self.place)
        if value.layout_or_none == layout:
            return value
        return self.local(lambda x: x.reshape(shape), [value], layout)

    def aligned(self, value: Value, target: Layout, context: Iterable[int]) -> Value:
        """Return a value for a pointwise operation with results cut as `target`; dimensions of one index broadcast."""
        context = frozenset(context)
        if value.layout_or_none is None:
            return value
        offset = len(target) - len(value.layout)
        value = self.gathered(
            value, [at for at, dim in enumerate(value.layout) if not _alike_cut(dim, target[offset + at])]
        )
        wanted = [
            dim if shape_of((dim,)) == (1,) != shape_of((target[offset + at],)) else target[offset + at]
            for at, dim in enumerate(value.layout)
        ]
        atoms: list[Atom] = []
        for dim, new in zip(value.layout, wanted, strict=True):
            if dim == new:
                atoms += dim
            elif all(atom.axis is None for atom in dim):
                atoms += [Atom(atom.extent) for atom in new]
            else:
                atoms += dim
        if all(dim == new for dim, new in zip(value.layout, wanted, strict=True)):
            return self.enter(value, context)
        expanded = self._as_atoms(value, atoms)
        flat = [atom for dim in wanted for atom in dim]
        wants = {dim: _own(new) for dim, (old, new) in enumerate(zip(atoms, flat, strict=True)) if old != new}
        seen = self.view(expanded, wants, context)
        shape = local_shape(tuple(wanted), self.place)
        if seen.local == shape:
            return seen
        return self._raw(lambda x: x.reshape(shape), seen, shape)

    def cut_as(self, value: Value, layout: Layout) -> Value:
        """Return a value cut as `layout`, whatever it is made of."""
        seen = self.aligned(value, layout, axes_of(layout))
        return seen if seen.layout_or_none == layout else self.local(lambda x: x, [seen], layout)

    def reshard_away_from(self, layout: Layout, dims: Iterable[int]) -> Layout:
        """Return a layout with these dimensions whole; their cuts pass to others that are whole, and long enough.

        So no rank has all of what lies so, and each sees these dimensions whole for a part of it.
        """
        kept = {dim % len(layout) for dim in dims}
        found = list(whole_along(layout, kept))
        for axis in sorted(axes_of(layout[dim] for dim in kept) - axes_of(found)):
            free = [dim for dim, cut in enumerate(found) if dim not in kept and not axes_of((cut,))]
            extent, dim = max(((shape_of((found[dim],))[0], -dim) for dim in free), default=(0, 0))
            if extent >= self.mesh.parts[axis]:
                found[-dim] = (self.mesh.atom(extent, axis),)
        return tuple(found)

    def seen_whole(self, value: Value, dims: Iterable[int], context: Iterable[int]) -> Value:
        """Return a value with these dimensions whole, for what is cut by the axes of `context`."""
        dims = set(dims)
        layout = whole_along(value.layout, dims)
        if layout == value.layout:
            return self.enter(value, context)
        expanded, wants, at = self._atoms(value), {}, 0
        for index, dim in enumerate(value.layout):
            for atom in dim:
                if index in dims and atom.axis is not None:
                    wants[at] = (None, (((0, atom.extent),),))
                at += 1
        seen = self.view(expanded, wants, context)
        shape = local_shape(layout, self.place)
        return seen if seen.local == shape else self._raw(lambda x: x.reshape(shape), seen, shape)

    def seen_as(self, value: Value, target: Layout, context: Iterable[int]) -> Value:
        """Return a value aligned to a layout, dimensions that are whole there seen whole."""
        offset = len(target) - len(value.layout)
        dims = [
            at
            for at, dim in enumerate(value.layout)
            if axes_of([dim]) and not axes_of([target[offset + at]]) and value.shape[at] != 1
        ]
        if axes_of([value.layout[at] for at in dims]) & axes_of(target):  # where it would be cut twice by an axis
            value, dims = self.gathered(value, dims), []
        if not dims:
            return self.aligned(value, target, context)
        wanted = whole_along(value.layout, dims)
        if any(dim != target[offset + at] and value.shape[at] != 1 for at, dim in enumerate(wanted)):
            value = self.recut(
                value,
                tuple(
                    dim if at in dims or value.shape[at] == 1 else target[offset + at]
                    for at, dim in enumerate(value.layout)
                ),
            )
        return self.seen_whole(value, dims, context)

    def co_align(self, values: Sequence[Value], dims: Iterable[int]) -> tuple[list[Value], Layout]:
        """Return values of which these dimensions are whole and others are cut alike, and how the first is cut then.

        What is computed of them can be cut as that layout again, along these dimensions as the first one was.
        """
        first, chosen = values[0].layout, set(dims)
        rest = self.common(
            [tuple((Atom(1),) if at in chosen else dim for at, dim in enumerate(v.layout)) for v in values]
        )
        busy = axes_of(rest)
        back = tuple(
            rest[at] if at not in chosen else dim if not axes_of([dim]) & busy else whole_along((dim,), (0,))[0]
            for at, dim in enumerate(first)
        )
        seen = self.reshard_away_from(back, chosen)
        layouts = [tuple((Atom(n),) if at in chosen else seen[at] for at, n in enumerate(v.shape)) for v in values]
        return [self.cut_as(value, layout) for value, layout in zip(values, layouts, strict=True)], back

    def single(self, value: Value, dim: int) -> Value:
        """Return the value, with a dimension that is made of several atoms, some of them cut, whole."""
        return value if len(value.layout[dim]) == 1 else self.gathered(value, [dim])

    def common(self, layouts: Sequence[Layout]) -> Layout:
        """Return how a pointwise result of values that lie so is cut: as the first that is, in each dimension."""
        rank = max(len(layout) for layout in layouts)
        found: list[Dim] = []
        used: set[int] = set()
        for at in range(-rank, 0):
            dims = [layout[at] for layout in layouts if len(layout) >= -at]
            extent = max((shape_of((dim,))[0] for dim in dims), default=1)
            if any(shape_of((dim,))[0] == 0 for dim in dims):
                extent = 0
            full = [dim for dim in dims if shape_of((dim,))[0] == extent]
            cut = [dim for dim in full if axes_of((dim,))]
            cut.sort(key=lambda dim: dim != tuple(self.mesh.atom(a.extent, a.axis) for a in dim))
            chosen = next((dim for dim in cut if not axes_of((dim,)) & used), None)
            if chosen is None:
                chosen = (Atom(extent),)
            used |= axes_of((chosen,))
            found.append(chosen)
        return tuple(found)

    def _atoms(self, value: Value) -> Value:
        return self._as_atoms(value, [atom for dim in value.layout for atom in dim])

    def _as_atoms(self, value: Value, atoms: Sequence[Atom]) -> Value:
        return self.shaped(value, tuple((atom,) for atom in atoms))


def _own(atom: Atom) -> tuple[int | None, list[list[Range]]]:
    """Return what a view has to want of a dimension for it to be cut so."""
    return atom.axis, [[own] for own in atom.ranges]


def _alike_cut(dim: Dim, target: Dim) -> bool:
    """Return whether a dimension, if it is cut at all, is made of the same atoms as another, and does not broadcast."""
    return not axes_of((dim,)) or [a.extent for a in dim] == [a.extent for a in target]


def _aligned(dim: Dim, problem: Unaligned, mesh: Mesh) -> Dim:
    """Return the dimension with the atom of a problem cut at multiples of so many."""
    found = []
    for atom in dim:
        if atom == problem.atom:
            major = mesh.atom(atom.extent // problem.multiple, atom.axis)
            atom = major.scaled(problem.multiple)
        found.append(atom)
    return tuple(found)


def _alike(old: Sequence[Atom], new: Sequence[Atom]) -> list[Atom]:
    """Return the new atoms, those of one index that the old ones have included."""
    if len(old) == len(new):
        return list(new)
    found, rest = [], list(new)
    for atom in old:
        found.append(rest.pop(0) if rest and rest[0].extent == atom.extent else Atom(1))
    return found
