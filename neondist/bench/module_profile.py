"""Breakdown of a PyTorch module's training step by kind of work, from PyTorch's profiler."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from ..comm import ProcessGrid
from ..observer import Observer
from .kernel_allocations import suppress_stderr
from .module_report import TIME_KINDS

TimeShares = dict[str, dict[str, float]]
"""'kinds': the share of each of TIME_KINDS; 'operators': the share of each operator among kernels, largest first"""
_MARK_PREFIX = "neondist::"
_KIND_BY_EVENT = {"wait": "messages", "halo": "copies", "redistribute": "copies", "reduce": "sums", "sync": "sums"}
_COPY_OPERATOR_NAMES = """
clone contiguous copy_ cat _to_copy to constant_pad_nd fill_ zero_ zeros zeros_like new_zeros empty empty_like
empty_strided as_strided slice narrow reshape view _unsafe_view permute transpose t expand select split squeeze
unsqueeze unbind flatten unflatten chunk roll flip stack repeat detach alias unfold_backward slice_backward
select_backward as_strided_ resize_ pad index_select ones ones_like
"""
COPY_OPERATORS = frozenset(f"aten::{name}" for name in _COPY_OPERATOR_NAMES.split())
_WRAPPER_NAMES = """
conv1d conv2d conv3d convolution _convolution convolution_backward convolution_backward_overrideable thnn_conv2d
slow_conv3d conv_transpose2d conv_transpose3d linear matmul batch_norm _batch_norm_impl_index group_norm layer_norm
instance_norm scaled_dot_product_attention einsum softmax gelu_ max_pool2d max_pool3d adaptive_avg_pool2d
adaptive_avg_pool3d dropout relu6 silu_ upsample mean
"""
WRAPPER_OPERATORS = frozenset(f"aten::{name}" for name in _WRAPPER_NAMES.split())
"""operators that only call another operator, which computes the result and has a more specific name"""
COMPILED_FUNCTIONS = frozenset({"_Convolution", "_ConvolutionBackward"})
"""functions of neondist.torch that call compiled kernels, which the profiler does not see"""


class ProfileMarks(Observer):
    """Observer that marks the events of a grid in the profile."""

    def __init__(self) -> None:
        self._open_marks: list[record_function | None] = []

    def on_begin(self, event: str, name: str, direction: str, subject: object) -> None:
        """Begin a mark if this kind of event is reported separately."""
        mark = record_function(_MARK_PREFIX + event) if event in _KIND_BY_EVENT else None
        if mark is not None:
            mark.__enter__()
        self._open_marks.append(mark)

    def on_end(self, event: str, name: str, direction: str) -> None:
        """End the mark."""
        mark = self._open_marks.pop()
        if mark is not None:
            mark.__exit__(None, None, None)


def measure_time_shares(step: Callable[[], object], grid: ProcessGrid) -> TimeShares:
    """Return the breakdown of a step's time on this rank; all ranks must call this function at the same time."""
    with (
        suppress_stderr(),
        grid.observers.add_temporarily(ProfileMarks()),
        profile(activities=[ProfilerActivity.CPU]) as recorded,
    ):
        begin = time.perf_counter()
        step()
        total_seconds = time.perf_counter() - begin
    seconds, operators = Counter[str](), Counter[str]()
    for event in recorded.events() or ():
        kind, name = classify_event(event)
        seconds[kind] += event.self_cpu_time_total / 1e6
        if kind == "kernels":
            operators[name] += event.self_cpu_time_total / 1e6
    seconds["other"] += max(0.0, total_seconds - seconds.total())  # type: ignore[assignment]
    total_seconds = max(1e-9, seconds.total())
    return {
        "kinds": {kind: seconds[kind] / total_seconds for kind in TIME_KINDS},
        "operators": {name.removeprefix("aten::"): taken / total_seconds for name, taken in operators.most_common()},
    }


def classify_event(event: Any) -> tuple[str, str]:
    """Return the kind of an event's own time, and its operator.

    The operator is the outermost operator that is not a wrapper; events inside a mark have the kind of the mark.
    """
    name = ""
    while event is not None:
        if event.name.startswith(_MARK_PREFIX):
            return _KIND_BY_EVENT[event.name.removeprefix(_MARK_PREFIX)], event.name
        is_operator = "::" in event.name and "autograd::" not in event.name
        if is_operator and not (name and event.name in WRAPPER_OPERATORS):
            name = event.name
        elif event.name in COMPILED_FUNCTIONS:
            name = name or "neondist::convolution"
        event = event.cpu_parent
    return ("copies" if name in COPY_OPERATORS else "kernels" if name else "other"), name
