"""What limits a layer: the matrix multiply's speed, or the memory's (Williams, Waterman and Patterson 2009)."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from ..comm import Transport
from ..layers import Layer
from ..models import Model
from .rest import rest

REPEATS = 5
SIDE = 1024
COPIED = 1 << 26
"""bytes; more than the caches hold"""


def peaks(model: Model, world: Transport) -> dict[str, float]:
    """Return what all ranks reach together: flops per second of a matrix product, bytes per second of a copy."""
    kernels = model.leaves[0].kernels
    a, b = np.ones((2, SIDE, SIDE), model.dtype)
    source, target = np.ones((2, COPIED // 8))
    product = _best(world, lambda: kernels.matmul(a, b))
    copy = _best(world, lambda: np.copyto(target, source))
    return {
        "flops_per_second": world.size * 2 * SIDE**3 / product,
        "bytes_per_second": world.size * 2 * COPIED / copy,  # read and written
    }


def roofline_rows(model: Model, layers: list[dict[str, Any]], machine: dict[str, float]) -> list[dict[str, Any]]:
    """Return the rows with each layer's flops, bytes, limit, and the share of the limit's speed that it reaches.

    Bytes are those of its input, output and their gradients, each read or written once. Sums over all ranks.
    """
    first = [plan.layer for plan in model.compiled if not plan.gradient]
    known = {str(layer.name): _work(layer, model.batch_size, layer not in first) for layer in model.leaves}
    made = []
    for row in layers:
        extra: dict[str, Any] = {}
        if row["name"] in known:
            flops, moved = known[row["name"]]
            by_product, by_memory = flops / machine["flops_per_second"], moved / machine["bytes_per_second"]
            taken = row["forward"] + row["backward"]
            extra = {"flops": flops, "bytes_moved": moved, "limit": "GEMM" if by_product > by_memory else "memory"}
            extra["share_of_limit"] = max(by_product, by_memory) / taken if taken else None
        made.append(row | extra)
    return made


def _work(layer: Layer, batch: int, back: bool) -> tuple[int, int]:
    """Return flops and bytes of a step; `back`: the input's gradient is needed."""
    inputs, outputs = prod(layer.input_shape), prod(layer.output_shape)
    weights = layer.parameters_for(layer.input_shape).get("weights")
    cells = 1 if weights is None or weights.layout.cut else prod(layer.output_shape[:-1])
    once = 0 if weights is None else 2 * batch * cells * prod(weights.shape)
    item = layer.context.dtype.itemsize
    return once * (3 if back else 2), batch * item * (2 * inputs + 2 * outputs + inputs * back)


def _best(world: Transport, call: Callable[[], object]) -> float:
    """Return the seconds of the fastest of some calls that all ranks make at once, of the slowest rank."""
    call()
    times = []
    for _ in range(REPEATS):
        rest(world)
        begin = time.perf_counter()
        call()
        times.append(max(world.allgather(time.perf_counter() - begin)))
    return min(times)
