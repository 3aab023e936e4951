"""Allocations by PyTorch's kernels in a step, which Python's tracemalloc does not record."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

MIN_COUNTED_BLOCK_BYTES = 1 << 16


class OperatorAllocations(NamedTuple):
    """Large memory blocks that one operator of PyTorch has allocated."""

    operator: str
    block_count: int
    largest_bytes: int
    total_bytes: int


def measure_allocations(call: Callable[[], object]) -> list[OperatorAllocations]:
    """Return the allocations of at least 64 KiB made while `call` runs, by outermost operator; largest first.

    Scratch memory that oneDNN and MKL allocate themselves is not included.
    """
    from torch.profiler import ProfilerActivity, profile

    with suppress_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    events = list(recorded.profiler.kineto_results.events())
    calls = [(event.start_ns(), event.end_ns(), event.name()) for event in events if event.name() != "[memory]"]
    sizes: defaultdict[str, list[int]] = defaultdict(list)
    for event in events:
        if event.name() == "[memory]" and event.nbytes() >= MIN_COUNTED_BLOCK_BYTES:
            time_ns = event.start_ns()
            outer = min((entry for entry in calls if entry[0] <= time_ns <= entry[1]), default=(0, 0, ""))
            sizes[outer[2].removeprefix("aten::")].append(event.nbytes())
    allocations = [OperatorAllocations(name, len(blocks), max(blocks), sum(blocks)) for name, blocks in sizes.items()]
    return sorted(allocations, key=lambda entry: -entry.largest_bytes)


@contextmanager
def suppress_stderr() -> Iterator[None]:
    """Suppress the messages of the profiler's library, which writes to the standard error of the process."""
    sys.stderr.flush()
    saved_stderr, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved_stderr, 2)
        os.close(saved_stderr)
        os.close(null)
