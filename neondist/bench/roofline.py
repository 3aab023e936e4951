"""Roofline of a layer: limited by matrix products or by memory bandwidth (Williams, Waterman and Patterson 2009)."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from ..comm import Transport
from ..models import Model
from ..plan import LayerPlan
from .rest import rest

REPEATS = 15
SIDE = 1024
COPIED = 1 << 26
"""bytes; more than the caches hold"""


def peaks(model: Model, world: Transport) -> dict[str, float]:
    """Return the peaks of all ranks together: flops per second of a matrix product, bytes per second of a copy."""
    kernels = model.leaves[0].kernels
    a, b = np.ones((2, SIDE, SIDE), model.dtype)
    source, target = np.ones((2, COPIED // 8))
    product = _best(world, lambda: kernels.matmul(a, b))
    copy = _best(world, lambda: np.copyto(target, source))
    return {
        "flops_per_second": world.size * 2 * SIDE**3 / product,
        "bytes_per_second": world.size * 2 * COPIED / copy,  # read and written
    }


def roofline_rows(model: Model, rows: list[dict[str, Any]], machine: dict[str, float]) -> list[dict[str, Any]]:
    """Return the rows with the flops, bytes and limit of each layer or segment, and its share of the limit.

    Bytes are those of its input, output and their gradients, each read or written once; recomputation is not counted.
    Sums over all ranks.
    """
    work = {name: _work(plans, model.batch_size, model.dtype.itemsize) for name, plans in model.compiled.units.items()}
    extended = []
    for row in rows:
        extra: dict[str, Any] = {}
        if row["name"] in work:
            flops, moved = work[row["name"]]
            by_product, by_memory = flops / machine["flops_per_second"], moved / machine["bytes_per_second"]
            taken = row["forward"] + row["backward"]
            extra = {"flops": flops, "bytes_moved": moved, "limit": "GEMM" if by_product > by_memory else "memory"}
            extra["flops_per_second"] = flops / taken if taken else None
            extra["share_of_limit"] = max(by_product, by_memory) / taken if taken else None
        extended.append(row | extra)
    return extended


def _work(plans: list[LayerPlan], batch: int, itemsize: int) -> tuple[int, int]:
    """Return flops and bytes of a step."""
    inputs, outputs, back = prod(plans[0].input_shape), prod(plans[-1].output_shape), plans[0].gradient
    flops = sum(products(plan) * (3 if plan.gradient else 2) for plan in plans)
    return 2 * batch * flops, batch * itemsize * (2 * inputs + 2 * outputs + inputs * back)


def products(plan: LayerPlan) -> int:
    """Return the multiplications of a sample's forward pass."""
    weights = plan.trained.get("weights")
    if weights is None:
        return 0
    image = plan.input_shape if plan.reverse else plan.output_shape
    return (1 if weights.layout.cut else prod(image[:-1])) * prod(weights.shape)


def _best(world: Transport, call: Callable[[], object]) -> float:
    """Return the seconds of the fastest of several simultaneous calls on all ranks, of the slowest rank."""
    call()
    times = []
    for _ in range(REPEATS):
        rest(world)
        begin = time.perf_counter()
        call()
        times.append(max(world.allgather(time.perf_counter() - begin)))
    return min(times)
