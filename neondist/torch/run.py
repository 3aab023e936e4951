"""Runs a plan's steps under ordinary autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from .functions import Again, Counted, Gather, Normalise, Noted, Nothing, Parameters, Spread, Sum, View
from .graph import Segment, Step, Value, autocast, has_gradients
from .guard import guarded
from .mesh_comm import Channel, MeshComm
from .plan import TorchPlan
from .ring import Around, RingChannel
from .schemes import SchemeChannel
from .tracing import ordinary_tensors
from .traffic import kind_of

Deferred = Mapping[int, list[torch.Tensor] | None]


class Runner:
    """Runs one plan on this rank; keeps the plan's channels and nothing of a pass.

    What a pass has sent is compared with what was planned.

    Parameters
    ----------
    deferred : mapping of int to list of tensors, or None
        Parameters, by id(), whose gradients are not summed over the ranks in a backward pass, and what takes this
        rank's parts of them.
    """

    def __init__(
        self, wires: MeshComm, plan: TorchPlan, deferred: Mapping[int, list[torch.Tensor] | None] | None = None
    ) -> None:
        self.wires, self.plan, self.deferred = wires, plan, {} if deferred is None else deferred
        self.channels = {
            id(step): SchemeChannel(wires, step)
            if step.scheme is not None
            else Channel(wires, step.name, step.transfer, kind_of(step))
            for step in plan.steps
            if step.transfer is not None
        }
        self.rings = {id(step): RingChannel(wires, step) for step in plan.steps if step.kind == "ring"}
        schemes = [step.scheme for step in plan.steps if step.scheme is not None]
        # of some a plan tells the mean of many steps
        self._varies = any(len(set(scheme.exchanges("forward"))) > 1 for scheme in schemes)
        self._segments = plan.segments() if plan.recompute else []
        self._calls = {id(step): self._call_of(step) for step in plan.steps}

    @ordinary_tensors()
    def __call__(
        self,
        inputs: Sequence[torch.Tensor],
        parameters: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
    ) -> list[Any]:
        """Return the outputs of a pass; buffers that it changes are changed."""
        plan = self.plan
        env: dict[int, torch.Tensor] = dict(zip(plan.inputs, inputs, strict=True))
        for name, value in plan.buffers.items():  # backward may need what a buffer was before
            env[value] = buffers[name].clone() if name in plan.mutated else buffers[name]
        env.update(self._entered(parameters))
        if plan.key is not None:
            env[plan.key] = self._drawn(inputs)
        before = self.wires.sent
        if self._segments and torch.is_grad_enabled():
            self._run_segments(env)
        else:
            self._run_steps(plan.steps, env)
        self._compare(self.wires.sent - before)
        if plan.mutated:
            with torch.no_grad():
                moved = [env[value] for value in plan.mutated.values()]
                torch._foreach_copy_([buffers[name] for name in plan.mutated], moved)
        return [env[out] if isinstance(out, int) else out.value for out in plan.outputs]

    def _run_steps(self, steps: Sequence[Step], env: dict[int, torch.Tensor]) -> None:
        """Run steps, and replace what is read no more by what they give."""
        run = self._watched if self.wires.grid.observers else self._run
        if self.wires.guarded:
            run = partial(guarded, self.plan.rank, run, self.plan.values)
        for step in steps:
            found = run(step, [env[value] for value in step.inputs])
            for value, tensor in zip(step.outputs, found, strict=True):
                env[value] = tensor
            for value in step.free:
                del env[value]

    def _run_segments(self, env: dict[int, torch.Tensor]) -> None:
        """Run all steps; of a segment only what others read is kept, but for the last (Chen et al. 2016)."""
        *before, last = self._segments
        with set_checkpoint_early_stop(False):  # or ranks could stop before different messages
            for segment in before:
                given = [env[value] for value in segment.inputs]
                again = partial(self._segment, segment)
                found = checkpoint(again, *given, use_reentrant=False, preserve_rng_state=False)
                env.update(zip(segment.outputs, found, strict=True))
                for value in {value for step in segment.steps for value in step.free}:
                    env.pop(value, None)
        self._run_steps(last.steps, env)

    def _segment(self, segment: Segment, *tensors: torch.Tensor) -> list[torch.Tensor]:
        env = dict(zip(segment.inputs, tensors, strict=True))
        self._run_steps(segment.steps, env)
        found = [env[value] for value in segment.outputs]
        # each alone: what has no gradient, as where others detach it, sends none
        return [Again.apply(tensor) if tensor.requires_grad else tensor for tensor in found]

    def _drawn(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a number of PyTorch's generator on rank 0, which a checkpoint that runs again finds again.

        Generators of other ranks go on alike, or ranks with the same seed would shuffle differently from then on.
        """
        world = self.wires.grid.world
        draws = world.rank == 0 or not world.one_process  # virtual ranks share the generator
        number = world.bcast(int(torch.randint(2**62, ())) if draws else None)
        return torch.tensor(number, device=inputs[0].device if inputs else None)

    def _entered(self, parameters: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
        ids = self.plan.parameters
        found = {value: parameters[name] for name, value in ids.items()}
        if not (self.wires.mesh.axes and torch.is_grad_enabled()):
            return found
        trained = [name for name in ids if parameters[name].requires_grad]
        for name in trained:
            if (noted := self.deferred.get(id(parameters[name]))) is not None:
                found[ids[name]] = Noted.apply(parameters[name], noted)
        trained = [name for name in trained if id(parameters[name]) not in self.deferred]
        if trained:
            tensors = Parameters.apply(self.wires, *(parameters[name] for name in trained))
            found.update({ids[name]: tensor for name, tensor in zip(trained, tensors, strict=True)})
        return found

    @cached_property
    def _planned(self) -> int:
        return sum(self.plan.traffic(self.plan.rank, trained=()).values())

    def _compare(self, sent: int) -> None:
        if sent != self._planned and not (self._varies or any(autocast())):  # which sends other dtypes
            raise RuntimeError(
                f"rank {self.plan.rank}: a forward pass sent {sent} bytes, but {self._planned} were planned; this"
                " is a bug in neondist"
            )

    def _watched(self, step: Step, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run a step, and show what it gives, and the gradient of that, to all who watch."""
        observers = self.wires.grid.observers
        with observers.during("layer", step.name, "forward"):
            found = self._run(step, tensors)
        for tensor in found:
            if not tensor.is_floating_point():
                continue
            observers.value(step, "output", tensor.detach().float().cpu().numpy())
            if tensor.requires_grad:
                tensor.register_hook(
                    lambda dy: observers.value(step, "gradient of the output", dy.detach().float().cpu().numpy())
                )
        return found

    def _run(self, step: Step, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        found: Sequence[torch.Tensor] = self._calls[id(step)](*tensors)
        return found

    def _call_of(self, step: Step) -> Callable[..., Any]:
        """Return what runs a step, given the tensors of its inputs: all that can be looked up before a pass."""
        wires, name, axes = self.wires, step.name, step.axes
        if step.kind == "local":
            assert step.run is not None
            return step.run if step.key is None else lambda *tensors: run_local(step, tensors, self.plan.values)
        if step.kind == "norm":
            moments, *there = step.key

            def normalise(x: torch.Tensor, *given: torch.Tensor) -> Any:
                rest = iter(given)
                scaling = [next(rest) if each else None for each in there]
                return Normalise.apply(x, *scaling, wires, name, moments)

            return normalise
        if step.kind == "ring":
            channel = self.rings[id(step)]
            return lambda q, k, v, mask=None: (Around.apply(q, k.to(q.dtype), v.to(q.dtype), mask, channel),)
        if step.kind == "view":
            where = self.channels[id(step)], step.pads, step.fill, step.owns_gradient
            return lambda x: (View.apply(x, *where),)
        if step.kind == "gather":
            return lambda x: (Gather.apply(x, self.channels[id(step)]),)
        if step.kind == "sum":
            return lambda x: (Sum.apply(x, wires, name, axes),)
        if step.kind == "max":
            return lambda x: (wires.reduce(name, "forward", x.detach(), axes, "max"),)
        if step.kind == "spread":
            return lambda x: (Spread.apply(x, wires, name, axes) if x.requires_grad else x,)
        return lambda x: (Counted.apply(x, step.counts) if x.requires_grad else x,)


def run_local(step: Step, tensors: Sequence[torch.Tensor], values: Sequence[Value]) -> Sequence[torch.Tensor]:
    """Run a local step; of one of which this rank has no index, return the empty results."""
    assert step.run is not None
    if step.key is None:
        found: Sequence[torch.Tensor] = step.run(*tensors)
        return found
    given, empty = [tensor for tensor in tensors if has_gradients(tensor.dtype)], list[torch.Tensor]()
    for shape, kind in zip(step.key, (values[value] for value in step.outputs), strict=True):
        if given and kind.kind == "value":
            empty.append(Nothing.apply(shape, kind.dtype, *given))
        else:
            device = tensors[0].device if tensors else None
            empty.append(torch.zeros(shape, dtype=kind.dtype, device=device))
    return empty
