"""Tables of numbers that kernels of a GPU read: shapes, strides, addresses; `device_kernels` says what is where."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod

Ints = Sequence[int]


def copy_table(
    ends: Sequence[tuple[int, int]], shapes: Sequence[Ints], strides: Sequence[tuple[Ints, Ints]], rank: int
) -> tuple[int, ...]:
    """Return what `copy_each` reads.

    Parameters
    ----------
    ends : addresses of each pair of arrays
    shapes : of each pair, not empty
    strides : of both, in numbers
    rank : of the largest shape
    """
    found: list[int] = []
    for done, pair, shape, both in zip(accumulate(map(prod, shapes)), ends, shapes, strides, strict=True):
        found += [done, *pair, *(1,) * (rank - len(shape)), *shape]
        for steps in both:
            found += [*(0,) * (rank - len(shape)), *steps]
    return tuple(found)


def box_table(
    strides: Ints, parts: Sequence[int], boxes: Sequence[Sequence[slice]], shapes: Sequence[Ints]
) -> tuple[int, ...]:
    """Return what `add_boxes` reads, of boxes that are not empty.

    Parameters
    ----------
    strides : of the array, in numbers
    parts : the address of each box's numbers, in a row
    boxes, shapes : where each box is in the array; with steps, or without
    """
    found = [*strides]
    for done, part, box, shape in zip(accumulate(map(prod, shapes)), parts, boxes, shapes, strict=True):
        found += [done, part, *(cut.start for cut in box), *shape, *(cut.step or 1 for cut in box)]
    return tuple(found)


def pool_table(extent: Ints, out: Ints, kernel: Ints, stride: Ints, channels: int, strides: Ints) -> tuple[int, ...]:
    """Return what `max_pool` and `max_pool_back` read, of up to three spatial axes.

    Parameters
    ----------
    strides : of x, in numbers
    """
    more = 3 - len(extent)
    one, zero = (1,) * more, (0,) * more
    found = (*one, *extent, *one, *out, *one, *kernel, *one, *stride, channels)
    return (*found, strides[0], *zero, *strides[1:])


def cell_table(shape: Ints, strides: Sequence[Ints], by_sample: bool = False) -> tuple[int, ...]:
    """Return a shape and the strides of arrays of it, in numbers, of as few axes as these need: a division for each.

    The last axis stays, and with `by_sample` the first.
    """
    first, kept = int(by_sample), [(n, *steps) for n, *steps in zip(shape, *strides, strict=True)]
    found = kept[:first]
    for n, *steps in kept[first:-1]:
        if len(found) > first and found[-1][1:] == tuple(n * step for step in steps):
            found[-1] = (n * found[-1][0], *steps)
        elif n != 1:
            found.append((n, *steps))
    return tuple(number for column in zip(*found, kept[-1], strict=True) for number in column)


def depthwise_table(pool: tuple[int, ...], dilation: Ints, channels: int) -> tuple[int, ...]:
    """Return what `depthwise` and `depthwise_back` read, given what a pooling of such windows reads."""
    return (*pool, *(1,) * (3 - len(dilation)), *dilation, channels)
