"""Layout of a tensor over ranks: its partitioned dimensions, with the grid axis and boundaries of each.

Pure integers. A dimension is a product of *atoms*, the first changing slowest: flattening (N, C, H, W) to (N, C·H·W)
makes one dimension of three atoms, of which H and W stay cut. So that reshaping costs no message.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd, prod
from typing import Any, NamedTuple

from ..geometry import GridShape, split

Shape = tuple[int, ...]


class Atom(NamedTuple):
    """A range of indices, whole on every rank, or cut: part p of `axis` has those of [bounds[p], bounds[p + 1]).

    Where a block is computed alone (blocks.py), `origin` says which cut these bounds come from, and the factor between.
    """

    extent: int
    axis: int | None = None
    bounds: tuple[int, ...] | None = None
    origin: tuple[Any, int] | None = None

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The half-open range of each part; one, of all indices, where it is whole."""
        return ((0, self.extent),) if self.bounds is None else tuple(pairwise(self.bounds))

    def range(self, place: Sequence[int]) -> tuple[int, int]:
        """Return the half-open range that the rank at a place of the mesh has."""
        if self.axis is None or self.bounds is None:
            return 0, self.extent
        return self.bounds[place[self.axis]], self.bounds[place[self.axis] + 1]

    def scaled(self, factor: int) -> Atom:
        """Return the atom whose every index has become `factor` of them, one after the other."""
        bounds = None if self.bounds is None else tuple(b * factor for b in self.bounds)
        origin = None if self.origin is None else (self.origin[0], self.origin[1] * factor)
        return Atom(self.extent * factor, self.axis, bounds, origin)


Dim = tuple[Atom, ...]
Layout = tuple[Dim, ...]


@dataclass(frozen=True)
class Mesh:
    """Ranks as replicas x parts of each spatial axis, numbered row-major; axis 0 cuts the batch.

    Attributes
    ----------
    parts : tuple of int
        Number of parts along each axis, replicas first.
    """

    parts: tuple[int, ...]

    @classmethod
    def of(cls, grid: GridShape, spatial: int) -> Mesh:
        """Return that of a grid, for images of so many spatial axes; 0: tensors of four axes at most are not images."""
        return cls((grid.replicas, *grid.parts(spatial or 3)))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return prod(self.parts)

    @property
    def spatial(self) -> int:
        """Number of spatial axes."""
        return len(self.parts) - 1

    @property
    def axes(self) -> frozenset[int]:
        """The axes that cut anything."""
        return frozenset(axis for axis, parts in enumerate(self.parts) if parts > 1)

    def place(self, rank: int) -> tuple[int, ...]:
        """Return a rank's coordinates."""
        found = []
        for parts in reversed(self.parts):
            rank, at = divmod(rank, parts)
            found.append(at)
        return tuple(reversed(found))

    def rank(self, place: Sequence[int]) -> int:
        """Return the rank at a place."""
        rank = 0
        for parts, at in zip(self.parts, place, strict=True):
            rank = rank * parts + at
        return rank

    def sums(self, axes: frozenset[int]) -> list[frozenset[int]]:
        """Return over which groups of ranks a sum over axes is taken, one after the other: by the axes in each."""
        axes &= self.axes
        if axes in (self.axes, self.axes - {0}):
            return [axes] if axes else []
        return [frozenset({axis}) for axis in sorted(axes)]

    def atom(self, extent: int, axis: int | None) -> Atom:
        """Return a range of indices cut evenly by an axis: the first extent % parts parts have one more."""
        if axis is None or self.parts[axis] == 1:
            return Atom(extent)
        parts = self.parts[axis]
        return Atom(extent, axis, (*(split(extent, parts, part)[0] for part in range(parts)), extent))

    def image(self, shape: Sequence[int]) -> Layout:
        """Return the layout of a batch of images (N, C, *spatial): all but C are cut."""
        axes = [0, None, *range(1, len(shape) - 1)]
        return tuple((self.atom(n, axis),) for n, axis in zip(shape, axes, strict=True))


def cut(shape: Sequence[int], mesh: Mesh) -> Layout:
    """Return how a tensor of the user's is cut: an image into tiles, another along the batch alone."""
    if len(shape) == mesh.spatial + 2:
        return mesh.image(shape)
    return ((mesh.atom(shape[0], 0),), *whole(shape[1:])) if shape else ()


def whole(shape: Sequence[int]) -> Layout:
    """Return the layout of a tensor that every rank has whole."""
    return tuple((Atom(n),) for n in shape)


def replaced(layout: Layout, dim: int, *atoms: Atom) -> Layout:
    """Return the layout with other atoms for a dimension."""
    return (*layout[:dim], atoms, *layout[dim + 1 :])


def whole_along(layout: Layout, dims: Collection[int]) -> Layout:
    """Return the layout with these dimensions whole on every rank."""
    return tuple((Atom(shape_of((dim,))[0]),) if at in dims else dim for at, dim in enumerate(layout))


