"""`neondist bench halo`: halo exchange compared with the same messages in plain mpi4py, and with memcpy."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from ..comm import ProcessGrid, Transport
from ..geometry import Window
from ..halo import GlobalArray
from ..io.environment import describe_environment
from ..terminal.progress_line import ProgressLine, SilentProgress
from .sleeping_barrier import sleeping_barrier

BATCH_SIZE, CHANNELS = 8, 64
IMAGE_EXTENTS = (16, 32, 64, 128, 256)
NUM_CALLS, ROUNDS = 5, 15
ROUND_SECONDS = 0.02
"""seconds for which each call is repeated in a round"""


def bench_halo(
    world: Transport, extents: tuple[int, ...] = IMAGE_EXTENTS, progress: ProgressLine | None = None
) -> dict[str, Any]:
    """Measure exchanges of halos one cell wide. Collective: every rank gets the same result.

    Images are (8, n, n, 64) float32, split along H. Seconds are medians over rounds of the slowest rank's time.
    """
    grid = ProcessGrid(world, rows=world.size, cols=1)
    sizes = []
    progress = progress or SilentProgress()
    progress.set_total_parts(len(extents), planned_seconds=[NUM_CALLS * ROUNDS * ROUND_SECONDS] * len(extents))
    for n in extents:
        progress.begin_part(f"{n} x {n} cells")
        sizes.append(_measure_exchanges(grid, n))
        progress.add_done_parts(1)
    return {"bench": "halo", **describe_environment(grid), "sizes": sizes}


def _measure_exchanges(grid: ProcessGrid, extent: int) -> dict[str, Any]:
    array = GlobalArray(grid, (BATCH_SIZE, extent, extent, CHANNELS), Window(3, padding=1), reuse=True)
    tile = np.ones(array.local_shape, np.float32)
    view = array.get_fprop_view(tile)
    sent_bytes = array.bytes_sent
    in_place = array.buffer(BATCH_SIZE).tile
    source, target = np.ones((2, max(1, sent_bytes // 4)), np.float32)
    calls_by_name: dict[str, Callable[[], object]] = {
        "exchange": lambda: array.get_fprop_view(in_place),
        "with_tile": lambda: array.get_fprop_view(tile),
        "scatter_add": lambda: array.get_bprop_view(view),
        "raw": _plain_mpi_exchange(grid.world, view.copy()),
        "memcpy": lambda: np.copyto(target, source),
    }
    seconds = _time_rounds(grid.world, calls_by_name)
    return {
        "shape": [BATCH_SIZE, extent, extent, CHANNELS],
        "bytes_sent": max(grid.world.allgather(sent_bytes)),
        **{f"{name}_seconds": median(times) for name, times in seconds.items()},
        "exchange_over_raw": median(a / b for a, b in zip(seconds["exchange"], seconds["raw"], strict=True)),
        "exchange_over_memcpy": median(a / b for a, b in zip(seconds["exchange"], seconds["memcpy"], strict=True)),
    }


def _time_rounds(world: Transport, calls_by_name: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Return the seconds per call in each round, by name; each round runs all calls."""
    counts = {}
    for name, call in calls_by_name.items():
        call()
        counts[name] = max(1, int(ROUND_SECONDS / max(_time_calls(world, call, 3), 1e-7)))
    rounds = [
        {name: _time_calls(world, call, counts[name]) for name, call in calls_by_name.items()} for _ in range(ROUNDS)
    ]
    return {name: [seconds[name] for seconds in rounds] for name in calls_by_name}


def _time_calls(world: Transport, call: Callable[[], object], count: int) -> float:
    sleeping_barrier(world)
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return max(world.allgather(time.perf_counter() - begin)) / count


def _plain_mpi_exchange(world: Transport, view: np.ndarray) -> Callable[[], object]:
    """Return the same exchange in plain mpi4py, with subarray datatypes, and with receives posted before sends."""
    comm, mpi = getattr(world, "comm", None), getattr(world, "mpi", None)
    if comm is None or mpi is None:
        return lambda: None
    has_top, has_bottom = world.rank > 0, world.rank < world.size - 1
    rows = view.shape[1]

    def strip(row: int) -> list[Any]:
        part = [view.shape[0], 1, *view.shape[2:]]
        return [view, 1, mpi.FLOAT.Create_subarray(view.shape, part, [0, row, 0, 0]).Commit()]

    receives = [(strip(0), world.rank - 1)] * has_top + [(strip(rows - 1), world.rank + 1)] * has_bottom
    sends = [(strip(1), world.rank - 1)] * has_top + [(strip(rows - 2), world.rank + 1)] * has_bottom

    def exchange() -> None:
        requests = [comm.Irecv(part, peer) for part, peer in receives]
        requests += [comm.Isend(part, peer) for part, peer in sends]
        mpi.Request.Waitall(requests)

    return exchange
