"""Compiled programs of a module, one for each combination of the module's state and input shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.weight_norm import WeightNorm

from ..capture.capture import capture_module, device_of
from ..capture.consistency import program_digest
from ..capture.tracing import leave_inference_mode, suspend_hooks_and_modes
from ..capture.watch import StateWatch
from ..exchange.mesh_comm import MeshComm
from ..execution.compiler_choice import compilation_pays_off
from ..execution.options import ExecutionOptions
from ..execution.runner import PlanRunner
from ..execution.tiling import Tiling
from ..ir.autocast import autocast_dtypes, disable_autocast
from ..ir.layout import Layout, NeededRanges, Shape
from ..lowering.norm_gradients import has_single_sample_norm

MAX_CACHED_PROGRAMS = 64


@dataclass(eq=False)
class CompiledProgram:
    """Compiled program for one state of a module.

    Attributes
    ----------
    runs_module : bool
        Whether the module itself runs instead of the steps.
    changes_module : bool
        Whether a forward pass may change the module's own attributes.
    widened_ranges : sequence of NeededRanges
        Ranges of the inputs that ranks receive, if larger than their tiles.
    has_single_sample_norm : bool
        Whether a norm sees a single sample, so that its gradients need a workaround.
    weight_hooks : sequence of (torch.nn.Module, callable)
        Forward pre-hooks that set an attribute of their module, computed from its parameters and buffers.
    """

    runner: PlanRunner
    output_tree: Any
    layouts_by_output: list[Layout | None]
    digest: str
    runs_module: bool
    input_dtypes: list[torch.dtype]
    widened_ranges: Sequence[NeededRanges]
    has_single_sample_norm: bool
    weight_hooks: Sequence[tuple[nn.Module, Callable[..., Any]]] = ()
    changes_module: bool = True
    target_layouts: dict[Shape, Layout] = field(default_factory=dict)

    @property
    def output_layouts(self) -> list[Layout]:
        """Layouts of the outputs that are tensors."""
        return [layout for layout in self.layouts_by_output if layout is not None]


class ProgramCache:
    """Compiled programs of a module, captured when they are first needed.

    Parameters
    ----------
    dtypes : dtype of each input; None: the dtype of the module's first floating-point parameter

    Attributes
    ----------
    shapes : global shapes of the inputs
    export_context : callable
        Returns the context in which the module is exported.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: MeshComm,
        execution: ExecutionOptions,
        shapes: Sequence[Shape],
        dtypes: Sequence[torch.dtype | None],
        compiler: Callable[..., Any] | None,
        deferred_gradients: Mapping[int, list[torch.Tensor] | None],
    ) -> None:
        self.module, self.comm, self.execution, self.compiler = module, comm, execution, compiler
        self.shapes, self.dtypes, self.deferred_gradients = tuple(shapes), list(dtypes), deferred_gradients
        self.watch = StateWatch(module)
        self.tiling = Tiling(comm, self.shapes)
        self.export_context: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._programs: dict[Any, CompiledProgram] = {}
        self._last_used: dict[Any, tuple[Any, CompiledProgram]] = {}  # for the current shapes, by key

    def set_shapes(self, shapes: tuple[Shape, ...]) -> None:
        """Set the global shapes of the inputs."""
        if shapes != self.shapes:
            self.shapes = shapes
            self._last_used.clear()
            self.tiling.set_input_shapes(shapes)

    def program_for_autocast(self, dtypes: Sequence[torch.dtype]) -> CompiledProgram:
        """Return the program for the module's current state and the autocast around this call.

        Parameters
        ----------
        dtypes : dtypes of the inputs, which autocast accepts in any precision
        """
        if not any(autocast_dtypes()) or len(dtypes) != len(self.shapes):
            return self.current
        return self._find_program((*autocast_dtypes(), *dtypes), dtypes)

    @property
    def current(self) -> CompiledProgram:
        """The program for the module's current state and the shapes of its inputs, without autocast."""
        with disable_autocast():
            return self._find_program(())

    @property
    def last(self) -> CompiledProgram | None:
        """The program that was used last for the current input shapes, possibly for another state."""
        return self._last_used[()][1] if () in self._last_used else None

    def _find_program(self, key: Any, dtypes: Sequence[torch.dtype] | None = None) -> CompiledProgram:
        """Return the program for the module's current state; `key` is () without autocast."""
        with self.export_context(), leave_inference_mode():
            state_key = self.watch.key()
            # comparing with the last state avoids hashing, which is slow in small steps
            if key not in self._last_used or self._last_used[key][0] != state_key:
                if (self.shapes, key, state_key) not in self._programs:
                    program, reads = self._compile(dtypes)
                    state_key = self.watch.exclude_changed_values(state_key, reads)
                    if len(self._programs) >= MAX_CACHED_PROGRAMS:
                        del self._programs[next(iter(self._programs))]
                    self._programs[self.shapes, key, state_key] = program
                self._last_used[key] = state_key, self._programs[self.shapes, key, state_key]
            return self._last_used[key][1]

    def ignore_changes_by_forward(self, program: CompiledProgram) -> None:
        """Use a program also for the state after its forward pass, and exclude values that the pass has changed."""
        if program.changes_module:
            key, state_key = next((key, state) for key, (state, last) in self._last_used.items() if last is program)
            if self.watch.key() != state_key:
                self._programs[self.shapes, key, self.watch.exclude_changed_values(state_key)] = program
            program.changes_module = self.watch.key() != state_key

    def set_hook_weights(self, program: CompiledProgram) -> None:
        """Set attributes such as pruned weights, which can be read after a pass, as the module's own pass would."""
        if program.weight_hooks:
            with torch.no_grad():
                for part, hook in program.weight_hooks:
                    hook(part, ())
            self.ignore_changes_by_forward(program)

    def compile_if_faster(self, compiler: Callable[..., Any]) -> None:
        """Compile programs from now on if this is measured to pay off for the current one. Collective."""
        program, grid = self.current, self.comm.grid
        if program.runs_module and grid.size == 1:  # the program's runner is not used
            return
        if compilation_pays_off(program.runner.plan, compiler, grid.world, device_of(self.module)):
            self.compiler = compiler
            self.clear()

    def clear(self) -> None:
        """Remove all programs."""
        self._programs.clear()
        self._last_used.clear()

    @suspend_hooks_and_modes()
    def _compile(self, dtypes: Sequence[torch.dtype] | None = None) -> tuple[CompiledProgram, Any]:
        """Return the program for the current state, and the values of the module that were read during capture."""
        dtypes = list(dtypes or self._input_dtypes())
        captured_program = capture_module(self.module, list(zip(self.shapes, dtypes, strict=True)))
        mesh, rank, input_layouts = self.comm.mesh, self.comm.grid.rank, self.tiling.input_layouts
        plan, output_tree, lowering = self.execution.lower(captured_program, mesh, rank, input_layouts, self.module)
        layouts = [plan.values[out].layout if isinstance(out, int) else None for out in plan.outputs]
        digest = program_digest(plan, captured_program)
        widened_ranges = lowering.widened_ranges if lowering is not None else ()
        runner = PlanRunner(self.comm, plan, self.deferred_gradients, self.compiler)
        has_single_sample = has_single_sample_norm(plan)
        program = CompiledProgram(
            runner, output_tree, layouts, digest, plan.runs_original_module, dtypes, widened_ranges, has_single_sample,
            _weight_hooks(self.module),
        )  # fmt: skip
        return program, captured_program.reads

    def _input_dtypes(self) -> list[torch.dtype]:
        floating_dtypes = (p.dtype for p in self.module.parameters() if p.dtype.is_floating_point)
        default_dtype = next(floating_dtypes, torch.get_default_dtype())
        return [default_dtype if dtype is None else dtype for dtype in self.dtypes]


def _weight_hooks(module: nn.Module) -> list[tuple[nn.Module, Callable[..., Any]]]:
    kinds = BasePruningMethod, WeightNorm
    return [(p, hook) for p in module.modules() for hook in p._forward_pre_hooks.values() if isinstance(hook, kinds)]
