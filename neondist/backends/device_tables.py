"""Tables of shapes, strides and addresses that GPU kernels read; `device_kernels` documents their layout."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod

Ints = Sequence[int]


def copy_each_table(
    addresses: Sequence[tuple[int, int]], shapes: Sequence[Ints], strides: Sequence[tuple[Ints, Ints]], rank: int
) -> tuple[int, ...]:
    """Return the table of `copy_each`.

    Parameters
    ----------
    addresses : addresses of each pair of arrays
    shapes : shape of each pair, not empty
    strides : strides of both arrays of each pair, in elements
    rank : number of axes of the longest shape
    """
    table: list[int] = []
    for end, pair, shape, pair_strides in zip(accumulate(map(prod, shapes)), addresses, shapes, strides, strict=True):
        table += [end, *pair, *(1,) * (rank - len(shape)), *shape]
        for steps in pair_strides:
            table += [*(0,) * (rank - len(shape)), *steps]
    return tuple(table)


def boxes_table(
    strides: Ints, part_addresses: Sequence[int], boxes: Sequence[Sequence[slice]], shapes: Sequence[Ints]
) -> tuple[int, ...]:
    """Return the table of `add_boxes`, for boxes that are not empty.

    Parameters
    ----------
    strides : strides of the array, in elements
    part_addresses : address of each box's elements, which are contiguous
    boxes, shapes : slices of each box, possibly with steps, and shape of each box
    """
    table = [*strides]
    for end, part, box, shape in zip(accumulate(map(prod, shapes)), part_addresses, boxes, shapes, strict=True):
        table += [end, part, *(cut.start for cut in box), *shape, *(cut.step or 1 for cut in box)]
    return tuple(table)


def pool_geometry_table(
    extent: Ints, out_extent: Ints, kernel: Ints, stride: Ints, channels: int, strides: Ints
) -> tuple[int, ...]:
    """Return the table of `max_pool` and `max_pool_back`, for up to three spatial axes.

    Parameters
    ----------
    strides : strides of x, in elements
    """
    num_missing = 3 - len(extent)
    ones, zeros = (1,) * num_missing, (0,) * num_missing
    table = (*ones, *extent, *ones, *out_extent, *ones, *kernel, *ones, *stride, channels)
    return (*table, strides[0], *zeros, *strides[1:])


def coalesced_strides_table(shape: Ints, strides: Sequence[Ints], by_sample: bool = False) -> tuple[int, ...]:
    """Return the shape and strides of arrays, in elements; adjacent axes are merged, since each costs a division.

    The last axis is never merged; with `by_sample`, neither is the first.
    """
    num_fixed_axes, axis_strides = int(by_sample), [(n, *steps) for n, *steps in zip(shape, *strides, strict=True)]
    merged_axes = axis_strides[:num_fixed_axes]
    for n, *steps in axis_strides[num_fixed_axes:-1]:
        if len(merged_axes) > num_fixed_axes and merged_axes[-1][1:] == tuple(n * step for step in steps):
            merged_axes[-1] = (n * merged_axes[-1][0], *steps)
        elif n != 1:
            merged_axes.append((n, *steps))
    return tuple(number for column in zip(*merged_axes, axis_strides[-1], strict=True) for number in column)


def depthwise_table(pool_geometry: tuple[int, ...], dilation: Ints, channels: int) -> tuple[int, ...]:
    """Return the table of `depthwise` and `depthwise_back`, given the table of a pooling with the same windows."""
    return (*pool_geometry, *(1,) * (3 - len(dilation)), *dilation, channels)
