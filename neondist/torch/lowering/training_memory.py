"""Peak memory of a module's training step: values, tensors saved by autograd, and gradients."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import torch

from ..ir.graph import IDENTITY_KINDS, IN_PLACE_OPS, Step, supports_gradients
from .plan import TorchPlan
from .traffic import BackwardSteps, RankSubset

MIN_BYTES = 1 << 16
"""Size of a saved tensor below which it is kept beside its copy in a view."""
MAX_TRACED_BLOCKS = 64
"""Most blocks of a step that are run to determine what it keeps."""
_SAVED_INPUT_COUNTS = {"norm": 1, "ring": 3}
"""Number of inputs that non-local steps keep for their backward pass, by kind."""


@dataclass
class _SavedValues:
    """Values that a step keeps for its backward pass, and results that share memory with its inputs.

    Attributes
    ----------
    values : set of int
        Inputs and outputs.
    extra : float
        Further bytes, per byte of the first output.
    aliases : dict of int to int
        Outputs that share memory with an input.
    aliased_grads : set of int
        Inputs whose gradient shares memory with an output's.
    """

    values: set[int] = field(default_factory=set)
    extra: float = 0.0
    aliases: dict[int, int] = field(default_factory=dict)
    aliased_grads: set[int] = field(default_factory=set)


class TrainingMemory:
    """Lifetimes of the memory of a module's training step.

    Parameters
    ----------
    plan : TorchPlan
    trained : collection of str
        The parameters that require gradients.
    """

    def __init__(self, plan: TorchPlan, trained: Collection[str]) -> None:
        self.plan, self.back = plan, BackwardSteps(plan, trained)
        self.steps = [(at, step, _saved_values(plan, step, self.back)) for at, step in enumerate(plan.steps)]

    def peak(self, rank: int) -> int:
        """Return the most bytes that are live at once on a rank.

        Inputs, parameters and their gradients are not counted, nor temporary memory of kernels.
        """
        return _Lifetimes(self, RankSubset(self.plan.mesh, [rank])).peak()


class _Lifetimes:
    """Lifetimes of all memory on a rank: step i runs at time i, its backward pass at time 2 n - 1 - i."""

    def __init__(self, memory: TrainingMemory, ranks: RankSubset) -> None:
        self.plan, self.back, self.steps, self.ranks = memory.plan, memory.back, memory.steps, ranks
        self.end = 2 * len(self.steps) - 1
        self.changes = np.zeros(self.end + 2, int)

    def peak(self) -> int:
        self._add_values()
        self._add_gradients()
        return int(self.changes.cumsum().max())

    def _add(self, value: int, first: int, last: int, times: float = 1.0) -> None:
        size = int(times * self.ranks.nbytes(self.plan.values[value])[0])
        self.changes[first] += size
        self.changes[last + 1] -= size

    def _add_values(self) -> None:
        owner, first, last = dict[int, int](), dict[int, int](), dict[int, int]()
        for at, step, kept in self.steps:
            for out in step.outputs:
                owner[out] = owner.get(kept.aliases.get(out, out), kept.aliases.get(out, out))
                first.setdefault(owner[out], at)
            used = {owner[value] for value in (*step.inputs, *step.outputs) if value in owner}
            last |= dict.fromkeys(used, at)
        copies = self._copies_in_views(owner)
        for at, step, kept in self.steps:
            if id(step) in self.back.visited_ids:
                for value in {owner[value] for value in kept.values if value in owner}:
                    copied_at, copy = copies.get(value, (0, value))
                    kept_value = copy if at < copied_at else value
                    last[kept_value] = max(last[kept_value], self.end - at)
                if kept.extra:
                    self._add(step.outputs[0], at, self.end - at, kept.extra)
        for out in self.plan.outputs:
            if isinstance(out, int) and out in owner:
                last[owner[out]] = max(last[owner[out]], len(self.steps))
        for value, until in last.items():
            if value in owner:  # otherwise it is an input's memory
                self._add(value, first[value], until)

    def _copies_in_views(self, owner: Mapping[int, int]) -> dict[int, tuple[int, int]]:
        """Return for values of which a view has a copy the view's step, and the view, which is kept instead."""
        copies = dict[int, tuple[int, int]]()
        for at, step, _ in self.steps:
            if step.kind == "view" and step.scheme is None and not self.plan.recompute:
                value, view = owner.get(step.inputs[0], step.inputs[0]), step.outputs[0]
                size, view_size = (self.ranks.nbytes(self.plan.values[each])[0] for each in (value, view))
                if MIN_BYTES <= size <= view_size:
                    copies.setdefault(value, (at, view))
        return copies

    def _add_gradients(self) -> None:
        last, moments_of = dict[int, int](), dict[int, list[tuple[int, bool]]]()
        for at, step, kept in self.steps:
            if id(step) in self.back.visited_ids:
                aliased_ends = [last[value] for value in kept.aliased_grads if value in last]
                last |= dict.fromkeys(step.outputs, max([self.end - at, *aliased_ends]))
                for value in step.inputs:
                    moments_of.setdefault(value, []).append((self.end - at, value in kept.aliased_grads))
        for value, until in last.items():
            if value in self.back.with_grad and supports_gradients(self.plan.values[value].dtype):
                moments = sorted(moments_of.get(value, [(len(self.steps), False)]))
                own = [at for number, (at, aliased) in enumerate(moments) if number or not aliased]
                if own:  # otherwise it shares the memory of another one
                    self._add(value, own[0], until)


