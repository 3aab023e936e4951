"""Execution of a plan's steps under ordinary autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from ...halo import HaloRecord, Phase
from ..capture.tracing import leave_inference_mode
from ..exchange import functions
from ..exchange.channel import TransferChannel
from ..exchange.guard import run_step_with_checks
from ..exchange.mesh_comm import MeshComm
from ..exchange.normalisation import Normalise
from ..exchange.ring import RingAttention, RingChannel
from ..exchange.schemes import SchemeChannel
from ..ir.autocast import autocast_dtypes
from ..ir.graph import DimPart, Segment, Step, Value, supports_gradients
from ..lowering.plan import TorchPlan
from ..lowering.traffic import message_kind
from .saved_tensors import SavedTensors


class PlanRunner:
    """Executor of one plan on this rank, with the plan's channels.

    The bytes that a forward pass sends are compared with the planned number.

    Parameters
    ----------
    deferred_gradients : mapping of int to (list of torch.Tensor, or None), optional
        Parameters, by id(), whose gradients are not summed over the ranks in a backward pass. Each value is a list to
        which this rank's parts of the gradient are added, or None.
    compiler, compiled_functions : see TorchPlan.executed_segments
    """

    def __init__(
        self,
        comm: MeshComm,
        plan: TorchPlan,
        deferred_gradients: Mapping[int, list[torch.Tensor] | None] | None = None,
        compiler: Callable[..., Any] | None = None,
        compiled_functions: dict[Any, Callable[..., Any]] | None = None,
    ) -> None:
        self.comm, self.plan = comm, plan
        self.deferred_gradients = {} if deferred_gradients is None else deferred_gradients
        self.channels = {
            id(step): SchemeChannel(comm, step)
            if step.scheme is not None
            else TransferChannel(comm, step.name, step.transfer, message_kind(step))
            for step in plan.steps
            if step.transfer is not None
        }
        self.ring_channels = {id(step): RingChannel(comm, step) for step in plan.steps if step.kind == "ring"}
        schemes = [step.scheme for step in plan.steps if step.scheme is not None]
        # some schemes send different numbers of bytes in each step; the plan has their mean
        self._sent_bytes_vary = any(len(set(scheme.exchanges_per_call("forward"))) > 1 for scheme in schemes)
        self._segments = plan.executed_segments(compiler, compiled_functions)
        for step in plan.steps:
            if step.blocks is not None:
                step.blocks.compiler = compiler
        self._partitioned_parameters = plan.partitioned_parameters()
        self._saved_tensors = SavedTensors(plan)
        steps = (step for segment in self._segments for step in segment.steps)
        self._step_functions = {id(step): self._step_function(step) for step in steps}

    @leave_inference_mode()
    def __call__(
        self,
        inputs: Sequence[torch.Tensor],
        parameters: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
    ) -> list[Any]:
        """Run a pass, update the parameters and buffers that it mutates, and return its outputs."""
        plan = self.plan
        env: dict[int, torch.Tensor] = dict(zip(plan.inputs, inputs, strict=True))
        env.update({value: buffers[name] for name, value in plan.buffers.items()})
        env.update(self._wrap_parameters(parameters))
        tensors_by_name = {**parameters, **buffers}
        ids_by_name = plan.parameters | plan.buffers
        for value in [ids_by_name[name] for name in plan.mutated_tensors]:  # the backward pass may need previous values
            env[value] = env[value].clone()
        if plan.seed_id is not None:
            env[plan.seed_id] = self._draw_seed(inputs)
        bytes_sent_before = self.comm.bytes_sent
        if plan.recompute and torch.is_grad_enabled():
            self._run_segments(env)
        else:
            with self._saved_tensors.record_saved_tensors():
                for segment in self._segments:
                    self._run_steps(segment.steps, env)
        self._check_sent_bytes(self.comm.bytes_sent - bytes_sent_before)
        if plan.mutated_tensors:
            with torch.no_grad():
                new_values = [env[value] for value in plan.mutated_tensors.values()]
                torch._foreach_copy_([tensors_by_name[name] for name in plan.mutated_tensors], new_values)
        return [env[out] if isinstance(out, int) else out.value for out in plan.outputs]

    def _run_steps(self, steps: Sequence[Step], env: dict[int, torch.Tensor]) -> None:
        """Run steps, add their outputs to `env`, and remove values that are no longer needed."""
        run_step = self._run_observed if self.comm.grid.observers else self._run_step
        if self.comm.has_debug_checks:
            run_step = partial(run_step_with_checks, self.plan.rank, run_step, self.plan.values)
        dtypes = self.plan.dtypes_under_autocast
        for step in steps:
            outputs = run_step(step, [env[value] for value in step.inputs])
            for value, tensor in zip(step.outputs, outputs, strict=True):
                # autocast does not cast the result of an operator that is lowered to several steps
                env[value] = tensor.to(dtypes[value]) if value in dtypes else tensor
            for value in step.freed_ids:
                del env[value]

    def _run_segments(self, env: dict[int, torch.Tensor]) -> None:
        """Run all steps; segments before the last keep only values that later segments read (Chen et al. 2016)."""
        *earlier_segments, last_segment = self._segments
        with set_checkpoint_early_stop(False):  # with early stop, ranks could stop before different messages
            for segment in earlier_segments:
                inputs = [env[value] for value in segment.inputs]
                run = partial(self._run_segment, segment, [])
                outputs = checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)
                env.update(zip(segment.outputs, outputs, strict=True))
                for value in {value for step in segment.steps for value in step.freed_ids}:
                    env.pop(value, None)
        # earlier segments must be recomputed from tensors with unchanged strides
        with self._saved_tensors.record_saved_tensors():
            self._run_steps(last_segment.steps, env)

    def _run_segment(self, segment: Segment, phases: list[Phase], *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Run a segment, or repeat it in the phase of its first run, which is added to `phases`."""
        env = dict(zip(segment.inputs, tensors, strict=True))
        current_phase = self.comm.phase
        if phases:
            self.comm.phase = phases[0].repeated()
        else:
            self.comm.phase = current_phase._replace(record=HaloRecord())
            phases.append(self.comm.phase)
        try:
            self._run_steps(segment.steps, env)
        finally:
            self.comm.phase = current_phase
        outputs = [env[value] for value in segment.outputs]
        # tensors without a gradient, such as detached tensors, are left unchanged
        return [functions.RecomputedResult.apply(tensor) if tensor.requires_grad else tensor for tensor in outputs]

    def _draw_seed(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a seed from PyTorch's generator on rank 0; a recomputing checkpoint gets the same seed.

        Generators of other ranks advance too, so that ranks with the same seed continue to shuffle in the same order.
        """
        world = self.comm.grid.world
        draws_seed = world.rank == 0 or not world.shares_process  # virtual ranks share the generator
        seed = world.bcast(int(torch.randint(2**62, ())) if draws_seed else None)
        return torch.tensor(seed, device=inputs[0].device if inputs else None)

    def _wrap_parameters(self, parameters: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
        ids_by_name = self.plan.parameters
        tensors_by_id = {value: parameters[name] for name, value in ids_by_name.items()}
        if not (self.comm.mesh.axes and torch.is_grad_enabled()):
            return tensors_by_id
        trained_names = [name for name in ids_by_name if parameters[name].requires_grad]
        for name in trained_names:
            if (recorded := self.deferred_gradients.get(id(parameters[name]))) is not None:
                tensors_by_id[ids_by_name[name]] = functions.RecordGradient.apply(parameters[name], recorded)
        trained_names = [name for name in trained_names if id(parameters[name]) not in self.deferred_gradients]
        if trained_names:
            trained_ids = [ids_by_name[name] for name in trained_names]
            part_steps = map(self._partitioned_parameters.get, trained_ids)
            parts: list[DimPart | None] = [None if step is None else step.kind_args for step in part_steps]
            gradients_are_unaliased = [value in self.plan.unaliased_gradients for value in trained_ids]
            tensors = functions.SumParameterGradients.apply(
                self.comm, parts, gradients_are_unaliased, *(parameters[name] for name in trained_names)
            )
            tensors_by_id.update(zip(trained_ids, tensors, strict=True))
        return tensors_by_id

    @cached_property
    def _planned_sent_bytes(self) -> int:
        return sum(self.plan.traffic(self.plan.rank, trained=()).values())

    def _check_sent_bytes(self, sent_bytes: int) -> None:
        # autocast changes dtypes
        if sent_bytes != self._planned_sent_bytes and not (self._sent_bytes_vary or any(autocast_dtypes())):
            raise RuntimeError(
                f"rank {self.plan.rank}: a forward pass sent {sent_bytes} bytes, but {self._planned_sent_bytes} were"
                " planned; this is a bug in neondist, or in a custom rule: model.guard() names the step"
            )

    def _run_observed(self, step: Step, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run a step and show its outputs and their gradients to the observers."""
        observers = self.comm.grid.observers
        with observers.observe("layer", step.name, "forward"):
            outputs = self._run_step(step, tensors)
        for tensor in outputs:
            if not tensor.is_floating_point():
                continue
            observers.on_value(step, "output", tensor.detach().float().cpu().numpy())
            if tensor.requires_grad:
                tensor.register_hook(
                    lambda dy: observers.on_value(step, "gradient of the output", dy.detach().float().cpu().numpy())
                )
        return outputs

    def _run_step(self, step: Step, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        outputs: Sequence[torch.Tensor] = self._step_functions[id(step)](*tensors)
        return outputs

    def _step_function(self, step: Step) -> Callable[..., Any]:
        """Return a step's function from input to output tensors, with all lookups done before a pass."""
        comm, name, axes = self.comm, step.name, step.axes
        if step.kind == "local":
            if step.kind_args is not None:
                return lambda *tensors: _empty_results(step, tensors, self.plan.values)
            assert step.run is not None
            return step.run
        if step.kind == "norm":
            moments, *are_present = step.kind_args

            def normalise(x: torch.Tensor, *scaling_tensors: torch.Tensor) -> Any:
                remaining_tensors = iter(scaling_tensors)
                weight_and_bias = [next(remaining_tensors) if is_present else None for is_present in are_present]
                return Normalise.apply(x, *weight_and_bias, comm, name, moments)

            return normalise
        if step.kind == "ring":
            channel = self.ring_channels[id(step)]
            return lambda q, k, v, mask=None: (RingAttention.apply(q, k.to(q.dtype), v.to(q.dtype), mask, channel),)
        if step.kind == "view":
            return partial(self._run_exchange_step, step)
        if step.kind == "gather":
            return lambda x: (functions.GatherWhole.apply(x, self.channels[id(step)]),)
        if step.kind == "sum":
            return lambda x: (functions.SumOverRanks.apply(x, comm, name, axes),)
        if step.kind == "max":
            return lambda x: (comm.reduce(name, "forward", x.detach(), axes, "max"),)
        if step.kind == "part":
            output_shape = self.plan.values[step.outputs[0]].local

            def select_part(x: torch.Tensor) -> tuple[torch.Tensor]:
                part: DimPart = step.kind_args
                return (x if x.shape == output_shape else part.select(x, comm.place),)

            return select_part
        if step.kind == "spread":
            return lambda x: (functions.SumGradientOverRanks.apply(x, comm, name, axes) if x.requires_grad else x,)
        return lambda x: (functions.CountGradientOnce.apply(x, step.contributes_gradient) if x.requires_grad else x,)

    def _run_exchange_step(self, step: Step, x: torch.Tensor) -> tuple[torch.Tensor]:
        channel = self.channels[id(step)]
        view: torch.Tensor = functions.ExchangeView.apply(x, channel, step.pads, step.fill, step.has_unaliased_gradient)
        if self._saved_tensors.includes(x):
            own_part = channel.own_part_of(view.detach(), step.pads)
            if own_part is not None:
                self._saved_tensors.replace(x, own_part)
        return (view,)


def _empty_results(step: Step, tensors: Sequence[torch.Tensor], values: Sequence[Value]) -> Sequence[torch.Tensor]:
    """Return the results of a local step on a rank that has no indices of them."""
    differentiable_tensors = [tensor for tensor in tensors if supports_gradients(tensor.dtype)]
    results = list[torch.Tensor]()
    for shape, output in zip(step.kind_args, (values[out] for out in step.outputs), strict=True):
        if differentiable_tensors and output.kind == "value":
            results.append(functions.EmptyResult.apply(shape, output.dtype, *differentiable_tensors))
        else:
            device = tensors[0].device if tensors else None
            results.append(torch.zeros(shape, dtype=output.dtype, device=device))
    return results
