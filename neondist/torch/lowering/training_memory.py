"""Peak memory of a module's training step: values, tensors saved by autograd, and gradients."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from ..ir.functionalize import storage_id
from ..ir.graph import IDENTITY_STEPS, IN_PLACE_VARIANTS, Step, Value, supports_gradients
from .plan import TorchPlan
from .traffic import BackwardSteps, RankSubset

MIN_DEDUPLICATED_BYTES = 1 << 16
"""Saved tensors smaller than this are kept in addition to their copies in views."""
_SAVED_INPUT_COUNTS = {"norm": 1, "ring": 3}
"""Number of inputs that non-local steps keep for their backward pass, by kind."""


@dataclass
class _SavedValues:
    """Values that a step keeps for its backward pass, and results that share memory with its inputs.

    Attributes
    ----------
    values : set of int
        Inputs and outputs that are kept.
    extra_bytes_per_byte : float
        Further bytes that are kept, per byte of the first output.
    aliases : dict of int to int
        For each output that shares memory with an input or an earlier output, that value.
    aliased_grads : set of int
        Inputs whose gradient shares memory with an output's.
    """

    values: set[int] = field(default_factory=set)
    extra_bytes_per_byte: float = 0.0
    aliases: dict[int, int] = field(default_factory=dict)
    aliased_grads: set[int] = field(default_factory=set)


class TrainingMemory:
    """Lifetimes of the memory of a module's training step.

    Parameters
    ----------
    plan : TorchPlan
    trained : collection of str
        The parameters that require gradients.
    inputs : collection of int
        The inputs, by id, that require gradients.
    """

    def __init__(self, plan: TorchPlan, trained: Collection[str], inputs: Collection[int] = ()) -> None:
        self.plan, self.back = plan, BackwardSteps(plan, trained, inputs)
        self.saved_values = [_saved_values(plan, step, self.back) for step in plan.steps]
        self.timeline = _Timeline(plan, self.back)

    def peak(self, rank: int) -> int:
        """Return the most bytes that are live at once on a rank.

        Inputs, parameters, their gradients and temporary memory of kernels are not counted.
        """
        return _Lifetimes(self, RankSubset(self.plan.mesh, [rank])).peak()


class _Timeline:
    """Times at which the steps of a plan run.

    Attributes
    ----------
    recomputed_at : list of int
        Time at which a step runs again before its backward pass; -1: never.
    backward_at : list of int
        Time of a step's backward pass.
    segment_of_value : dict of int to int
        For each value computed in a recomputed segment, the number of that segment, from 0.
    inputs_released_at : list of int
        Time at which a segment's inputs are released.
    end : int
        Number of points in time.
    """

    def __init__(self, plan: TorchPlan, back: BackwardSteps) -> None:
        segments, self.end = plan.recomputed_segments(), len(plan.steps)
        self.recomputed_at, self.backward_at = [-1] * len(plan.steps), [0] * len(plan.steps)
        self.segment_of_value, self.inputs_released_at = dict[int, int](), [0] * len(segments)
        stop = sum(len(segment.steps) for segment in segments)
        self._schedule_backward(range(stop, len(plan.steps)))
        for number, segment in reversed([*enumerate(segments)]):
            step_numbers = range(stop - len(segment.steps), stop)
            self.segment_of_value |= {out: number for step in segment.steps for out in step.outputs}
            if any(id(step) in back.backward_step_ids for step in segment.steps):
                for at in step_numbers:
                    self.recomputed_at[at], self.end = self.end, self.end + 1
            self._schedule_backward(step_numbers)
            self.inputs_released_at[number], stop = self.end - 1, step_numbers.start

    def _schedule_backward(self, step_numbers: range) -> None:
        for at in reversed(step_numbers):
            self.backward_at[at], self.end = self.end, self.end + 1


class _Lifetimes:
    def __init__(self, memory: TrainingMemory, ranks: RankSubset) -> None:
        self.plan, self.back, self.timeline, self.ranks = memory.plan, memory.back, memory.timeline, ranks
        self.steps = [(at, *both) for at, both in enumerate(zip(memory.plan.steps, memory.saved_values, strict=True))]
        self.live_byte_changes = np.zeros(self.timeline.end + 1, int)

    def peak(self) -> int:
        self._add_value_lifetimes()
        self._add_gradient_lifetimes()
        self._add_blockwise_step_memory()
        return int(self.live_byte_changes.cumsum().max())

    def _add_lifetime(self, value: int, first: int, last: int, times: float = 1.0) -> None:
        self._add_live_bytes(int(times * self.ranks.nbytes(self.plan.values[value])[0]), first, last)

    def _add_live_bytes(self, size: int, first: int, last: int) -> None:
        self.live_byte_changes[first] += size
        self.live_byte_changes[last + 1] -= size

    def _add_value_lifetimes(self) -> None:
        owner, first, last = self._owners(), dict[int, int](), dict[int, int]()
        for at, step, _ in self.steps:
            for out in step.outputs:
                first.setdefault(owner[out], at)
            last |= dict.fromkeys((owner[value] for value in (*step.inputs, *step.outputs) if value in owner), at)
        copies = self._values_kept_as_views(owner)
        first_again, last_again = dict[int, int](), dict[int, int]()  # times of recomputed values
        for at, step, kept in self.steps:
            segment, again = self.timeline.segment_of_value.get(step.outputs[0]), self.timeline.recomputed_at[at]
            backward = self.timeline.backward_at[at] if id(step) in self.back.backward_step_ids else -1
            if again >= 0:
                for out in step.outputs:
                    first_again.setdefault(owner[out], again)
            for value in {owner[value] for value in (*step.inputs, *step.outputs) if value in owner}:
                is_saved = backward >= 0 and any(owner.get(each) == value for each in kept.values)
                if segment is None:  # the step runs once
                    copied_at, copy = copies.get(value, (0, value))
                    held = copy if at < copied_at else value
                    last[held] = max(last[held], backward if is_saved else at)
                elif again >= 0 and self.timeline.segment_of_value.get(value) == segment:
                    last_again[value] = max(last_again.get(value, 0), backward if is_saved else again)
                elif again >= 0:
                    last[value] = max(last[value], self.timeline.inputs_released_at[segment])
            if kept.extra_bytes_per_byte and backward >= 0:
                self._add_lifetime(step.outputs[0], max(at, again), backward, kept.extra_bytes_per_byte)
        for out in self.plan.outputs:
            if isinstance(out, int) and out in owner:
                last[owner[out]] = max(last[owner[out]], len(self.steps))
        for begin, end in ((first, last), (first_again, last_again)):
            for value, until in end.items():
                if value in begin:  # otherwise, the memory is an input's
                    self._add_lifetime(value, begin[value], until)

    def _owners(self) -> dict[int, int]:
        """Return, for each result, the value whose memory it uses."""
        owner = dict[int, int]()
        for _, step, kept in self.steps:
            for out in step.outputs:
                owner[out] = owner.get(kept.aliases.get(out, out), kept.aliases.get(out, out))
        return owner

    def _values_kept_as_views(self, owner: Mapping[int, int]) -> dict[int, tuple[int, int]]:
        """Return, for each value copied into a view, the view's step and the view, which is kept instead."""
        copies, rank = dict[int, tuple[int, int]](), self.plan.rank  # whose views stand for those of all ranks
        for at, step, _ in self.steps:
            if step.kind == "view" and step.scheme is None and step.outputs[0] not in self.timeline.segment_of_value:
                value = owner.get(step.inputs[0], step.inputs[0])
                is_large = self.ranks.nbytes(self.plan.values[value])[0] >= MIN_DEDUPLICATED_BYTES
                if is_large and step.transfer is not None and step.transfer.view_includes_own_part(rank):
                    copies.setdefault(value, (at, step.outputs[0]))
        return copies

    def _add_gradient_lifetimes(self) -> None:
        last, moments_of, backward_at = dict[int, int](), dict[int, list[tuple[int, bool]]](), self.timeline.backward_at
        for at, step, kept in self.steps:
            if id(step) in self.back.backward_step_ids:
                aliased_ends = [last[value] for value in kept.aliased_grads if value in last]
                last |= dict.fromkeys(step.outputs, max([backward_at[at], *aliased_ends]))
                for value in step.inputs:
                    moments_of.setdefault(value, []).append((backward_at[at], value in kept.aliased_grads))
        for value, until in last.items():
            if value in self.back.values_requiring_grad and supports_gradients(self.plan.values[value].dtype):
                moments = sorted(moments_of.get(value, [(len(self.steps), False)]))
                own = [at for number, (at, aliased) in enumerate(moments) if number or not aliased]
                if own:  # otherwise, it shares the memory of another gradient
                    self._add_lifetime(value, own[0], until)

    def _add_blockwise_step_memory(self) -> None:
        for at, step, _ in self.steps:
            if step.blocks is not None:
                forward_bytes = step.blocks.peak_bytes()
                for time in {at, self.timeline.recomputed_at[at]} - {-1}:
                    self._add_live_bytes(forward_bytes, time, time)
                if id(step) in self.back.backward_step_ids:
                    inputs_requiring_grad = [
                        i for i, value in enumerate(step.inputs) if value in self.back.values_requiring_grad
                    ]
                    time = self.timeline.backward_at[at]
                    self._add_live_bytes(step.blocks.peak_bytes(inputs_requiring_grad), time, time)