def axes_of(layout: Iterable[Dim]) -> frozenset[int]:
    """Return the axes that cut a tensor."""
    return frozenset(atom.axis for dim in layout for atom in dim if atom.axis is not None)


def is_box(layout: Layout, axes: frozenset[int]) -> bool:
    """Return whether tiles are boxes, cut along these axes."""
    return all(len(dim) == 1 for dim in layout) and axes_of(layout) == axes


def shape_of(layout: Layout) -> Shape:
    """Return the global shape."""
    return tuple(prod(atom.extent for atom in dim) for dim in layout)


def local_shape(layout: Layout, place: Sequence[int]) -> Shape:
    """Return the shape of the part of the rank at a place."""
    return tuple(prod(local_atoms(dim, place)) for dim in layout)


def local_atoms(dim: Dim, place: Sequence[int]) -> Shape:
    """Return how many indices of each atom the rank at a place has."""
    return tuple(hi - lo for lo, hi in (atom.range(place) for atom in dim))


def merged(dim: Iterable[Atom]) -> Dim:
    """Return the dimension in the fewest atoms: what is whole joins what stands before it."""
    found: list[Atom] = []
    for atom in dim:
        if atom.extent == 1 and atom.axis is None:
            continue
        if found and atom.axis is None:
            found[-1] = found[-1].scaled(atom.extent)
        else:
            found.append(atom)
    return tuple(found) or (Atom(1),)


class Unaligned(Exception):
    """A cut does not fall between the indices that a reshaping splits apart.

    Attributes
    ----------
    multiple : int
        What every bound of the atom has to be a multiple of; 0: no cut would do.
    atom : Atom
    """

    def __init__(self, atom: Atom, multiple: int = 0) -> None:
        super().__init__(atom, multiple)
        self.atom, self.multiple = atom, multiple


def reshaped(layout: Layout, shape: Sequence[int]) -> Layout:
    """Return the layout after a reshaping to a global shape, with nothing moved.

    Raises
    ------
    Unaligned
        If a cut would have to be elsewhere.
    """
    atoms = [atom for dim in layout for atom in dim]
    atoms.reverse()  # the next one is the last
    found = []
    for at, size in enumerate(shape):
        dim: list[Atom] = []
        rest = size
        if size == 1:
            _drop_ones(atoms, shape[at:])
            if atoms and atoms[-1].extent == 1:
                dim.append(atoms.pop())
        while rest > 1:
            atom = atoms.pop()
            if rest % atom.extent == 0:
                dim.append(atom)
                rest //= atom.extent
                continue
            if atom.extent % rest == 0:
                major, minor = split_atom(atom, rest)
                dim.append(major)
                atoms.append(minor)
                rest = 1
                continue
            if atom.axis is None and atoms and atoms[-1].axis is None:  # (2, 3) becomes (3, 2)
                atoms[-1] = Atom(atom.extent * atoms[-1].extent)
                continue
            common = gcd(atom.extent, rest)
            if common == 1:
                raise Unaligned(atom)
            major, minor = split_atom(atom, common)
            dim.append(major)
            atoms.append(minor)
            rest //= common
        found.append(merged(dim))
    left = [atom for atom in atoms[::-1] if atom.axis is not None]  # of one index, which one part has
    if left and not found:
        raise Unaligned(left[0])
    return (*found[:-1], merged((*found[-1], *left))) if found else ()


def _drop_ones(atoms: list[Atom], shape: Sequence[int]) -> None:
    """Drop whole atoms of one index from the end, until there are as many of one index as dimensions to come."""
    ones = next((at for at, size in enumerate(shape) if size != 1), len(shape))
    run = next((at for at, atom in enumerate(atoms[::-1]) if atom.extent != 1), len(atoms))
    for at in range(len(atoms) - 1, len(atoms) - 1 - run, -1):
        if run > ones and atoms[at].axis is None:
            del atoms[at]
            run -= 1


def indices(dim: Dim, place: Sequence[int]) -> list[int]:
    """Return the global indices along a dimension that the rank at a place has."""
    found = [0]
    for atom in dim:
        lo, hi = atom.range(place)
        found = [index * atom.extent + at for index in found for at in range(lo, hi)]
    return found


def split_atom(atom: Atom, major: int) -> tuple[Atom, Atom]:
    """Return an atom as `major` groups of neighbours, and the place in a group."""
    minor = atom.extent // major
    if atom.bounds is None:
        return Atom(major), Atom(minor)
    # of a block the bounds are not known yet: its factor tells what they are multiples of
    if any(bound % minor for bound in (atom.bounds if atom.origin is None else atom.origin[1:])):
        raise Unaligned(atom, minor)
    origin = None if atom.origin is None else (atom.origin[0], atom.origin[1] // minor)
    return Atom(major, atom.axis, tuple(bound // minor for bound in atom.bounds), origin), Atom(minor)
