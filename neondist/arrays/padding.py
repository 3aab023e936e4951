"""Padding that is copied from the image: reflect and replicate, and the way back.

Both work on one axis after the other, so that corners come out right; the cells that they copy are in the buffer
already (HaloPlan asks for them).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..geometry import HaloPlan, fold


def fold_in(buffer: Any, plan: HaloPlan) -> None:
    """Fill the cells outside the image from cells inside."""
    for target, source in _pairs(plan):
        buffer[target] = buffer[source]


def fold_back(gradient: Any, plan: HaloPlan) -> None:
    """Add the gradient of the cells outside the image to the cells that they were copied from."""
    for target, source in reversed(list(_pairs(plan))):
        gradient[source] += gradient[target]


def _pairs(plan: HaloPlan) -> Iterator[tuple[tuple, tuple]]:
    """Yield (padding layer, source layer) as indices into the buffer; a layer is one cell thick."""
    if plan.window.mode not in ("reflect", "replicate") or plan.need.empty:
        return
    for axis, ((lo, hi), n) in enumerate(zip(plan.need.axes(), plan.extent, strict=True)):
        before = (slice(None),) * (axis + 1)
        start = plan.buffer.lo[axis]
        for cell in (*range(lo, min(0, hi)), *range(max(n, lo), hi)):
            yield (*before, cell - start), (*before, fold(cell, n, plan.window.mode) - start)
