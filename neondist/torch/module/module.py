"""A PyTorch module whose images are cut into tiles, one per rank."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...comm import ProcessGrid
from ...comm.agreement import all_or_none
from ...errors import ConfigError, ShapeError, UserError
from ...halo import Phase
from ..capture.capture import capture_module, device_of
from ..capture.checks import (
    BackwardCheck,
    check_module,
    check_parameters,
    check_tensor,
    checksum_of,
    requires_grad_flags,
)
from ..capture.consistency import as_bytes_tensor, check_weight_drift, program_digest, version_counters
from ..capture.tracing import leave_inference_mode
from ..capture.watch import StateWatch
from ..exchange.mesh_comm import MeshComm
from ..execution.options import ExecutionOptions
from ..execution.runner import Runner
from ..execution.tiling import Tiling
from ..ir.graph import autocast_states
from ..ir.layout import Layout, NeededRanges, shape_of
from ..lowering.norm_gradients import ContiguousNormGradients, has_single_sample_norm
from ..lowering.plan import TorchPlan
from .criteria import CriterionCache, parameter_owner

MAX_CACHED_PROGRAMS = 64
"""Maximum number of cached states of a module."""


@dataclass(eq=False)
class _CompiledState:
    """Compiled program for one state of a module.

    Attributes
    ----------
    changes_module : bool
        Whether a forward may change the module's own attributes.
    target_layouts : dict of shape to Layout
        Layouts of targets by shape.
    widened_ranges : sequence of NeededRanges
        Ranges of the inputs that ranks receive, if larger than their tiles.
    single_sample_norm : bool
        Whether a norm sees a single sample, whose gradients need a workaround.
    """

    runner: Runner
    output_tree: Any
    layouts: list[Layout | None]
    digest: str
    computed_in_parts: bool
    dtypes: list[torch.dtype]
    widened_ranges: Sequence[NeededRanges]
    single_sample_norm: bool
    changes_module: bool = True
    target_layouts: dict[tuple[int, ...], Layout] = field(default_factory=dict)


class DistributedModule(nn.Module):
    """A module that runs on this rank's tile, as returned by `distribute`.

    Parameters, buffers and their names are those of the module; `train()` and `eval()` are forwarded to it.

    Attributes
    ----------
    optimizer : DistributedOptimizer or None
        The most recent one created for this module.
    """

    module: nn.Module
    optimizer: Any = None
    watched = False
    """Whether changes of its attributes recapture a criterion that uses it."""

    def __init__(
        self,
        module: nn.Module,
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[torch.dtype | None],
        grid: ProcessGrid,
        compiler: Callable[..., Any] | None = None,
        spatial: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        object.__setattr__(self, "module", module)  # not a submodule, so that parameter names stay unchanged
        # share the module's own dictionaries, so that names, hooks of optimisers and `to` behave as on the module
        self._parameters, self._buffers, self._modules = module._parameters, module._buffers, module._modules
        self.training = module.training
        self.grid, self._compiler = grid, compiler
        self._export_context: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._shapes, self._dtypes = tuple(shapes), list(dtypes)
        self._compiled_states: dict[Any, _CompiledState] = {}
        self._current: tuple[Any, _CompiledState] | None = None
        self.step = 0
        self._versions: tuple[int, ...] = ()
        self._deferred_gradients: dict[int, list[torch.Tensor] | None] = {}
        grid.check("distribute")
        count = grid.cached_objects[DistributedModule] = grid.cached_objects.get(DistributedModule, 0) + 1
        # the same on every rank: all distribute in one order
        self._name = f"number {count} of those on this grid"
        self.backward_check = BackwardCheck(grid, {"the model": self._name})
        with all_or_none(grid.world):
            check_module(module)
            self._watch = StateWatch(module)
            self.execution = ExecutionOptions.of(module, **options)
            self.comm = MeshComm(grid, len(shapes[0]) - 2 if spatial is None else spatial)
            self.tiling, self._criteria = Tiling(self.comm, self._shapes), CriterionCache(self.comm)
            self._compiled_state()
        self.comm.connect_devices(device_of(module))
        self._check_weights({"the module's steps": self._compiled_state().digest, "example_shape": self._shapes})

    def forward(self, *tiles: torch.Tensor) -> Any:
        """Return this rank's tiles of the outputs, given those of the inputs. Collective."""
        self._set_input_shapes(self._global_shapes(tiles))
        if self.grid.size == 1:
            state, prepared = self._state_and_program()
            self._check_tiles(tiles, prepared)
            # the plan keys random numbers, so that they are the same on every grid
            plan = prepared.runner.plan
            if not (plan.seed_id is not None or plan.recompute or prepared.computed_in_parts):
                return self._run_module(tiles, state, prepared)
        error, values = None, dict[str, Any]()
        changes: tuple[int, ...] = ()
        try:
            prepared = self._compiled_state()
            parameters, buffers = self._watch.named_parameters_and_buffers()
            self._check_tiles(tiles, prepared)
            check_parameters(prepared.runner.plan, parameters, buffers)
            values |= self._values_to_compare(tiles, prepared, parameters)
            changes = version_counters([*parameters.values(), *buffers.values()])
            if len(self._versions) == len(changes):
                changes = tuple(current - before for current, before in zip(changes, self._versions, strict=True))
        except UserError as problem:
            error = problem
        if not self.grid.check("forward", values, error, changes):
            self._check_weights({})
        if self.training and self.step > 0 and self.step & (self.step - 1) == 0:  # a power of two
            check_weight_drift(self.grid.world, parameters, self.step)
        self.comm.phase = Phase(self.training, self.step)
        outputs = prepared.runner(tiles, parameters, buffers)
        self.step += self.training
        if torch.is_grad_enabled():
            # torch.utils.checkpoint reruns a forward until it has all saved tensors: the last must follow all messages,
            # or ranks could stop before different ones
            torch.zeros((), requires_grad=True).exp()
        return self._record_layouts(pytree.tree_unflatten(outputs, prepared.output_tree), prepared.layouts)

    def _run_module(self, tiles: Sequence[torch.Tensor], state: Any, prepared: _CompiledState) -> Any:
        """Run the module itself, on one rank; attributes that its forward changes do not trigger a recapture."""
        with ContiguousNormGradients() if prepared.single_sample_norm and torch.is_grad_enabled() else nullcontext():
            outputs = self.module(*(tile.contiguous() for tile in tiles))  # channels-last may crash PyTorch 2.13
        if prepared.changes_module:
            if self._watch.key() != state:
                self._compiled_states[self._shapes, self._watch.exclude_changed_values(state)] = prepared
            prepared.changes_module = self._watch.key() != state
        return self._record_layouts(outputs, prepared.layouts)

    def _record_layouts(self, outputs: Any, layouts: Sequence[Layout | None]) -> Any:
        """Record the layouts of the outputs, and return them."""
        leaves = [outputs] if isinstance(outputs, torch.Tensor) else pytree.tree_leaves(outputs)
        for tensor, layout in zip(leaves, layouts, strict=True):
            if layout is not None:
                self.tiling.remember_layout(tensor, layout)
                self.backward_check.check_gradient_of_output(tensor, self.tiling.layout_of)
        return outputs

    def defer_gradients(self, parameters: Iterable[nn.Parameter], record: bool = False) -> list[list[torch.Tensor]]:
        """Leave the gradients of these parameters to a synchroniser, which reduces them over the ranks.

        Parameters
        ----------
        record : bool
            Whether passes on this rank's tiles record their gradient contributions in the returned lists.
        """
        gradients: dict[int, list[torch.Tensor]] = {id(parameter): [] for parameter in parameters}
        self._deferred_gradients.update(gradients if record else dict.fromkeys(gradients))
        return list(gradients.values())

    def set_export_context(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        """Export the module within the contexts that this callable returns."""
        self._export_context = context

    def guard(self, seed: int = 0) -> None:
        """Check custom rules and border schemes in subsequent passes; slow, with identical results.

        A step that modifies its inputs or returns another part of its results than its rule declares, or a scheme that
        leaves cells of other tiles unfilled, raises a HaloError that names it. Messages are delayed at random.
        """
        self.comm.guard(seed)
        self._compiled_states.clear()
        self._current = None
        self._criteria.clear()

    def train(self, mode: bool = True) -> DistributedModule:
        """Set the module's mode."""
        self.module.train(mode)
        self.training = mode
        return self

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return the module's state dict."""
        return self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict, the same on every rank, into the module."""
        return self.module.load_state_dict(state_dict, strict, assign)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled: communicators cannot be copied."""
        raise ConfigError(
            "a distributed module cannot be copied or pickled; save model.state_dict(), or distribute a copy of the"
            " original module: distribute(copy.deepcopy(model.module), ...)"
        )

    @property
    def plan(self) -> TorchPlan:
        """The compiled plan for the module's current mode."""
        return self._compiled_state().runner.plan

    @property
    def output_shapes(self) -> list[tuple[int, ...]]:
        """Global shapes of the tensor outputs."""
        return [shape_of(layout) for layout in self._output_layouts()]

    def scatter(self, image: torch.Tensor, index: int = 0) -> torch.Tensor:
        """Return this rank's tile of a whole input, the same on every rank; with its margin for `overlap_tile`.

        Parameters
        ----------
        image : torch.Tensor (N, C, *spatial)
            With the number of channels in `example_shape`. Each new batch or image size is captured once.
        index : int
            Position of the input.
        """
        check_tensor("image", image)
        self._set_input_shapes((*self._shapes[:index], self._check_image(image, index), *self._shapes[index + 1 :]))
        if self.grid.size > 1:
            name = "the image passed to scatter" if len(self._shapes) == 1 else f"image {index} passed to scatter"
            self.grid.record_replicated_array(name, checksum_of(image))
        overlaps = self._compiled_state().widened_ranges if self.execution.tiles_may_have_margins else ()
        return self.tiling.local_part(image, self.tiling.input_layouts[index], overlaps[index] if overlaps else None)

    def scatter_target(self, target: Any) -> Any:
        """Return this rank's part of a whole target, the same on every rank; of each item of a dict or list.

        A target with the spatial extents of an output, (N, *spatial) or (N, C, *spatial), is tiled like that output;
        others, (N,) or (N, C), are split only along the batch, over replicas.
        """
        # on one rank, targets are whole in every state of the module
        current = self._current if self.grid.size == 1 else None
        targets = (self._compiled_state() if current is None else current[1]).target_layouts

        def scatter_leaf(leaf: Any) -> torch.Tensor:
            shape = tuple(leaf.shape)
            if shape not in targets:
                targets[shape] = self.tiling.training_target_layout(shape, self._output_layouts())
            return self.tiling.local_part(leaf, targets[shape])

        for tensor in pytree.tree_leaves(target):
            check_tensor("target", tensor)
            if self.grid.size > 1:
                self.grid.record_replicated_array("the target passed to scatter_target", checksum_of(tensor))
        return scatter_leaf(target) if isinstance(target, torch.Tensor) else pytree.tree_map(scatter_leaf, target)

    def gather(self, tile: Any) -> Any:
        """Return the whole tensor, given this rank's tile of an output, an input or its gradient. Collective."""
        tensors, tree = pytree.tree_flatten(tile)
        tiles = [leaf for leaf in tensors if isinstance(leaf, torch.Tensor)]
        values = {"the model": self._name, "the list of tensors not from the model": self.tiling.unmarked(tiles)}
        self.grid.check("gather", values | {f"the dtype of tensor {i}": leaf.dtype for i, leaf in enumerate(tiles)})
        layouts = self.tiling.layouts_of(tiles, self._output_layouts)
        remaining = iter(layouts)
        wholes = [self.tiling.gather(t, next(remaining)) if isinstance(t, torch.Tensor) else t for t in tensors]
        return pytree.tree_unflatten(wholes, tree)

    def loss(self, criterion: Callable[..., torch.Tensor], output: Any, target: Any) -> torch.Tensor:
        """Return the loss of the whole images, the same on every rank. Collective.

        Parameters
        ----------
        criterion : callable
            Function or module of (output, target), such as torch.nn.CrossEntropyLoss(); a mean over cells or samples
            becomes the mean over the whole images. Each criterion is captured once, like the module.
        output, target
            This rank's tiles, as returned by the model and `scatter_target`; or lists or dicts of them.
        """
        is_pair = isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)
        if is_pair and self.grid.size == 1 and self._criteria.can_call_directly(criterion, output, target):
            return criterion(output, target)
        leaves, spec = pytree.tree_flatten((output, target))
        outputs = sum(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(output))
        positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = [leaves[i] for i in positions]
        unknown = self.tiling.unmarked(tensors)
        if unknown:  # all ranks must agree on their layouts
            self.grid.check("loss", {"the model": self._name, "the list of tensors not from the model": unknown})
        layouts = self.tiling.layouts_of(tensors, self._output_layouts, outputs)
        error, digest = None, ""
        try:
            inner, digest, closure = self._criteria.runner_for(criterion, leaves, positions, spec, layouts)
        except UserError as problem:
            error = problem
        if self.grid.size > 1 or error:
            name = getattr(criterion, "__qualname__", type(criterion).__name__)
            values = {"the model": self._name, "the criterion": f"{name} ({digest})"}
            gradients = {"torch.is_grad_enabled()": torch.is_grad_enabled(), **requires_grad_flags("tensor", tensors)}
            self.grid.check("loss", values | gradients, error)
        if self.grid.size == 1 and inner.plan.seed_id is None:
            loss = criterion(output, target)
            self._criteria.record_directly_callable(criterion, output, target)
            return loss
        # only now: virtual ranks share the criterion, whose tensors are replaced while PyTorch traces it
        owner = parameter_owner(criterion)
        named = {f"criterion.{name}": p for name, p in owner.named_parameters(remove_duplicate=False)}
        buffers = {f"criterion.{name}": b for name, b in owner.named_buffers(remove_duplicate=False)}
        loss = inner([self.backward_check.alias_for_loss(tensor) for tensor in tensors], named | closure, buffers)[0]
        self.backward_check.check_backward_of_loss(loss)
        return loss

    def _check_image(self, image: torch.Tensor, index: int) -> tuple[int, ...]:
        """Return the shape of a whole input; raise ShapeError unless it has the axes and channels of the example."""
        shape = tuple(image.shape)
        if not self._matches_example(shape, index):
            raise ShapeError(
                f"expected a whole tensor of shape {self._shapes[index]}, the same on every rank, or one with"
                f" another batch or image size, got {shape}"
            )
        return shape

    def _matches_example(self, shape: tuple[int, ...], index: int) -> bool:
        """Return whether an input has the axes and channels of the example."""
        expected, channels = self._shapes[index], slice(1, 2 if self.comm.mesh.spatial else 1)
        return len(shape) == len(expected) and shape[channels] == expected[channels] and 0 not in shape

    def _global_shapes(self, tiles: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
        """Return the global shapes of inputs, given this rank's tiles; for unknown tiles, the previous ones."""
        shapes = list(self._shapes)
        for index, tile in enumerate(tiles[: len(shapes)]):
            shape = self.tiling.global_shape(tile)
            if shape is not None and self._matches_example(shape, index):
                shapes[index] = shape
        return tuple(shapes)

    def _set_input_shapes(self, shapes: tuple[tuple[int, ...], ...]) -> None:
        """Set the global shapes of the inputs."""
        if shapes != self._shapes:
            self._shapes, self._current = shapes, None
            self.tiling.set_input_shapes(shapes)

    def _compiled_state(self) -> _CompiledState:
        return self._state_and_program()[1]

    def _state_and_program(self) -> tuple[Any, _CompiledState]:
        """Return the module's current state and its compiled program."""
        with self._export_context(), leave_inference_mode():
            return self._compile_state()

    def _compile_state(self) -> tuple[Any, _CompiledState]:
        state = self._watch.key()
        if self._current is not None and state == self._current[0]:  # avoids hashing, slow in small steps
            return self._current
        if (self._shapes, state) not in self._compiled_states:
            dtypes = self._input_dtypes()
            program = capture_module(self.module, list(zip(self._shapes, dtypes, strict=True)))
            location = self.comm.mesh, self.grid.rank, self.tiling.input_layouts
            plan, tree, lowering = self.execution.lower(program, *location, self.module)
            layouts = [plan.values[out].layout if isinstance(out, int) else None for out in plan.outputs]
            digest = program_digest(plan, program)
            if self._compiler is not None:
                plan.compile(self._compiler)
            computed_in_parts = lowering is not None and lowering.computes_in_parts
            overlaps = lowering.widened_ranges if lowering is not None else ()
            runner, single_sample = Runner(self.comm, plan, self._deferred_gradients), has_single_sample_norm(plan)
            prepared = _CompiledState(runner, tree, layouts, digest, computed_in_parts, dtypes, overlaps, single_sample)
            state = self._watch.exclude_changed_values(state, program.reads)
            if len(self._compiled_states) >= MAX_CACHED_PROGRAMS:
                del self._compiled_states[next(iter(self._compiled_states))]
            self._compiled_states[self._shapes, state] = prepared
        self._current = state, self._compiled_states[self._shapes, state]
        return self._current

    def _output_layouts(self) -> list[Layout]:
        return [layout for layout in self._compiled_state().layouts if layout is not None]

    def _input_dtypes(self) -> list[torch.dtype]:
        floating = (p.dtype for p in self.module.parameters() if p.dtype.is_floating_point)
        default = next(floating, torch.get_default_dtype())
        return [default if dtype is None else dtype for dtype in self._dtypes]

    def _check_tiles(self, tiles: Sequence[Any], prepared: _CompiledState) -> None:
        count, plan = len(self.tiling.input_layouts), prepared.runner.plan
        if len(tiles) != count:
            raise ShapeError(
                f"the module takes {count} input{'s'[: count != 1]}, as example_shape says, got {len(tiles)}"
            )
        for at, (tile, layout, dtype) in enumerate(zip(tiles, self.tiling.input_layouts, prepared.dtypes, strict=True)):
            check_tensor(f"input {at}", tile)
            expected = plan.values[plan.inputs[at]].local
            if tuple(tile.shape) != expected:
                raise ShapeError(
                    f"rank {self.grid.rank}: input {at} has shape {tuple(tile.shape)}, but this rank's tile of"
                    f" {shape_of(layout)} is {expected}; cut the image with model.scatter(image)"
                )
            if tile.dtype != dtype and not any(autocast_states()):
                raise ShapeError(
                    f"rank {self.grid.rank}: input {at} has dtype {tile.dtype}, but the module takes {dtype}; convert"
                    " it with .to, or use distribute(..., dtype=...)"
                )

    def _values_to_compare(
        self, tiles: Sequence[torch.Tensor], prepared: _CompiledState, parameters: Mapping[str, torch.Tensor]
    ) -> dict[str, Any]:
        """Return the values that determine the messages of a pass, forward and backward."""
        trained = [name for name, p in parameters.items() if p.requires_grad]
        return {
            "the model": self._name,
            "the mode": "train()" if self.training else "eval()",
            "the captured program": prepared.digest,
            "torch.is_grad_enabled()": torch.is_grad_enabled(),
            "autocast": autocast_states(),
            "the dtype of the inputs": [tile.dtype for tile in tiles],
            "the list of parameters that require gradients": trained,
        } | requires_grad_flags("input", tiles)

    def _check_weights(self, values: Mapping[str, Any]) -> None:
        """Raise ConfigError on all ranks unless all have the same values and weights."""
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        buffers = dict(self.module.named_buffers(remove_duplicate=False))
        self._versions = version_counters([*parameters.values(), *buffers.values()])
        if self.grid.world.size == 1:
            return
        own = {name: str(value) for name, value in values.items()}
        names = list(own)
        for name, tensor in (*parameters.items(), *buffers.items()):
            checksum = 0
            if tensor.numel() and not tensor.is_meta:  # no values yet
                checksum = zlib.crc32(as_bytes_tensor(tensor).cpu().numpy().data)
            own[name] = f"{tuple(tensor.shape)} {checksum}"
        all_values = self.grid.world.allgather(own)
        for rank, other in enumerate(all_values):
            differ = [name for name in (*all_values[0], *other) if all_values[0].get(name) != other.get(name)]
            if differ:
                others = [name for name in differ if name not in names]
                detail = f"its {others[0]!r} differs" if others else f"{differ[0]} differ{'s' * (differ[0][-1] != 's')}"
                raise ConfigError(
                    f"rank {rank} has a different module from rank 0: {detail}; build it from the same seed on every"
                    " rank, or load the same state_dict"
                ).on_all_ranks()
