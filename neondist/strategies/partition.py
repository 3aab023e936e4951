"""Rules for dividing parameters into parts and assigning the parts to owners, as in AutoDist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..geometry import part_range
from .parameter_spec import ParameterSpec

AxisPartition = tuple[int, list[int]]
"""An axis, and the extents of the parts along it."""


def smallest_divisor(n: int) -> int:
    """Return the smallest divisor of n that is at least 2; 1 if n < 2."""
    return next((i for i in range(2, n) if n % i == 0), n) if n > 1 else 1


def smallest_non_divisor(n: int) -> int:
    """Return the smallest number from 2 to n that does not divide n; n if there is none, 1 if n < 2."""
    return next((i for i in range(2, n) if n % i), n) if n > 1 else 1


def even_partition(spec: ParameterSpec, axis: int, num_parts: int) -> AxisPartition | None:
    """Return a balanced partition of an axis into `num_parts`, larger ones first; None if it has a single part."""
    if axis >= len(spec.shape) or num_parts < 2:
        return None
    part_bounds = (part_range(spec.shape[axis], num_parts, part) for part in range(num_parts))
    return axis, [hi - lo for lo, hi in part_bounds]


def part_sizes(spec: ParameterSpec, partition: AxisPartition | None) -> list[int]:
    """Return the size of each part in bytes."""
    if partition is None:
        return [spec.nbytes]
    axis, extents = partition
    bytes_per_row = spec.nbytes // spec.shape[axis]
    return [size * bytes_per_row for size in extents]


def balance_owners(sizes_by_name: Mapping[str, Sequence[int]], num_owners: int) -> dict[str, list[int]]:
    """Assign all parts of all parameters greedily: largest first, each to the owner with the fewest bytes.

    Parameters
    ----------
    sizes_by_name : mapping of parameter name to the sizes of its parts in bytes
    """
    bytes_by_owner, owners_by_name = [0] * num_owners, {name: [0] * len(sizes) for name, sizes in sizes_by_name.items()}
    parts = [(nbytes, name, at) for name, sizes in sizes_by_name.items() for at, nbytes in enumerate(sizes)]
    for nbytes, name, at in sorted(parts, key=lambda part: -part[0]):
        owner = bytes_by_owner.index(min(bytes_by_owner))
        bytes_by_owner[owner] += nbytes
        owners_by_name[name][at] = owner
    return owners_by_name
