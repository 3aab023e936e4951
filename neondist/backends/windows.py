"""Windows of an array as views: where window o of a valid kernel finds its cells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product

import numpy as np

Ints = Sequence[int]


def out_extent(extent: Ints, kernel: Ints, stride: Ints, dilation: Ints) -> tuple[int, ...]:
    """Return how many windows fit on every axis, never negative."""
    return _out_extent(tuple(extent), tuple(kernel), tuple(stride), tuple(dilation))


@lru_cache
def _out_extent(extent: Ints, kernel: Ints, stride: Ints, dilation: Ints) -> tuple[int, ...]:
    axes = zip(extent, kernel, stride, dilation, strict=True)
    return tuple(max(0, (n - d * (k - 1) - 1) // s + 1) for n, k, s, d in axes)


def all_windows(x: np.ndarray, kernel: Ints, stride: Ints, dilation: Ints) -> np.ndarray:
    """Return x (N, *spatial, C) as a read-only view (N, *out, *kernel, C)."""
    out = out_extent(x.shape[1:-1], kernel, stride, dilation)
    spatial = x.strides[1:-1]
    steps = [b * s for b, s in zip(spatial, stride, strict=True)] + [
        b * d for b, d in zip(spatial, dilation, strict=True)
    ]
    return np.lib.stride_tricks.as_strided(
        x, (len(x), *out, *kernel, x.shape[-1]), (x.strides[0], *steps, x.strides[-1]), writeable=False
    )


def offsets(kernel: Ints, stride: Ints, dilation: Ints, out: Ints) -> Iterator[tuple[tuple[int, ...], tuple]]:
    """Yield, for every cell of a window in row-major order, its place and the index of that cell in all windows."""
    for place in product(*map(range, kernel)):
        starts = [p * d for p, d in zip(place, dilation, strict=True)]
        spans = [slice(a, a + (n - 1) * s + 1 if n else a, s) for a, s, n in zip(starts, stride, out, strict=True)]
        yield place, (slice(None), *spans)


def blocks(samples: int, out: Ints, cells_per_row: int, budget: int) -> Iterator[tuple[slice, slice]]:
    """Cut (samples, out[0]) into even blocks of at most about `budget` cells: whole samples, or rows of one sample.

    `cells_per_row` is what one index of out[0] takes.
    """
    rows = out[0]
    if samples * rows * cells_per_row == 0:
        return
    if samples * rows * cells_per_row <= budget:
        yield slice(0, samples), slice(0, rows)
        return
    per_block = max(1, budget // cells_per_row)
    if per_block >= rows:
        together = _even(samples, per_block // rows)
        for start in range(0, samples, together):
            yield slice(start, min(start + together, samples)), slice(0, rows)
        return
    per_block = _even(rows, per_block)
    for sample, start in product(range(samples), range(0, rows, per_block)):
        yield slice(sample, sample + 1), slice(start, min(start + per_block, rows))


def _even(count: int, at_most: int) -> int:
    """Return how many go together so that no block is much smaller than the others: kernels are slow on small ones."""
    return -(-count // -(-count // at_most))
