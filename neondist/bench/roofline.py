"""Roofline of a layer: whether matrix products or memory bandwidth limit it (Williams, Waterman and Patterson 2009)."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from ..comm import Transport
from ..models import Model
from ..plan import LayerPlan
from .sleeping_barrier import sleeping_barrier

TIMED_CALLS = 15
MATRIX_EXTENT = 1024
COPIED_BYTES = 1 << 26
"""bytes to copy, more than fit in the caches"""


class BenchmarkWork(NamedTuple):
    """A function to time, and its number of operations, or of bytes read and written."""

    call: Callable[[], object]
    operations_or_bytes: float


def matrix_product_work(
    extent: int, dtype: DTypeLike, matmul: Callable[[Any, Any], object] | None = None
) -> BenchmarkWork:
    """Return a product of two matrices, by default with NumPy and without allocation."""
    a, b = np.ones((2, extent, extent), dtype)
    multiply = matmul or partial(np.matmul, out=np.empty_like(a))
    return BenchmarkWork(lambda: multiply(a, b), 2 * extent**3)


def memory_copy_work(copied_bytes: int) -> BenchmarkWork:
    """Return a copy of this many bytes."""
    source, target = np.ones((2, copied_bytes // 8))
    return BenchmarkWork(lambda: np.copyto(target, source), 2 * copied_bytes)


def measure_peak_rates(model: Model, world: Transport) -> dict[str, float]:
    """Return the total peak rates of all ranks: flops per second of a matrix product, bytes per second of a copy."""
    rates = measure_rank_rates(world, model.leaves[0].kernels.matmul, model.dtype)
    return dict(zip(("flops_per_second", "bytes_per_second"), (world.size * rate for rate in rates), strict=True))


def measure_rank_rates(
    world: Transport,
    matmul: Callable[[Any, Any], object],
    dtype: np.dtype,
    matrix_extent: int = MATRIX_EXTENT,
    copied_bytes: int = COPIED_BYTES,
    calls: int = TIMED_CALLS,
) -> tuple[float, float]:
    """Return a rank's flops per second in a matrix product, and the bytes per second that a copy reads and writes."""
    product, copy = matrix_product_work(matrix_extent, dtype, matmul), memory_copy_work(copied_bytes)
    flops, bandwidth = (
        work.operations_or_bytes / _fastest_call_seconds(world, work.call, calls) for work in (product, copy)
    )
    return flops, bandwidth


def roofline_rows(model: Model, rows: list[dict[str, Any]], machine: dict[str, float]) -> list[dict[str, Any]]:
    """Return the rows with the flops, bytes and limit of each layer or segment, and its share of the limit.

    Bytes are those of input, output and their gradients, each read or written once; recomputation is not counted.
    Values are sums over the ranks.
    """
    work = {
        name: _flops_and_bytes(plans, model.batch_size, model.dtype.itemsize)
        for name, plans in model.compiled.execution_units.items()
    }
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


def _flops_and_bytes(plans: list[LayerPlan], batch: int, itemsize: int) -> tuple[int, int]:
    inputs, outputs, back = prod(plans[0].input_shape), prod(plans[-1].output_shape), plans[0].needs_input_gradient
    flops = sum(count_multiplications(plan) * (3 if plan.needs_input_gradient else 2) for plan in plans)
    return 2 * batch * flops, batch * itemsize * (2 * inputs + 2 * outputs + inputs * back)


def count_multiplications(plan: LayerPlan) -> int:
    """Return the number of multiplications of a layer in a sample's forward pass."""
    weights = plan.trained_parameters.get("weights")
    if weights is None:
        return 0
    image = plan.input_shape if plan.adds_output_halo else plan.output_shape
    return (1 if weights.layout.is_partitioned else prod(image[:-1])) * prod(weights.shape)


def _fastest_call_seconds(world: Transport, call: Callable[[], object], calls: int) -> float:
    """Return the seconds of the fastest of several calls, made on all ranks at once and timed on the slowest rank."""
    call()
    times = []
    for _ in range(calls):
        sleeping_barrier(world)
        begin = time.perf_counter()
        call()
        times.append(max(world.allgather(time.perf_counter() - begin)))
    return min(times)
