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
        The inputs or earlier outputs with which outputs share memory, by the ids of these outputs.
    aliased_grads : set of int
        Inputs whose gradient shares memory with an output's.
    """

    values: set[int] = field(default_factory=set)
    extra_bytes_per_byte: float = 0.0
    aliases: dict[int, int] = field(default_factory=dict)
    aliased_grads: set[int] = field(default_factory=set)


TracedSavedValues = dict[object, _SavedValues]


class TrainingMemory:
    """Lifetimes of the memory of a module's training step.

    Parameters
    ----------
    plan : TorchPlan
    trained : collection of str
        The parameters that require gradients.
    inputs : collection of int
        The inputs, by id, that require gradients.
    traced : dict, optional
        Values that steps save, traced for plans of the same steps on other ranges of cells; extended in place.
    """

    def __init__(
        self,
        plan: TorchPlan,
        trained: Collection[str],
        inputs: Collection[int] = (),
        traced: TracedSavedValues | None = None,
    ) -> None:
        self.plan, self.backward = plan, BackwardSteps(plan, trained, inputs)
        traced = {} if traced is None else traced
        self.saved_values = [_saved_values(plan, step, self.backward, traced) for step in plan.steps]
        self.timeline = _Timeline(plan, self.backward)

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
    end_time : int
        Number of points in time.
    """

    def __init__(self, plan: TorchPlan, backward: BackwardSteps) -> None:
        segments, self.end_time = plan.recomputed_segments(), len(plan.steps)
        self.recomputed_at, self.backward_at = [-1] * len(plan.steps), [0] * len(plan.steps)
        self.segment_of_value, self.inputs_released_at = dict[int, int](), [0] * len(segments)
        segment_end = sum(len(segment.steps) for segment in segments)
        self._schedule_backward(range(segment_end, len(plan.steps)))
        for number, segment in reversed([*enumerate(segments)]):
            step_numbers = range(segment_end - len(segment.steps), segment_end)
            self.segment_of_value |= {out: number for step in segment.steps for out in step.outputs}
            if any(id(step) in backward.backward_step_ids for step in segment.steps):
                for at in step_numbers:
                    self.recomputed_at[at], self.end_time = self.end_time, self.end_time + 1
            self._schedule_backward(step_numbers)
            self.inputs_released_at[number], segment_end = self.end_time - 1, step_numbers.start

    def _schedule_backward(self, step_numbers: range) -> None:
        for at in reversed(step_numbers):
            self.backward_at[at], self.end_time = self.end_time, self.end_time + 1