def _saved_values(plan: TorchPlan, step: Step, back: BackwardSteps) -> _SavedValues:
    if step.kind in IDENTITY_STEPS or (step.kind == "view" and plan.runs_original_module):
        return _SavedValues(aliases=dict(zip(step.outputs, step.inputs, strict=False)), aliased_grads={*step.inputs})
    if step.kind != "local":
        inputs = step.inputs[: _SAVED_INPUT_COUNTS.get(step.kind, 0)]
        return _SavedValues({*inputs, *(step.outputs if step.kind == "ring" else ())})
    if step.blocks is not None:
        return _SavedValues({*step.inputs})
    everything = _SavedValues({*step.inputs, *step.outputs})
    if step.kind_args is not None:
        return everything
    try:
        return _trace_saved_values(plan, step, back)
    except (RuntimeError, TypeError, ValueError):  # the step needs values, which meta tensors lack
        return everything


def _trace_saved_values(plan: TorchPlan, step: Step, back: BackwardSteps) -> _SavedValues:
    """Return the values that autograd saves when a step runs on meta tensors."""
    assert step.run is not None
    saved = list[torch.Tensor]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.enable_grad():
        inputs = [meta_tensor(plan.values[v], v in back.values_requiring_grad) for v in step.inputs]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = step.run(*inputs)
        value_of, kept = dict(zip(map(storage_id, inputs), step.inputs, strict=True)), _SavedValues()
        for out, tensor in zip(step.outputs, outputs, strict=True):
            if isinstance(tensor, torch.Tensor) and value_of.setdefault(storage_id(tensor), out) != out:
                kept.aliases[out] = value_of[storage_id(tensor)]
        extra = {storage_id(t): t.untyped_storage().nbytes() for t in saved if storage_id(t) not in value_of}
        kept.values = {value_of[storage_id(tensor)] for tensor in saved if storage_id(tensor) in value_of}
        kept.extra_bytes_per_byte = sum(extra.values()) / max(1, plan.values[step.outputs[0]].nbytes)
        ends = [out for out in outputs if isinstance(out, torch.Tensor) and out.requires_grad]
        leaves = {value: x for value, x in zip(step.inputs, inputs, strict=True) if x.requires_grad}
        if ends and leaves and id(step) in back.backward_step_ids and not kept.aliases:
            dys = [torch.empty_like(out) for out in ends]
            dxs = zip(leaves, torch.autograd.grad(ends, [*leaves.values()], dys, allow_unused=True), strict=True)
            memory = {*map(storage_id, dys)}
            kept.aliased_grads = {v for v, dx in dxs if dx is None or storage_id(dx) in memory}
        elif step.run not in IN_PLACE_VARIANTS.values():  # in-place variants have gradients in new memory
            kept.aliased_grads = {*kept.aliases.values()}
        if plan.runs_original_module:  # the module's operators divide the expanded gradient of a mean
            limit = plan.values[step.outputs[0]].nbytes
            kept.aliased_grads = {v for v in kept.aliased_grads if plan.values[v].nbytes <= limit}
        return kept


def meta_tensor(value: Value, requires_grad: bool) -> torch.Tensor:
    """Return a meta tensor of a value's local shape."""
    tensor = torch.empty(value.local, dtype=value.dtype, device="meta")
    trains = requires_grad and supports_gradients(value.dtype)
    return tensor.requires_grad_().clone() if trains else tensor  # a leaf must not be modified in place
