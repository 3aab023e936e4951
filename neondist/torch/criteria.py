"""Criteria of a distributed module, which are captured as modules are."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import ConfigError
from .capture import captured, lowered
from .consistency import digest_of
from .constants import Reads
from .errors import UnsupportedOperator, defined_at
from .layout import Layout, shape_of
from .mesh_comm import MeshComm
from .plan import TorchPlan
from .run import Runner
from .tracing import ordinary_tensors, user_frames
from .watch import State, Watch

REMEMBERED = 16
"""So many criteria are remembered, and of each so many states and shapes."""
_REMEDY = "write the criterion with other operators, or define a rule with neondist.torch.rule"


@dataclass
class _Known:
    """A criterion, what runs for each of its states and inputs, and for which it may be called as it is."""

    criterion: Any
    watch: Watch
    state: State
    runners: dict[Any, tuple[Runner, str, dict[str, torch.Tensor]]] = field(default_factory=dict)
    plain: dict[Any, State] = field(default_factory=dict)

    def of(self, criterion: Any) -> _Known:
        """Return it for a criterion of the same code."""
        if self.criterion is not criterion and not (isinstance(criterion, MethodType) and self.criterion == criterion):
            self.criterion = criterion
            self.watch.aim(criterion)
        return self


class Criteria:
    """The criteria that a module was given, captured for the shapes of their arguments."""

    def __init__(self, wires: MeshComm) -> None:
        self.wires = wires
        self._known: dict[Hashable, _Known] = {}

    def is_plain(self, criterion: Any, output: torch.Tensor, target: torch.Tensor) -> bool:
        """Return whether a criterion that was noted as plain for such tensors still is."""
        known = self._known.get(identity(criterion))
        return known is not None and known.plain.get(_of(output, target)) == known.of(criterion).watch.key()

    def note_plain(self, criterion: Any, output: Any, target: Any) -> None:
        """Take note of a criterion that was called as it is: it gives one number, and draws none at random."""
        known = self._known[identity(criterion)].of(criterion)
        state = known.watch.key()
        if state != known.state:  # it counts its calls
            state = known.watch.settled(known.state)
            known.runners.update(
                {(state, inputs): run for (at, inputs), run in known.runners.items() if at == known.state}
            )
        if isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor):
            known.plain[_of(output, target)] = state

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()

    def runner(
        self, criterion: Any, leaves: Sequence[Any], at: Sequence[int], spec: Any, layouts: Sequence[Layout]
    ) -> tuple[Runner, str, dict[str, torch.Tensor]]:
        """Return what runs for a criterion, a hash of it, and tensors with gradients that it closes over.

        Parameters
        ----------
        leaves, spec : of its arguments
        at : sequence of int
            Which of the leaves are tensors.
        layouts : of these
        """
        which = identity(criterion)
        if which not in self._known:
            if len(self._known) >= REMEMBERED:
                del self._known[next(iter(self._known))]
            watch = Watch(criterion)
            self._known[which] = _Known(criterion, watch, watch.key())
        known = self._known[which].of(criterion)
        watch, runners = known.watch, known.runners
        others = tuple(repr(leaf) for i, leaf in enumerate(leaves) if i not in at)
        dtypes = [leaves[i].dtype for i in at]
        device = leaves[at[0]].device if at else None
        inputs = spec, others, tuple(layouts), tuple(dtypes), device
        known.state = before = watch.key()
        if (before, inputs) not in runners:
            shapes = [(shape_of(layout), dtype) for layout, dtype in zip(layouts, dtypes, strict=True)]
            program = captured(CriterionModule(criterion, spec, leaves, at), shapes, "criterion", device=device)
            closed: dict[str, torch.Tensor] = {}
            _name_places(program, criterion)
            try:
                with ordinary_tensors():
                    plan, tree = lowered(program, self.wires.mesh, self.wires.grid.rank, layouts, trained=closed)
            except UnsupportedOperator as error:
                raise UnsupportedOperator(error, error.why, remedy=_REMEDY) from error
            check_number(plan, tree)
            buffers, others = program.reads
            names = {name.removeprefix("criterion.") for name in buffers}
            known.state = before = watch.settled(before, Reads(names, others))
            if len(runners) >= REMEMBERED:
                del runners[next(iter(runners))]
            runners[before, inputs] = Runner(self.wires, plan), digest_of(plan, program), closed
        return runners[before, inputs]


def _name_places(program: Any, criterion: Any) -> None:
    """Let errors name where a function is defined: of functions PyTorch notes no lines."""
    called = criterion.func if isinstance(criterion, functools.partial) else criterion
    of_class = getattr(type(called), "forward", type(called).__call__)
    file, _, line = (defined_at(called) or defined_at(of_class)).rpartition(":")
    frame = f'File "{file}", line {line}, in criterion'
    for node in program.graph.nodes if user_frames(frame) else ():
        if not user_frames(node.meta.get("stack_trace") or ""):
            node.meta["stack_trace"] = frame


def _of(output: torch.Tensor, target: torch.Tensor) -> tuple[Any, ...]:
    return output.shape, target.shape, output.dtype, target.dtype


def owner_of(criterion: Any) -> nn.Module:
    """Return the module whose parameters a criterion has: itself; of a function one without any."""
    return criterion if isinstance(criterion, nn.Module) else nn.Module()


def check_number(plan: TorchPlan, tree: Any) -> None:
    """Raise ConfigError unless a criterion gives one number."""
    (out, *more) = plan.outputs if plan.outputs else (None,)
    if more or not isinstance(out, int) or not tree.is_leaf():
        raise ConfigError(f"criterion: must return one tensor, got {tree}")
    shape = plan.values[out].shape
    if shape:
        raise ConfigError(
            f"criterion: returned a tensor of shape {shape}, such as one value per cell or sample; it must return a"
            " scalar: reduction='mean' or 'sum'"
        )


def identity(criterion: Any) -> Hashable:
    """Return what two criteria have in common whose code is the same: a lambda of a loop is one, not many."""
    if isinstance(criterion, functools.partial):
        return functools.partial, identity(criterion.func)
    if isinstance(criterion, MethodType):
        return id(criterion.__self__), criterion.__func__
    return criterion.__code__ if isinstance(criterion, FunctionType) else id(criterion)


class CriterionModule(nn.Module):
    """A criterion as a module of tensors; what else is in the output and the target stays as it is."""

    def __init__(self, criterion: Any, spec: Any, leaves: Sequence[Any], at: Sequence[int]) -> None:
        super().__init__()
        self.criterion, self.spec, self.at = criterion, spec, list(at)
        self.others = [None if i in at else leaf for i, leaf in enumerate(leaves)]

    def forward(self, *tensors: Any) -> Any:
        """Return what the criterion gives."""
        filled = list(self.others)
        for i, tensor in zip(self.at, tensors, strict=True):
            filled[i] = tensor
        return self.criterion(*pytree.tree_unflatten(filled, self.spec))
