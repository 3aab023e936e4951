"""Allocations by PyTorch's kernels in a step, which Python's tracemalloc does not see."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

MIN_COUNTED_BLOCK_BYTES = 1 << 16


PURPOSE_BY_OPERATOR = {
    "conv2d": "outputs of a strip, before the activation writes them into the next layer's view",
    "conv3d": "the same, of volumes",
    "mkldnn_convolution": "outputs of a strip, by oneDNN",
    "mkldnn::_convolution_transpose_pointwise": "gradient of a strip's view, by oneDNN",
    "convolution": "gradient of a strip's view, before it is added to the gradient of the view",
    "convolution_backward": "gradient of weights, by oneDNN",
    "reshape": "windows of some rows, gathered for the gradient of weights by GEMM",
    "empty": "gradient of a strip before the ReLU",
    "contiguous": "a strip or weights in the memory order of a kernel",
    "max_pool2d_with_indices": "maxima of a strip; their places, kept for the backward pass",
    "max_pool2d_with_indices_backward": "contiguous gradient of a strip's outputs, where it is part of a larger array",
    "addmm_": "a factor of a product in the memory order of BLAS",
    "zeros": "accumulators",
    "matmul": "products of a fully connected layer",
}
"""purposes of the large blocks of each operator, which are unavoidable: the operator writes only to new memory"""


class OperatorAllocations(NamedTuple):
    """Large blocks that one operator of PyTorch has taken from its allocator."""

    operator: str
    block_count: int
    largest_bytes: int
    total_bytes: int


def measure_allocations(call: Callable[[], object]) -> list[OperatorAllocations]:
    """Return allocations while `call` runs, by the operator that the backend has called; largest first.

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
            at = event.start_ns()
            outer = min((entry for entry in calls if entry[0] <= at <= entry[1]), default=(0, 0, ""))
            sizes[outer[2].removeprefix("aten::")].append(event.nbytes())
    allocated = [OperatorAllocations(name, len(blocks), max(blocks), sum(blocks)) for name, blocks in sizes.items()]
    return sorted(allocated, key=lambda entry: -entry.largest_bytes)


@contextmanager
def suppress_stderr() -> Iterator[None]:
    """Suppress the messages of the profiler's library, which writes to the standard error of the process."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
