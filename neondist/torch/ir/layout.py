"""Layout of a tensor over ranks: its partitioned dimensions, with the grid axis and boundaries of each.

Layouts contain only integers. A dimension is a product of *atoms*, the first changing slowest: flattening (N, C, H, W)
to (N, C·H·W) makes one dimension of three atoms, of which H and W stay partitioned, so reshaping needs no messages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import gcd, prod

from ...geometry import Atom, GridShape, Place, Range, coords_of, index_of

Shape = tuple[int, ...]
Dim = tuple[Atom, ...]
Layout = tuple[Dim, ...]
NeededRanges = dict[int, tuple[int, list[Range]]]
"""For each partitioned dimension: the axis of the mesh, and the range that each of its parts needs."""


def ranges_at_place(needed_ranges: NeededRanges, place: Sequence[int]) -> dict[int, Range]:
    """Return the range that the rank at a place needs along each of the dimensions."""
    return {dim: ranges[place[axis]] for dim, (axis, ranges) in needed_ranges.items()}


@dataclass(frozen=True)
class Mesh:
    """Ranks as replicas x parts of each spatial axis, numbered row-major; axis 0 partitions the batch.

    Attributes
    ----------
    parts : tuple of int
        Number of parts along each axis, replicas first.
    """

    parts: tuple[int, ...]

    @classmethod
    def from_grid(cls, grid: GridShape, spatial_ndim: int) -> Mesh:
        """Return the mesh for images with `spatial_ndim` axes or, if this is 0, the mesh for volumes."""
        return cls((grid.replicas, *grid.parts(spatial_ndim or 3)))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return prod(self.parts)

    @property
    def spatial_ndim(self) -> int:
        """Number of spatial axes."""
        return len(self.parts) - 1

    @property
    def axes(self) -> frozenset[int]:
        """Axes of more than one part."""
        return frozenset(axis for axis, parts in enumerate(self.parts) if parts > 1)

    def place(self, rank: int) -> tuple[int, ...]:
        """Return a rank's coordinates."""
        return coords_of(self.parts, rank)

    def rank(self, place: Sequence[int]) -> int:
        """Return the rank at a place."""
        return index_of(self.parts, place)

    def reduction_axes(self, axes: frozenset[int]) -> list[frozenset[int]]:
        """Return the axes of each group of ranks in the successive reductions that make up a sum over `axes`."""
        axes &= self.axes
        if axes in (self.axes, self.axes - {0}):
            return [axes] if axes else []
        return [frozenset({axis}) for axis in sorted(axes)]

    def even_atom(self, extent: int, axis: int | None) -> Atom:
        """Return an atom split evenly over an axis: the first `extent % parts` parts have one more index."""
        return Atom(extent) if axis is None or self.parts[axis] == 1 else Atom.even(extent, axis, self.parts[axis])

    def image_layout(self, shape: Sequence[int]) -> Layout:
        """Return the layout of a batch of images (N, C, *spatial): all dimensions but C are partitioned."""
        axes = [0, None, *range(1, len(shape) - 1)]
        return tuple((self.even_atom(n, axis),) for n, axis in zip(shape, axes, strict=True))


def default_layout(shape: Sequence[int], mesh: Mesh) -> Layout:
    """Return the layout of a user's tensor: images are cut into tiles, other tensors along the batch only."""
    if len(shape) == mesh.spatial_ndim + 2:
        return mesh.image_layout(shape)
    return ((mesh.even_atom(shape[0], 0),), *replicated(shape[1:])) if shape else ()


def replicated(shape: Sequence[int]) -> Layout:
    """Return the layout of a tensor replicated on every rank."""
    return tuple((Atom(n),) for n in shape)


def replace_dim(layout: Layout, dim: int, *atoms: Atom) -> Layout:
    """Return the layout with other atoms for a dimension."""
    dim %= len(layout)
    return (*layout[:dim], atoms, *layout[dim + 1 :])


def replicated_along(layout: Layout, dims: Collection[int]) -> Layout:
    """Return the layout with these dimensions whole on every rank."""
    return tuple((Atom(shape_of((dim,))[0]),) if at in dims else dim for at, dim in enumerate(layout))


def whole_if_partitioned_along(dim: Dim, axes: frozenset[int]) -> Dim:
    """Return the dimension, whole on every rank if one of these axes partitions it."""
    return (Atom(shape_of((dim,))[0]),) if axes_of((dim,)) & axes else dim


def axes_of(layout: Iterable[Dim]) -> frozenset[int]:
    """Return the axes that partition a tensor."""
    return frozenset(atom.axis for dim in layout for atom in dim if atom.axis is not None)


def is_box(layout: Layout, axes: frozenset[int]) -> bool:
    """Return whether tiles are boxes, partitioned along exactly these axes."""
    return all(len(dim) == 1 for dim in layout) and axes_of(layout) == axes


def shape_of(layout: Layout) -> Shape:
    """Return the global shape."""
    return tuple(prod(atom.extent for atom in dim) for dim in layout)


def local_shape(layout: Layout, place: Place) -> Shape:
    """Return the shape of the part on the rank at a place."""
    return tuple(prod(local_atom_extents(dim, place)) for dim in layout)


def layout_of_block(layout: Layout, place: Place) -> Layout:
    """Return the layout with the ranges of a block."""
    return tuple(
        tuple(atom if atom.origin is None else atom._replace(bounds=atom.range(place)) for atom in dim)
        for dim in layout
    )