class _Lifetimes:
    def __init__(self, memory: TrainingMemory, ranks: RankSubset) -> None:
        self.plan, self.backward, self.timeline, self.ranks = memory.plan, memory.backward, memory.timeline, ranks
        self.steps = [(at, *both) for at, both in enumerate(zip(memory.plan.steps, memory.saved_values, strict=True))]
        self.live_byte_changes = np.zeros(self.timeline.end_time + 1, int)

    def peak(self) -> int:
        self._add_value_lifetimes()
        self._add_gradient_lifetimes()
        self._add_blockwise_step_memory()
        return int(self.live_byte_changes.cumsum().max())

    def _add_lifetime(self, value: int, first_time: int, last_time: int, scale: float = 1.0) -> None:
        self._add_live_bytes(int(scale * self.ranks.nbytes(self.plan.values[value])[0]), first_time, last_time)

    def _add_live_bytes(self, num_bytes: int, first_time: int, last_time: int) -> None:
        self.live_byte_changes[first_time] += num_bytes
        self.live_byte_changes[last_time + 1] -= num_bytes

    def _add_value_lifetimes(self) -> None:
        owners, starts, ends = self._owners(), dict[int, int](), dict[int, int]()
        for at, step, _ in self.steps:
            for out in step.outputs:
                starts.setdefault(owners[out], at)
            ends |= dict.fromkeys((owners[value] for value in (*step.inputs, *step.outputs) if value in owners), at)
        views_by_value = self._values_kept_as_views(owners)
        second_starts, second_ends = dict[int, int](), dict[int, int]()  # times of recomputed values
        for at, step, saved in self.steps:
            segment, rerun_at = self.timeline.segment_of_value.get(step.outputs[0]), self.timeline.recomputed_at[at]
            backward_at = self.timeline.backward_at[at] if id(step) in self.backward.backward_step_ids else -1
            if rerun_at >= 0:
                for out in step.outputs:
                    second_starts.setdefault(owners[out], rerun_at)
            for value in {owners[value] for value in (*step.inputs, *step.outputs) if value in owners}:
                is_saved = backward_at >= 0 and any(owners.get(each) == value for each in saved.values)
                if segment is None:  # the step runs once
                    viewed_at, view = views_by_value.get(value, (0, value))
                    held_value = view if at < viewed_at else value
                    ends[held_value] = max(ends[held_value], backward_at if is_saved else at)
                elif rerun_at >= 0 and self.timeline.segment_of_value.get(value) == segment:
                    second_ends[value] = max(second_ends.get(value, 0), backward_at if is_saved else rerun_at)
                elif rerun_at >= 0:
                    ends[value] = max(ends[value], self.timeline.inputs_released_at[segment])
            if saved.extra_bytes_per_byte and backward_at >= 0:
                self._add_lifetime(step.outputs[0], max(at, rerun_at), backward_at, saved.extra_bytes_per_byte)
        for out in self.plan.outputs:
            if isinstance(out, int) and out in owners:
                ends[owners[out]] = max(ends[owners[out]], len(self.steps))
        for first_times, last_times in ((starts, ends), (second_starts, second_ends)):
            for value, last_time in last_times.items():
                if value in first_times:  # otherwise, the memory is an input's
                    self._add_lifetime(value, first_times[value], last_time)

    def _owners(self) -> dict[int, int]:
        """Return, for each result, the value whose memory it uses."""
        owners = dict[int, int]()
        for _, step, saved in self.steps:
            for out in step.outputs:
                source = saved.aliases.get(out, out)
                owners[out] = owners.get(source, source)
        return owners

    def _values_kept_as_views(self, owners: Mapping[int, int]) -> dict[int, tuple[int, int]]:
        """Return, for each value copied into a view, the view's step and the view, which is kept instead."""
        views_by_value, rank = dict[int, tuple[int, int]](), self.plan.rank  # its views stand for those of all ranks
        for at, step, _ in self.steps:
            if step.kind == "view" and step.scheme is None and step.outputs[0] not in self.timeline.segment_of_value:
                value = owners.get(step.inputs[0], step.inputs[0])
                is_large = self.ranks.nbytes(self.plan.values[value])[0] >= MIN_DEDUPLICATED_BYTES
                if is_large and step.transfer is not None and step.transfer.view_includes_own_part(rank):
                    views_by_value.setdefault(value, (at, step.outputs[0]))
        return views_by_value

    def _add_gradient_lifetimes(self) -> None:
        ends, use_times, backward_at = dict[int, int](), dict[int, list[tuple[int, bool]]](), self.timeline.backward_at
        for at, step, saved in self.steps:
            if id(step) in self.backward.backward_step_ids:
                aliased_ends = [ends[value] for value in saved.aliased_grads if value in ends]
                ends |= dict.fromkeys(step.outputs, max([backward_at[at], *aliased_ends]))
                for value in step.inputs:
                    use_times.setdefault(value, []).append((backward_at[at], value in saved.aliased_grads))
        for value, until in ends.items():
            if value in self.backward.values_requiring_grad and supports_gradients(self.plan.values[value].dtype):
                gradient_times = sorted(use_times.get(value, [(len(self.steps), False)]))
                own_times = [at for number, (at, aliased) in enumerate(gradient_times) if number or not aliased]
                if own_times:  # otherwise, it shares the memory of another gradient
                    self._add_lifetime(value, own_times[0], until)

    def _add_blockwise_step_memory(self) -> None:
        for at, step, _ in self.steps:
            if step.blocks is not None:
                forward_bytes = step.blocks.peak_bytes()
                for time in {at, self.timeline.recomputed_at[at]} - {-1}:
                    self._add_live_bytes(forward_bytes, time, time)
                if id(step) in self.backward.backward_step_ids:
                    inputs_requiring_grad = [
                        i for i, value in enumerate(step.inputs) if value in self.backward.values_requiring_grad
                    ]
                    time = self.timeline.backward_at[at]
                    self._add_live_bytes(step.blocks.peak_bytes(inputs_requiring_grad), time, time)


