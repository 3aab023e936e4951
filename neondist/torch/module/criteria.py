"""Criteria (loss functions) of a distributed module, captured in the same way as modules."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...errors import ConfigError
from ..capture.capture import capture_module, lower_program
from ..capture.consistency import program_digest
from ..capture.constants import ValueReads
from ..capture.tracing import InputSpecs, leave_inference_mode, suspend_hooks_and_modes, user_frames
from ..capture.watch import StateKey, StateWatch
from ..exchange.mesh_comm import MeshComm
from ..execution.runner import PlanRunner
from ..ir.autocast import autocast_dtypes
from ..ir.errors import UnsupportedOperator, definition_site
from ..ir.layout import Layout, Mesh, shape_of
from ..lowering.plan import TorchPlan

MAX_CACHED_CRITERIA = 16
"""Maximum number of cached criteria, and of cached states and shapes of each criterion."""
_RULE_REMEDY = "write the criterion with other operators, or define a rule with neondist.torch.rule"


@dataclass
class _CapturedCriterion:
    """A criterion, its runners by state and inputs, and the states in which it may be called directly."""

    criterion: Any
    watch: StateWatch
    state_key: StateKey
    runners: dict[Any, tuple[PlanRunner, str, dict[str, torch.Tensor]]] = field(default_factory=dict)
    direct_call_states: dict[Any, StateKey] = field(default_factory=dict)

    def rebind(self, criterion: Any) -> _CapturedCriterion:
        """Return self, bound to another criterion with the same code."""
        if self.criterion is not criterion and not (isinstance(criterion, MethodType) and self.criterion == criterion):
            self.criterion = criterion
            self.watch.retarget(criterion)
        return self


class CriterionCache:
    """Cache of a module's criteria, captured for the shapes of their arguments."""

    def __init__(self, comm: MeshComm) -> None:
        self.comm = comm
        self._entries: dict[Hashable, _CapturedCriterion] = {}

    def can_call_directly(self, criterion: Any, output: torch.Tensor, target: torch.Tensor) -> bool:
        """Return whether a criterion, in its current state, may be called directly for tensors of these shapes."""
        entry = self._entries.get(criterion_key(criterion))
        if entry is None:
            return False
        return entry.direct_call_states.get(_shapes_and_dtypes(output, target)) == entry.rebind(criterion).watch.key()

    def record_directly_callable(self, criterion: Any, output: Any, target: Any) -> None:
        """Record that a criterion may be called directly: it returns a scalar and draws no random numbers."""
        entry = self._entries[criterion_key(criterion)].rebind(criterion)
        state_key = entry.watch.key()
        if state_key != entry.state_key:  # for example, the criterion counts its calls
            state_key = entry.watch.exclude_changed_values(entry.state_key)
            runs = [(key, run) for (earlier, key), run in entry.runners.items() if earlier == entry.state_key]
            entry.runners.update({(state_key, input_key): run for input_key, run in runs})
        if isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor):
            entry.direct_call_states[_shapes_and_dtypes(output, target)] = state_key

    def clear(self) -> None:
        """Clear the cache."""
        self._entries.clear()

    def runner_for(
        self, criterion: Any, leaves: Sequence[Any], tensor_indices: Sequence[int], spec: Any, layouts: Sequence[Layout]
    ) -> tuple[PlanRunner, str, dict[str, torch.Tensor]]:
        """Return a criterion's runner and hash, and the tensors requiring gradients that it closes over.

        Parameters
        ----------
        leaves, spec : flattened arguments of the criterion, and their structure
        tensor_indices : sequence of int
            Indices of the leaves that are tensors.
        layouts : layouts of these tensors
        """
        key = criterion_key(criterion)
        if key not in self._entries:
            if len(self._entries) >= MAX_CACHED_CRITERIA:
                del self._entries[next(iter(self._entries))]
            watch = StateWatch(criterion)
            self._entries[key] = _CapturedCriterion(criterion, watch, watch.key())
        entry = self._entries[key].rebind(criterion)
        watch, runners = entry.watch, entry.runners
        constant_reprs = tuple(repr(leaf) for i, leaf in enumerate(leaves) if i not in tensor_indices)
        dtypes = [leaves[i].dtype for i in tensor_indices]
        device = leaves[tensor_indices[0]].device if tensor_indices else None
        input_key = spec, constant_reprs, tuple(layouts), tuple(dtypes), device, autocast_dtypes()
        entry.state_key = state_key = watch.key()
        if (state_key, input_key) not in runners:
            input_specs = [(shape_of(layout), dtype) for layout, dtype in zip(layouts, dtypes, strict=True)]
            module = CriterionModule(criterion, spec, leaves, tensor_indices)
            program, plan, closure_tensors = _capture_and_lower(
                module, input_specs, self.comm.mesh, self.comm.grid.rank, layouts, device
            )
            buffer_names = {name.removeprefix("criterion.") for name in program.reads.buffer_names}
            reads = ValueReads(buffer_names, program.reads.tensors)
            entry.state_key = state_key = watch.exclude_changed_values(state_key, reads)
            if len(runners) >= MAX_CACHED_CRITERIA:
                del runners[next(iter(runners))]
            runners[state_key, input_key] = PlanRunner(self.comm, plan), program_digest(plan, program), closure_tensors
        return runners[state_key, input_key]


