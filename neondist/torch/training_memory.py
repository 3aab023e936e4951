"""The most memory of a training step of a module: values, what autograd keeps of them, and their gradients."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import torch

from .graph import IN_PLACE, SAME, Step, has_gradients
from .plan import TorchPlan
from .traffic import Ranks, WayBack

BLOCKS = 64
"""of a step are run, at most, to see what it keeps"""
_READ = {"norm": 1, "ring": 3}
"""inputs that steps which are not local keep for their backward pass, by kind"""


@dataclass
class _Kept:
    """Values that a step keeps for its backward pass, and results that share memory with its inputs.

    Attributes
    ----------
    values : set of int
        Inputs and outputs.
    more : float
        Bytes beside them, for a byte of the first output.
    over : dict of int to int
        Outputs that are in the memory of an input.
    passed : set of int
        Inputs whose gradient is in the memory of an output's.
    """

    values: set[int] = field(default_factory=set)
    more: float = 0.0
    over: dict[int, int] = field(default_factory=dict)
    passed: set[int] = field(default_factory=set)


class TrainingMemory:
    """Lifetimes of the memory of a module's training step.

    Parameters
    ----------
    plan : TorchPlan
    trained : collection of str
        The parameters that require gradients.
    """

    def __init__(self, plan: TorchPlan, trained: Collection[str]) -> None:
        self.plan, self.back = plan, WayBack(plan, trained)
        self.steps = [(at, step, _kept(plan, step, self.back)) for at, step in enumerate(plan.steps)]

    def peak(self, rank: int) -> int:
        """Return the most bytes that live at once on a rank.

        Inputs, parameters and their gradients are not counted, nor what kernels take for a moment.
        """
        return _Lives(self, Ranks(self.plan.mesh, [rank])).peak()


class _Lives:
    """From when to when all memory of a step lives on a rank: step i at moment i, its way back at 2 n - 1 - i."""

    def __init__(self, memory: TrainingMemory, ranks: Ranks) -> None:
        self.plan, self.back, self.steps, self.ranks = memory.plan, memory.back, memory.steps, ranks
        self.end = 2 * len(self.steps) - 1
        self.changes = np.zeros(self.end + 2, int)

    def peak(self) -> int:
        self._values()
        self._gradients()
        return int(self.changes.cumsum().max())

    def _add(self, value: int, first: int, last: int, times: float = 1.0) -> None:
        size = int(times * self.ranks.nbytes(self.plan.values[value])[0])
        self.changes[first] += size
        self.changes[last + 1] -= size

    def _values(self) -> None:
        owner, first, last = dict[int, int](), dict[int, int](), dict[int, int]()
        for at, step, kept in self.steps:
            for out in step.outputs:
                owner[out] = owner.get(kept.over.get(out, out), kept.over.get(out, out))
                first.setdefault(owner[out], at)
            used = {owner[value] for value in (*step.inputs, *step.outputs) if value in owner}
            last |= dict.fromkeys(used, at)
        for at, step, kept in self.steps:
            if id(step) in self.back.gone_through:
                for value in {owner[value] for value in kept.values if value in owner}:
                    last[value] = max(last[value], self.end - at)
                if kept.more:
                    self._add(step.outputs[0], at, self.end - at, kept.more)
        for out in self.plan.outputs:
            if isinstance(out, int) and out in owner:
                last[owner[out]] = max(last[owner[out]], len(self.steps))
        for value, until in last.items():
            if value in owner:  # else it is an input's memory
                self._add(value, first[value], until)

    def _gradients(self) -> None:
        last, given = dict[int, int](), dict[int, list[tuple[int, bool]]]()
        for at, step, kept in self.steps:
            if id(step) in self.back.gone_through:
                handed = [last[value] for value in kept.passed if value in last]
                last |= dict.fromkeys(step.outputs, max([self.end - at, *handed]))
                for value in step.inputs:
                    given.setdefault(value, []).append((self.end - at, value in kept.passed))
        for value, until in last.items():
            if value in self.back.needed and has_gradients(self.plan.values[value].dtype):
                moments = sorted(given.get(value, [(len(self.steps), False)]))
                own = [at for number, (at, passed) in enumerate(moments) if number or not passed]
                if own:  # else it is a part of another one
                    self._add(value, own[0], until)


def _kept(plan: TorchPlan, step: Step, back: WayBack) -> _Kept:
    """Return what a step keeps."""
    same = step.kind in SAME or (step.kind == "view" and plan.mesh.size == 1)  # there, the module itself runs
    if same:
        return _Kept(over=dict(zip(step.outputs, step.inputs, strict=False)), passed={*step.inputs})
    if step.kind != "local":
        return _Kept({*step.inputs[: _READ.get(step.kind, 0)], *(step.outputs if step.kind == "ring" else ())})
    everything = _Kept({*step.inputs, *step.outputs})
    if step.key is not None or prod(getattr(step.run, "parts", ())) > BLOCKS:
        return everything
    try:
        return _seen(plan, step, back)
    except (RuntimeError, TypeError, ValueError):  # it looks at values, which are not there
        return everything


def _seen(plan: TorchPlan, step: Step, back: WayBack) -> _Kept:
    """Return what a step keeps, as autograd says where the step runs on tensors without memory."""
    assert step.run is not None
    saved = list[torch.Tensor]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.enable_grad():
        inputs = [_empty(plan, value, back) for value in step.inputs]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = step.run(*inputs)
        known, found = dict(zip(map(_storage, inputs), step.inputs, strict=True)), _Kept()
        for out, tensor in zip(step.outputs, outputs, strict=True):
            if isinstance(tensor, torch.Tensor) and known.setdefault(_storage(tensor), out) != out:
                found.over[out] = known[_storage(tensor)]
        more = {
            _storage(tensor): tensor.untyped_storage().nbytes() for tensor in saved if _storage(tensor) not in known
        }
        found.values = {known[_storage(tensor)] for tensor in saved if _storage(tensor) in known}
        found.more = sum(more.values()) / max(1, plan.values[step.outputs[0]].nbytes)
        ends = [out for out in outputs if isinstance(out, torch.Tensor) and out.requires_grad]
        asked = {value: x for value, x in zip(step.inputs, inputs, strict=True) if x.requires_grad}
        if ends and asked and id(step) in back.gone_through and not found.over:
            given = [torch.empty_like(out) for out in ends]
            grads = torch.autograd.grad(ends, [*asked.values()], given, allow_unused=True)
            memory = {*map(_storage, given)}
            found.passed = {v for v, grad in zip(asked, grads, strict=True) if grad is None or _storage(grad) in memory}
        elif step.run not in IN_PLACE.values():  # the gradient of those is new all the same
            found.passed = {*found.over.values()}
        if plan.mesh.size == 1:  # the module's own operators divide what a mean spreads
            found.passed = {v for v in found.passed if plan.values[v].nbytes <= plan.values[step.outputs[0]].nbytes}
        return found


def _empty(plan: TorchPlan, number: int, back: WayBack) -> torch.Tensor:
    value = plan.values[number]
    tensor = torch.empty(value.local, dtype=value.dtype, device="meta")
    asks = number in back.needed and has_gradients(value.dtype)
    return tensor.requires_grad_().clone() if asks else tensor  # a step may write into it, but into no leaf


def _storage(tensor: torch.Tensor) -> Any:
    return tensor.untyped_storage()._cdata
