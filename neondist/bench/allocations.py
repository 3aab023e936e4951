"""Allocations by PyTorch's kernels in a step, which Python's tracemalloc does not see."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

LARGE = 1 << 16
"""bytes; smaller blocks do not count"""


PURPOSES = {
    "conv2d": "outputs of a strip, before they go through the activation into the next layer's view",
    "conv3d": "the same, of volumes",
    "mkldnn_convolution": "outputs of a strip, by oneDNN",
    "mkldnn::_convolution_transpose_pointwise": "gradient of what a strip sees, by oneDNN",
    "convolution": "gradient of what a strip sees, before it goes into the gradient of the view",
    "convolution_backward": "gradient of weights, by oneDNN",
    "reshape": "windows of some rows, gathered for the gradient of weights by GEMM",
    "empty": "gradient of a strip before the ReLU",
    "contiguous": "a strip or weights in the order that a kernel wants",
    "max_pool2d_with_indices": "maxima of a strip; their places, kept until the way back",
    "max_pool2d_with_indices_backward": "outputs' gradient of a strip in a row, where it is a part of a larger array",
    "addmm_": "a factor of a product in the order that BLAS wants",
    "zeros": "sums to be",
    "matmul": "products of a fully connected layer",
}
"""what operators allocate large blocks for, and cannot do without: they write into new memory alone"""


class Allocated(NamedTuple):
    """Large blocks that one operator of PyTorch has taken from its allocator."""

    operator: str
    blocks: int
    largest: int
    total: int


def allocations(call: Callable[[], object]) -> list[Allocated]:
    """Return what operators allocate while `call` runs, by the operator that the backend has called; largest first.

    Blocks that oneDNN and MKL take from the system for their own scratch are not PyTorch's, and are not seen.
    """
    from torch.profiler import ProfilerActivity, profile

    with silent(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    events = list(recorded.profiler.kineto_results.events())
    calls = [(event.start_ns(), event.end_ns(), event.name()) for event in events if event.name() != "[memory]"]
    sizes: defaultdict[str, list[int]] = defaultdict(list)
    for event in events:
        if event.name() == "[memory]" and event.nbytes() >= LARGE:
            at = event.start_ns()
            outer = min((one for one in calls if one[0] <= at <= one[1]), default=(0, 0, ""))
            sizes[outer[2].removeprefix("aten::")].append(event.nbytes())
    found = [Allocated(name, len(blocks), max(blocks), sum(blocks)) for name, blocks in sizes.items()]
    return sorted(found, key=lambda one: -one.largest)


@contextmanager
def silent() -> Iterator[None]:
    """Let the profiler's library say nothing about itself: it writes to the process' standard error."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
