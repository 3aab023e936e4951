"""Costs of a training step of a distributed module: bytes sent and reduced, operations, parameters, memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from .graph import SAME, Step, Value, has_gradients
from .layout import Shape
from .plan import TorchPlan
from .traffic import Ranks, WayBack, traffic_of

BLOCKS = 64
"""of a step are run, at most, to count its products"""


@dataclass(frozen=True)
class StepCosts:
    """Some steps in a training step.

    Attributes
    ----------
    crosses : tuple of str
        Kinds of what is sent: 'halo', 'redistribution', 'ring' or 'sum'.
    sent_most, sent_all : int
        Bytes of messages, forward and backward, of the rank that sends most and of all ranks.
    summed : int
        Bytes that the rank which gives most gives into sums over ranks, gradients of parameters not counted.
    flops : int
        Floating point operations of products, forward and backward, of the rank that the plan is of.
    parameters : int
        Trained numbers that these steps read first.
    memory : int
        Bytes on the fullest rank: of what they make, those parameters, their gradients and the optimiser's arrays.
    """

    crosses: tuple[str, ...] = ()
    sent_most: int = 0
    sent_all: int = 0
    summed: int = 0
    flops: int = 0
    parameters: int = 0
    memory: int = 0


class PlanCosts:
    """The costs of a plan's steps, of all ranks at once: arrays (mesh.size,), so that thousands of ranks are cheap.

    Parameters
    ----------
    plan : TorchPlan
    trained : collection of str
        The parameters that require gradients.
    kept : int
        Numbers that the optimiser keeps of each trained one.

    Attributes
    ----------
    uncounted : list of str
        Steps whose products were not counted: they do not run without values, or go in very many blocks.
    """

    def __init__(self, plan: TorchPlan, trained: Collection[str], kept: int = 0) -> None:
        self.plan, self.kept, self.ranks = plan, kept, Ranks.all(plan.mesh)
        self.trained = {value for name, value in plan.parameters.items() if name in trained}
        self.traffic = traffic_of(plan, range(plan.mesh.size), trained)
        self.back = WayBack(plan, trained)
        self.uncounted: list[str] = []

    @property
    def names(self) -> list[str]:
        """Those of all steps, in their order; several may have the same."""
        return list(dict.fromkeys(step.name for step in self.plan.steps))

    def of(self, names: Collection[str]) -> StepCosts:
        """Return what the steps of some names cost together."""
        names = set(names)
        mine = {account: found for account, found in self.traffic.items() if account[1] in names and found.any()}
        sent = sum((count for (kind, _, _), count in mine.items() if kind != "sum"), np.zeros(1, int))
        summed = sum((count for (kind, _, _), count in mine.items() if kind == "sum"), np.zeros(1, int))
        first = [value for value, name in self._read.items() if name in names]
        steps = [step for step in self.plan.steps if step.name in names]
        return StepCosts(
            tuple(dict.fromkeys(kind for kind, _, _ in mine)),
            int(sent.max()),
            int(sent.sum()),
            int(summed.max()),
            sum(self.flops[id(step)] for step in steps),
            sum(prod(value.local) for value in first),
            int(self._made(steps)[self.fullest]) + (2 + self.kept) * sum(value.nbytes for value in first),
        )

    @property
    def total(self) -> StepCosts:
        """Costs of all steps together."""
        return self.of(self.names)

    @cached_property
    def fullest(self) -> int:
        """The rank whose steps make most."""
        return int(np.argmax(self._made(self.plan.steps)))

    @cached_property
    def flops(self) -> dict[int, int]:
        """The floating point operations of each step, by its id(), forward and backward."""
        again = self.plan.segments()[:-1] if self.plan.recompute else ()
        twice = {id(step) for segment in again for step in segment.steps}
        found = {}
        for step in self.plan.steps:
            try:
                forward, backward = self._counted(step)
            except (RuntimeError, TypeError, ValueError):  # it looks at values, which are not there
                self.uncounted.append(step.name)
                forward = backward = 0
            found[id(step)] = forward * (1 + (id(step) in twice)) + backward
        return found

    def moved(self) -> int:
        """Return the bytes that steps read and write: inputs, outputs and their gradients each once or twice."""
        found = 0
        for step in self.plan.steps:
            inputs, outputs = ([self.plan.values[v] for v in ids] for ids in (step.inputs, step.outputs))
            backward = any(value.id in self.back.needed for value in inputs)
            if step.kind not in SAME:
                found += sum(value.nbytes * (1 + backward + (value.id in self.back.needed)) for value in inputs)
                found += sum(value.nbytes * (1 + backward) for value in outputs)
        return found

    def _made(self, steps: Iterable[Step]) -> np.ndarray:
        """Return the bytes of what steps make on each rank."""
        made = [self.plan.values[out] for step in steps if step.kind not in SAME for out in step.outputs]
        return sum((self.ranks.nbytes(value) for value in made), np.zeros(self.plan.mesh.size, int))

    @cached_property
    def _read(self) -> dict[Value, str]:
        """The trained parameters, and the name of the first step that reads each."""
        found: dict[Value, str] = {}
        for step in self.plan.steps:
            for value in step.inputs:
                if value in self.trained:
                    found.setdefault(self.plan.values[value], step.name)
        return found

    def _counted(self, step: Step) -> tuple[int, int]:
        """Return the floating point operations of a step, forward and backward."""
        if step.kind == "ring":
            return self._around(step)
        if step.kind != "local" or step.key is not None:  # by its key: a rank without any index
            return 0, 0
        assert step.run is not None
        if prod(getattr(step.run, "parts", ())) > BLOCKS:
            raise ValueError("too many blocks to run them all")
        with FlopCounterMode(display=False) as counter, torch.enable_grad():
            outputs = step.run(*(self._empty(value) for value in step.inputs))
            forward = counter.get_total_flops()
            outputs = [out for out in outputs if isinstance(out, torch.Tensor) and out.requires_grad]
            if outputs and id(step) in self.back.gone_through:
                torch.autograd.backward(outputs, [torch.empty_like(out) for out in outputs])
            return forward, counter.get_total_flops() - forward

    def _empty(self, number: int) -> torch.Tensor:
        """Return a tensor of a value's shape here, without memory, which asks for a gradient if the value does."""
        value = self.plan.values[number]
        tensor = torch.empty(value.local, dtype=value.dtype, device="meta")
        asks = number in self.back.needed and has_gradients(value.dtype)
        return tensor.requires_grad_().clone() if asks else tensor  # a step may write into it, but into no leaf

    def _around(self, step: Step) -> tuple[int, int]:
        """Return those of attention around a ring, which computes the scores once more on the way back."""
        q, _, v = (self.plan.values[value].local for value in step.inputs[:3])
        keys = prod(atom.extent for atom in step.key.keys)
        scores = 2 * prod(q[:-1]) * keys
        back = 3 * q[-1] + 2 * v[-1] if id(step) in self.back.gone_through else 0
        return scores * (q[-1] + v[-1]), scores * back


def paths(names: Sequence[str], most: int) -> dict[str, str]:
    """Return for each step's name the path of the module that it is in, cut so short that there are `most` at most.

    Steps that are in no module have their own.
    """
    full = {name: name.rpartition(":")[0] or name for name in names}
    # operators that are in no module have dots of their own
    parts = {name: path.split(".") if ":" in name else [path] for name, path in full.items()}
    for depth in range(max(map(len, parts.values()), default=1), 0, -1):
        found = {name: ".".join(part[:depth]) for name, part in parts.items()}
        if len(set(found.values())) <= most:
            break
    return found if parts else {}


def shape_given(plan: TorchPlan, names: Collection[str]) -> Shape | None:
    """Return the global shape of the last value that steps of some names make for others; None if it has none."""
    made = [out for step in plan.steps if step.name in names and step.kind not in SAME for out in step.outputs]
    read = {value for step in plan.steps if step.name not in names for value in step.inputs}
    read.update(out for out in plan.outputs if isinstance(out, int))
    known = [plan.values[out] for out in made if out in read and plan.values[out].layout_or_none is not None]
    return known[-1].shape if known else None