def _saved_values(plan: TorchPlan, step: Step, back: BackwardSteps) -> _SavedValues:
    """Return the values that a step keeps."""
    if step.kind in IDENTITY_KINDS or (step.kind == "view" and plan.mesh.size == 1):  # one rank runs the module itself
        return _SavedValues(aliases=dict(zip(step.outputs, step.inputs, strict=False)), aliased_grads={*step.inputs})
    if step.kind != "local":
        inputs = step.inputs[: _SAVED_INPUT_COUNTS.get(step.kind, 0)]
        return _SavedValues({*inputs, *(step.outputs if step.kind == "ring" else ())})
    everything = _SavedValues({*step.inputs, *step.outputs})
    if step.kind_args is not None or prod(getattr(step.run, "parts", ())) > MAX_TRACED_BLOCKS:
        return everything
    try:
        return _trace_saved_values(plan, step, back)
    except (RuntimeError, TypeError, ValueError):  # it needs values, which meta tensors lack
        return everything


def _trace_saved_values(plan: TorchPlan, step: Step, back: BackwardSteps) -> _SavedValues:
    """Return the values that autograd saves when a step runs on meta tensors."""
    assert step.run is not None
    saved = list[torch.Tensor]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.enable_grad():
        inputs = [_empty_tensor(plan, value, back) for value in step.inputs]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = step.run(*inputs)
        value_of, kept = dict(zip(map(_storage, inputs), step.inputs, strict=True)), _SavedValues()
        for out, tensor in zip(step.outputs, outputs, strict=True):
            if isinstance(tensor, torch.Tensor) and value_of.setdefault(_storage(tensor), out) != out:
                kept.aliases[out] = value_of[_storage(tensor)]
        extra = {_storage(t): t.untyped_storage().nbytes() for t in saved if _storage(t) not in value_of}
        kept.values = {value_of[_storage(tensor)] for tensor in saved if _storage(tensor) in value_of}
        kept.extra = sum(extra.values()) / max(1, plan.values[step.outputs[0]].nbytes)
        ends = [out for out in outputs if isinstance(out, torch.Tensor) and out.requires_grad]
        leaves = {value: x for value, x in zip(step.inputs, inputs, strict=True) if x.requires_grad}
        if ends and leaves and id(step) in back.visited_ids and not kept.aliases:
            dys = [torch.empty_like(out) for out in ends]
            dxs = zip(leaves, torch.autograd.grad(ends, [*leaves.values()], dys, allow_unused=True), strict=True)
            memory = {*map(_storage, dys)}
            kept.aliased_grads = {v for v, dx in dxs if dx is None or _storage(dx) in memory}
        elif step.run not in IN_PLACE_OPS.values():  # their gradients are new memory nevertheless
            kept.aliased_grads = {*kept.aliases.values()}
        if plan.mesh.size == 1:  # the module's own operators divide the expanded gradient of a mean
            limit = plan.values[step.outputs[0]].nbytes
            kept.aliased_grads = {v for v in kept.aliased_grads if plan.values[v].nbytes <= limit}
        return kept


def _empty_tensor(plan: TorchPlan, number: int, back: BackwardSteps) -> torch.Tensor:
    value = plan.values[number]
    tensor = torch.empty(value.local, dtype=value.dtype, device="meta")
    trains = number in back.with_grad and supports_gradients(value.dtype)
    return tensor.requires_grad_().clone() if trains else tensor  # a step may modify it in place, but not a leaf


def _storage(tensor: torch.Tensor) -> Any:
    return tensor.untyped_storage()._cdata