def local_atom_extents(dim: Dim, place: Place) -> Shape:
    """Return the number of indices of each atom on the rank at a place."""
    return tuple(hi - lo for lo, hi in (atom.range(place) for atom in dim))


def merge_atoms(dim: Iterable[Atom]) -> Dim:
    """Return the dimension with the fewest atoms: whole atoms are merged into the preceding atom."""
    atoms: list[Atom] = []
    for atom in dim:
        if atom.extent == 1 and atom.axis is None:
            continue
        if atoms and atom.axis is None:
            atoms[-1] = atoms[-1].scaled(atom.extent)
        else:
            atoms.append(atom)
    return tuple(atoms) or (Atom(1),)


class UnalignedPartitionError(Exception):
    """A partition boundary does not fall between the indices that a reshape separates.

    Attributes
    ----------
    required_multiple : int
        Every bound of the atom must be a multiple of this number; 0: no partition is possible.
    atom : Atom
    """

    def __init__(self, atom: Atom, required_multiple: int = 0) -> None:
        super().__init__(atom, required_multiple)
        self.atom, self.required_multiple = atom, required_multiple


def reshape_layout(layout: Layout, shape: Sequence[int]) -> Layout:
    """Return the layout after a reshape to a global shape, without data movement.

    Raises
    ------
    UnalignedPartitionError
        If a partition boundary would have to move.
    """
    atoms = [atom for dim in layout for atom in dim]
    atoms.reverse()  # so that pop returns the next atom
    dims = []
    for at, size in enumerate(shape):
        dim: list[Atom] = []
        remaining_size = size
        if size == 1:
            _drop_unit_atoms(atoms, shape[at:])
            if atoms and atoms[-1].extent == 1:
                dim.append(atoms.pop())
        while remaining_size > 1:
            atom = atoms.pop()
            if remaining_size % atom.extent == 0:
                dim.append(atom)
                remaining_size //= atom.extent
                continue
            if atom.extent % remaining_size == 0:
                major, minor = split_atom(atom, remaining_size)
                dim.append(major)
                atoms.append(minor)
                remaining_size = 1
                continue
            if atom.axis is None and atoms and atoms[-1].axis is None:  # (2, 3) becomes (3, 2)
                atoms[-1] = Atom(atom.extent * atoms[-1].extent)
                continue
            common_factor = gcd(atom.extent, remaining_size)
            if common_factor == 1:
                raise UnalignedPartitionError(atom)
            major, minor = split_atom(atom, common_factor)
            dim.append(major)
            atoms.append(minor)
            remaining_size //= common_factor
        dims.append(merge_atoms(dim))
    unit_atoms = [atom for atom in atoms[::-1] if atom.axis is not None]  # their index belongs to one part
    if unit_atoms and not dims:
        raise UnalignedPartitionError(unit_atoms[0])
    return (*dims[:-1], merge_atoms((*dims[-1], *unit_atoms))) if dims else ()


def _drop_unit_atoms(atoms: list[Atom], shape: Sequence[int]) -> None:
    """Drop whole atoms of one index from the end until at most as many remain as `shape` has leading 1s."""
    num_leading_ones = next((at for at, size in enumerate(shape) if size != 1), len(shape))
    num_unit_atoms = next((at for at, atom in enumerate(atoms[::-1]) if atom.extent != 1), len(atoms))
    for at in range(len(atoms) - 1, len(atoms) - 1 - num_unit_atoms, -1):
        if num_unit_atoms > num_leading_ones and atoms[at].axis is None:
            del atoms[at]
            num_unit_atoms -= 1


def local_indices(dim: Dim, place: Place) -> list[int]:
    """Return the global indices along a dimension on the rank at a place."""
    indices = [0]
    for atom in dim:
        lo, hi = atom.range(place)
        indices = [index * atom.extent + at for index in indices for at in range(lo, hi)]
    return indices


def is_contiguous_on_every_rank(dim: Dim) -> bool:
    """Return whether each rank's indices along a dimension form one range."""
    last_partitioned = max((at for at, atom in enumerate(dim) if atom.axis is not None), default=0)
    return all(hi - lo <= 1 for atom in dim[:last_partitioned] for lo, hi in atom.ranges)


def range_at(dim: Dim, place: Place) -> Range:
    """Return the range of indices along a dimension on the rank at a place; see `is_contiguous_on_every_rank`."""
    first, count = 0, 1
    for atom in dim:
        lo, hi = atom.range(place)
        first, count = first * atom.extent + lo, count * (hi - lo)
    return (first, first + count) if count else (0, 0)


def split_atom(atom: Atom, num_groups: int) -> tuple[Atom, Atom]:
    """Split an atom into `num_groups` groups of adjacent indices and the position within a group."""
    group_size = atom.extent // num_groups
    if atom.bounds is None:
        return Atom(num_groups), Atom(group_size)
    # the bounds of a block are not known yet, but are multiples of the factor in `origin`
    if any(bound % group_size for bound in (atom.bounds if atom.origin is None else atom.origin[1:])):
        raise UnalignedPartitionError(atom, group_size)
    origin = None if atom.origin is None else (atom.origin[0], atom.origin[1] // group_size)
    return Atom(num_groups, atom.axis, tuple(bound // group_size for bound in atom.bounds), origin), Atom(group_size)