def _capture_and_lower(
    module: CriterionModule, input_specs: InputSpecs, mesh: Mesh, rank: int, layouts: Sequence[Layout],
    device: torch.device | None = None,
) -> tuple[Any, TorchPlan, dict[str, torch.Tensor]]:  # fmt: skip
    """Return a criterion's program, its plan, and the tensors requiring gradients that it closes over."""
    program = capture_module(module, input_specs, "criterion", device=device)
    closure_tensors: dict[str, torch.Tensor] = {}
    _add_source_locations(program, module.criterion)
    try:
        with leave_inference_mode(), suspend_hooks_and_modes():
            plan, output_tree = lower_program(program, mesh, rank, layouts, unregistered_tensors=closure_tensors)
    except UnsupportedOperator as error:
        raise UnsupportedOperator(error, error.why, remedy=_RULE_REMEDY) from error
    check_returns_scalar(plan, output_tree)
    return program, plan, closure_tensors


def check_criterion(criterion: Any, input_specs: InputSpecs, mesh: Mesh, layouts: Sequence[Layout]) -> None:
    """Raise the errors of a criterion for an output and a target of these global shapes and layouts."""
    _, spec = pytree.tree_flatten((0, 0))
    _capture_and_lower(CriterionModule(criterion, spec, [None, None], [0, 1]), input_specs, mesh, 0, layouts)


def _add_source_locations(program: Any, criterion: Any) -> None:
    """Add a function's definition as source location for errors, as PyTorch records no location for functions."""
    function = criterion.func if isinstance(criterion, functools.partial) else criterion
    method = getattr(type(function), "forward", type(function).__call__)
    file, _, line = (definition_site(function) or definition_site(method)).rpartition(":")
    frame = f'File "{file}", line {line}, in criterion'
    for node in program.graph.nodes if user_frames(frame) else ():
        if not user_frames(node.meta.get("stack_trace") or ""):
            node.meta["stack_trace"] = frame


def _shapes_and_dtypes(output: torch.Tensor, target: torch.Tensor) -> tuple[Any, ...]:
    return output.shape, target.shape, output.dtype, target.dtype


def criterion_module(criterion: Any) -> nn.Module:
    """Return the module that owns a criterion's parameters: the criterion itself, or an empty module for a function."""
    return criterion if isinstance(criterion, nn.Module) else nn.Module()


def check_returns_scalar(plan: TorchPlan, output_tree: Any) -> None:
    """Raise ConfigError unless a criterion returns a scalar."""
    (out, *other_outputs) = plan.outputs if plan.outputs else (None,)
    if other_outputs or not isinstance(out, int) or not output_tree.is_leaf():
        raise ConfigError(f"criterion: must return one tensor, got {output_tree}")
    shape = plan.values[out].shape
    if shape:
        raise ConfigError(
            f"criterion: returned a tensor of shape {shape} (one value per cell or sample?), but must return a scalar;"
            " use reduction='mean' or 'sum'"
        )


def criterion_key(criterion: Any) -> Hashable:
    """Return a key that functions with the same code share, such as lambdas created in a loop."""
    if isinstance(criterion, functools.partial):
        return functools.partial, criterion_key(criterion.func)
    if isinstance(criterion, MethodType):
        return id(criterion.__self__), criterion.__func__
    return criterion.__code__ if isinstance(criterion, FunctionType) else id(criterion)


class CriterionModule(nn.Module):
    """A criterion as a module that takes only tensors; other leaves of the output and target are constants."""

    def __init__(self, criterion: Any, spec: Any, leaves: Sequence[Any], tensor_indices: Sequence[int]) -> None:
        super().__init__()
        self.criterion, self.spec, self.tensor_indices = criterion, spec, list(tensor_indices)
        self.constant_leaves = [None if i in tensor_indices else leaf for i, leaf in enumerate(leaves)]

    def forward(self, *tensors: Any) -> Any:
        """Return the loss."""
        all_leaves = list(self.constant_leaves)
        for i, tensor in zip(self.tensor_indices, tensors, strict=True):
            all_leaves[i] = tensor
        return self.criterion(*pytree.tree_unflatten(all_leaves, self.spec))
