"""Kernels of a GPU as text in CUDA C, which CuPy compiles at first use, and the tables of numbers that they read.

T is the type of the numbers: see `typed`. Threads go through the numbers of a launch in steps of the whole grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod

Ints = Sequence[int]
NUMBERS = {"float32": "float", "float64": "double"}
"""with which kernels compute"""
WORDS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}
"""that are copied, by their bytes"""
AXES = 8
"""of an array, at most"""

_PREFIX = """
#ifndef KERNEL
#define KERNEL extern "C" __global__
#endif
#define EACH(i, total) \\
    (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < (total); \\
     i += gridDim.x * (long long)blockDim.x)
"""

COPY_EACH = """
KERNEL void copy_each(const long long *table, long long rank, long long total) {
    const long long width = 3 + 3 * rank;
    for EACH(i, total) {
        const long long *row = table;
        long long rest = i, from = 0, to = 0;
        while (row[0] <= i) row += width;
        if (row != table) rest -= row[-width];
        for (long long axis = rank - 1; axis >= 0; axis--) {
            const long long n = row[3 + axis], at = rest % n;
            rest /= n;
            from += at * row[3 + rank + axis];
            to += at * row[3 + 2 * rank + axis];
        }
        ((T *)row[2])[to] = ((const T *)row[1])[from];
    }
}
"""
"""Several arrays into as many others, of any strides; rows: numbers up to here, addresses, shape, both strides"""

ADD_BOXES = """
KERNEL void add_boxes(T *array, const long long *table, long long boxes, long long rank, long long total) {
    const long long *strides = table, *rows = table + rank, width = 2 + 2 * rank;
    for EACH(i, total) {
        long long cell[AXES], box = 0, rest = i, place = 0;
        while (rows[box * width] <= i) box++;
        if (box) rest -= rows[(box - 1) * width];
        for (long long axis = rank - 1; axis >= 0; axis--) {
            const long long n = rows[box * width + 2 + rank + axis];
            cell[axis] = rows[box * width + 2 + axis] + rest % n;
            rest /= n;
            place += cell[axis] * strides[axis];
        }
        T sum = array[place];
        int mine = 1;
        for (long long other = 0; mine && other < boxes; other++) {
            const long long *row = rows + other * width;
            long long inside = 1, at = 0;
            for (long long axis = 0; axis < rank; axis++) {
                const long long n = row[2 + rank + axis], step = cell[axis] - row[2 + axis];
                inside &= step >= 0 && step < n;
                at = at * n + step;
            }
            if (inside) {
                mine = other >= box;
                sum += ((const T *)row[1])[at];
            }
        }
        if (mine) array[place] = sum;
    }
}
"""
"""Boxes, which may overlap, to cells of an array: the first box that has a cell adds all, in their order.

The table: strides of the array; rows: numbers up to here, address of the box's numbers, first cell, shape
"""


def typed(source: str, number: str) -> str:
    """Return the text of a kernel for numbers of a type of C."""
    return f"typedef {number} T;\n#define AXES {AXES}\n{_PREFIX}{source}"


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


def box_table(strides: Ints, parts: Sequence[int], starts: Sequence[Ints], shapes: Sequence[Ints]) -> tuple[int, ...]:
    """Return what `add_boxes` reads, of boxes that are not empty.

    Parameters
    ----------
    strides : of the array, in numbers
    parts : the address of each box's numbers, in a row
    starts, shapes : where each box is in the array
    """
    found = [*strides]
    for done, part, start, shape in zip(accumulate(map(prod, shapes)), parts, starts, shapes, strict=True):
        found += [done, part, *start, *shape]
    return tuple(found)
