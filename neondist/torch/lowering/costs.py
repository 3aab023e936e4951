"""Costs of a training step of a distributed module: bytes sent and reduced, FLOPs, parameters, memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from math import prod

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from ...plan.layer import TrainingCosts
from ..ir.graph import IDENTITY_STEPS, Step, Value
from ..ir.layout import Shape
from .plan import TorchPlan
from .traffic import BackwardSteps, RankSubset, traffic_of
from .training_memory import meta_tensor

MAX_BLOCKS_TO_RUN = 64
"""Maximum number of blocks of a step that are run to count its FLOPs."""


class PlanCosts:
    """Costs of a plan's steps on all ranks, vectorised as arrays (mesh.size,) so that thousands of ranks are cheap.

    Parameters
    ----------
    plan : TorchPlan
    trained : collection of str
        The parameters that require gradients.
    slots_per_parameter : int
        Optimiser state elements per trained element.

    Attributes
    ----------
    steps_without_flop_count : list of str
        Steps whose FLOPs were not counted: they need actual values, or consist of too many blocks.
    """

    def __init__(self, plan: TorchPlan, trained: Collection[str], slots_per_parameter: int = 0) -> None:
        self.plan, self.slots_per_parameter, self.ranks = plan, slots_per_parameter, RankSubset.all(plan.mesh)
        self.trained_ids = {value for name, value in plan.parameters.items() if name in trained}
        self.traffic = traffic_of(plan, range(plan.mesh.size), trained)
        self.backward = BackwardSteps(plan, trained)
        self.steps_without_flop_count: list[str] = []

    @property
    def step_names(self) -> list[str]:
        """Distinct names of the steps, in order."""
        return list(dict.fromkeys(step.name for step in self.plan.steps))

    def costs_of_steps(self, names: Collection[str]) -> TrainingCosts:
        """Return the total costs of the steps with these names."""
        names = set(names)
        traffic = {key: count for key, count in self.traffic.items() if key[1] in names and count.any()}
        sent_bytes = sum((count for (kind, _, _), count in traffic.items() if kind != "sum"), np.zeros(1, int))
        max_summed_bytes = sum((count for (kind, _, _), count in traffic.items() if kind == "sum"), np.zeros(1, int))
        parameters = [value for value, name in self._first_reader_by_parameter.items() if name in names]
        steps = [step for step in self.plan.steps if step.name in names]
        copies = 2 + self.slots_per_parameter
        return TrainingCosts(
            tuple(dict.fromkeys(kind for kind, _, _ in traffic)),
            int(sent_bytes.max()),
            int(sent_bytes.sum()),
            int(max_summed_bytes.max()),
            sum(self.flops[id(step)] for step in steps),
            sum(prod(value.local) for value in parameters),
            int(self._output_bytes(steps)[self.max_memory_rank]) + copies * sum(value.nbytes for value in parameters),
        )

    @property
    def total(self) -> TrainingCosts:
        """Total costs of all steps."""
        return self.costs_of_steps(self.step_names)

    @cached_property
    def max_memory_rank(self) -> int:
        """The rank whose steps produce the most bytes."""
        return int(np.argmax(self._output_bytes(self.plan.steps)))

    @cached_property
    def flops(self) -> dict[int, int]:
        """Floating-point operations of each step, by its id(), forward and backward."""
        recomputed_step_ids = {id(step) for segment in self.plan.recomputed_segments() for step in segment.steps}
        flops = {}
        for step in self.plan.steps:
            try:
                forward, backward = self._count_flops(step)
            except (RuntimeError, TypeError, ValueError):  # the step needs values, which meta tensors lack
                self.steps_without_flop_count.append(step.name)
                forward = backward = 0
            flops[id(step)] = forward * (1 + (id(step) in recomputed_step_ids)) + backward
        return flops

    def memory_traffic(self) -> int:
        """Return the bytes that this rank's steps read and write: inputs once per pass, outputs and gradients once."""
        requiring_grad = self.backward.values_requiring_grad
        num_bytes = 0
        for step in self.plan.steps:
            inputs, outputs = ([self.plan.values[v] for v in ids] for ids in (step.inputs, step.outputs))
            has_backward = any(value.id in requiring_grad for value in inputs)
            if step.kind not in IDENTITY_STEPS:
                num_bytes += sum(value.nbytes * (1 + has_backward + (value.id in requiring_grad)) for value in inputs)
                num_bytes += sum(value.nbytes * (1 + has_backward) for value in outputs)
        return num_bytes

    def _output_bytes(self, steps: Iterable[Step]) -> np.ndarray:
        outputs = [self.plan.values[out] for step in steps if step.kind not in IDENTITY_STEPS for out in step.outputs]
        return sum((self.ranks.nbytes(value) for value in outputs), np.zeros(self.plan.mesh.size, int))

    @cached_property
    def _first_reader_by_parameter(self) -> dict[Value, str]:
        """Name of the first step that reads each trained parameter."""
        reader_by_parameter: dict[Value, str] = {}
        for step in self.plan.steps:
            for value in step.inputs:
                if value in self.trained_ids:
                    reader_by_parameter.setdefault(self.plan.values[value], step.name)
        return reader_by_parameter

    def _count_flops(self, step: Step) -> tuple[int, int]:
        if step.kind == "ring":
            return self._ring_flops(step)
        if step.kind != "local" or step.kind_args is not None:  # kind_args: the local result is empty
            return 0, 0
        assert step.run is not None
        if step.blocks is not None and prod(step.blocks.block_counts) > MAX_BLOCKS_TO_RUN:
            raise ValueError("too many blocks to run them all")
        with FlopCounterMode(display=False) as counter, torch.enable_grad():
            requiring_grad = self.backward.values_requiring_grad
            outputs = step.run(*(meta_tensor(self.plan.values[v], v in requiring_grad) for v in step.inputs))
            forward_flops = counter.get_total_flops()
            outputs = [out for out in outputs if isinstance(out, torch.Tensor) and out.requires_grad]
            if outputs and id(step) in self.backward.backward_step_ids:
                torch.autograd.backward(outputs, [torch.empty_like(out) for out in outputs])
            return forward_flops, counter.get_total_flops() - forward_flops

    def _ring_flops(self, step: Step) -> tuple[int, int]:
        """Return the FLOPs of ring attention, which recomputes the scores in the backward pass."""
        q, _, v = (self.plan.values[value].local for value in step.inputs[:3])
        key_count = prod(atom.extent for atom in step.kind_args.keys)
        flops_per_feature = 2 * prod(q[:-1]) * key_count
        backward_features = 3 * q[-1] + 2 * v[-1] if id(step) in self.backward.backward_step_ids else 0
        return flops_per_feature * (q[-1] + v[-1]), flops_per_feature * backward_features


def module_paths(names: Sequence[str], max_paths: int) -> dict[str, str]:
    """Return each step name's module path, or the name if it has none; shortened until at most `max_paths` differ."""
    full_paths = {name: name.rpartition(":")[0] or name for name in names}
    # the names of operators outside modules contain dots, too
    path_parts = {name: path.split(".") if ":" in name else [path] for name, path in full_paths.items()}
    for depth in range(max(map(len, path_parts.values()), default=1), 0, -1):
        paths = {name: ".".join(part[:depth]) for name, part in path_parts.items()}
        if len(set(paths.values())) <= max_paths:
            break
    return paths if path_parts else {}


def last_output_shape(plan: TorchPlan, names: Collection[str]) -> Shape | None:
    """Return the global shape of the last result of these steps that is used elsewhere; None if there is none."""
    outputs = [out for s in plan.steps if s.name in names and s.kind not in IDENTITY_STEPS for out in s.outputs]
    read_ids = {value for step in plan.steps if step.name not in names for value in step.inputs}
    read_ids.update(out for out in plan.outputs if isinstance(out, int))
    values = [plan.values[out] for out in outputs if out in read_ids and plan.values[out].layout_or_none is not None]
    return values[-1].shape if values else None