def _saved_values(plan: TorchPlan, step: Step, backward: BackwardSteps, traced: TracedSavedValues) -> _SavedValues:
    if step.kind in IDENTITY_STEPS or (step.kind == "view" and plan.runs_original_module):
        return _SavedValues(aliases=dict(zip(step.outputs, step.inputs, strict=False)), aliased_grads={*step.inputs})
    if step.kind != "local":
        inputs = step.inputs[: _SAVED_INPUT_COUNTS.get(step.kind, 0)]
        return _SavedValues({*inputs, *(step.outputs if step.kind == "ring" else ())})
    if step.blocks is not None:
        return _SavedValues({*step.inputs})
    all_values = _SavedValues({*step.inputs, *step.outputs})
    if step.kind_args is not None:
        return all_values
    require_grad = tuple(value in backward.values_requiring_grad for value in step.inputs)
    key = step.inputs, step.outputs, require_grad, id(step) in backward.backward_step_ids
    if key not in traced:
        try:
            traced[key] = _trace_saved_values(plan, step, backward)
        except (RuntimeError, TypeError, ValueError):  # the step needs values, which meta tensors lack
            traced[key] = all_values
    return traced[key]


def _trace_saved_values(plan: TorchPlan, step: Step, backward: BackwardSteps) -> _SavedValues:
    """Return the values that autograd saves when a step runs on meta tensors."""
    assert step.run is not None
    saved = list[torch.Tensor]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.enable_grad():
        inputs = [meta_tensor(plan.values[v], v in backward.values_requiring_grad) for v in step.inputs]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = step.run(*inputs)
        value_of = dict(zip(map(storage_id, inputs), step.inputs, strict=True))
        result = _SavedValues()
        for out, tensor in zip(step.outputs, outputs, strict=True):
            if isinstance(tensor, torch.Tensor) and value_of.setdefault(storage_id(tensor), out) != out:
                result.aliases[out] = value_of[storage_id(tensor)]
        extra_bytes = {storage_id(t): t.untyped_storage().nbytes() for t in saved if storage_id(t) not in value_of}
        result.values = {value_of[storage_id(tensor)] for tensor in saved if storage_id(tensor) in value_of}
        result.extra_bytes_per_byte = sum(extra_bytes.values()) / max(1, plan.values[step.outputs[0]].nbytes)
        roots = [out for out in outputs if isinstance(out, torch.Tensor) and out.requires_grad]
        leaves = {value: x for value, x in zip(step.inputs, inputs, strict=True) if x.requires_grad}
        if roots and leaves and id(step) in backward.backward_step_ids and not result.aliases:
            dys = [torch.empty_like(out) for out in roots]
            dxs = zip(leaves, torch.autograd.grad(roots, [*leaves.values()], dys, allow_unused=True), strict=True)
            dy_storages = {*map(storage_id, dys)}
            result.aliased_grads = {v for v, dx in dxs if dx is None or storage_id(dx) in dy_storages}
        elif step.run not in IN_PLACE_VARIANTS.values():  # in-place variants have gradients in new memory
            result.aliased_grads = {*result.aliases.values()}
        if plan.runs_original_module:  # the module's operators divide the expanded gradient of a mean
            output_bytes = plan.values[step.outputs[0]].nbytes
            result.aliased_grads = {v for v in result.aliased_grads if plan.values[v].nbytes <= output_bytes}
        return result


def meta_tensor(value: Value, requires_grad: bool) -> torch.Tensor:
    """Return a meta tensor of a value's local shape."""
    tensor = torch.empty(value.local, dtype=value.dtype, device="meta")
    has_gradient = requires_grad and supports_gradients(value.dtype)
    return tensor.requires_grad_().clone() if has_gradient else tensor  # a leaf must not be modified in place
