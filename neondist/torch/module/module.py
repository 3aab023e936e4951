"""A PyTorch module whose images are cut into tiles, one per rank."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...comm import ProcessGrid
from ...comm.agreement import all_or_none
from ...errors import ConfigError, ShapeError, UserError
from ...halo import Phase
from ...terminal.console import counted
from ..capture.capture import device_of
from ..capture.checks import (
    REMEDY_FOR_ARGUMENTS,
    BackwardEntryCheck,
    bind_inputs,
    check_module,
    check_not_traced,
    check_parameter_shapes,
    check_tensor,
    checksum_of,
    requires_grad_flags,
)
from ..capture.consistency import as_bytes_tensor, check_weight_drift, version_counters
from ..exchange.channel import with_default_strides
from ..exchange.mesh_comm import MeshComm
from ..execution.options import ExecutionOptions
from ..ir.autocast import autocast_dtypes
from ..ir.layout import Layout, shape_of
from ..lowering.norm_gradients import ContiguousNormGradients
from ..lowering.plan import TorchPlan
from .criteria import CriterionCache, criterion_module
from .programs import CompiledProgram, ProgramCache

P = ParamSpec("P")
R = TypeVar("R")


def _uncompiled(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Let compiled functions call a method, which exchanges messages, without compiling it.

    PyTorch's decorator is applied when a module is distributed, as importing it would slow down importing neondist.
    """

    @wraps(method)
    def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._call_uncompiled(method, self, *args, **kwargs)

    return call


def _call_function(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


class DistributedModule(nn.Module):
    """A module that runs on this rank's tile, as returned by `distribute`.

    It has the parameters and buffers of the original module, under the same names, and forwards `train()` and `eval()`.

    Attributes
    ----------
    optimizer : DistributedOptimizer or None
        The most recent DistributedOptimizer created for this module.
    """

    module: nn.Module
    optimizer: Any = None
    watched = False
    """Whether changes of this module's attributes cause a criterion that uses it to be captured again."""

    def __init__(
        self,
        module: nn.Module,
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[torch.dtype | None],
        grid: ProcessGrid,
        compiler: Callable[..., Any] | None = None,
        spatial: int | None = None,
        compile_if_faster: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        object.__setattr__(self, "module", module)  # not a submodule, so that parameter names stay unchanged
        # share the module's own dictionaries, so that names, hooks of optimisers and `to` behave as on the module
        self._parameters, self._buffers, self._modules = module._parameters, module._buffers, module._modules
        self.grid, self.step = grid, 0
        self._version_counters: tuple[int, ...] = ()
        self._deferred_gradients: dict[int, list[torch.Tensor] | None] = {}
        grid.check("distribute")
        module_number = grid.cached_objects[DistributedModule] = grid.cached_objects.get(DistributedModule, 0) + 1
        # the same on every rank, as all ranks distribute modules in the same order
        self._name = f"number {module_number} of this grid"
        self.backward_check = BackwardEntryCheck(grid, {"the model": self._name})
        with all_or_none(grid.world):
            check_module(module)
            self.execution = ExecutionOptions.from_arguments(module, **options)
            self.comm = MeshComm(grid, len(shapes[0]) - 2 if spatial is None else spatial)
            initial_compiler = None if compile_if_faster else compiler
            arguments = module, self.comm, self.execution, shapes, dtypes, initial_compiler, self._deferred_gradients
            self.programs = ProgramCache(*arguments)
            # on one rank; torch.compile would wrap a module in another module
            run_module: Callable[..., Any] = lambda *tiles: module(*tiles)  # noqa: E731
            self._run_original = run_module if initial_compiler is None else initial_compiler(run_module)
            self._criteria = CriterionCache(self.comm)
            self.tiling = self.programs.tiling
            digest = self.programs.current.digest
        self._call_uncompiled = torch.compiler.disable(
            _call_function, reason="it exchanges messages; pass compile=True to ndt.distribute instead"
        )
        self.comm.connect_devices(device_of(module))
        self._require_same_on_all_ranks(
            {"the module's steps": digest, "example_shape": self.programs.shapes, "compile='auto'": compile_if_faster}
        )
        if compile_if_faster and compiler is not None:
            self.programs.compile_if_faster(compiler)

    @_uncompiled
    def forward(self, *tiles: torch.Tensor, **named_tiles: torch.Tensor) -> Any:
        """Return this rank's tiles of the outputs, given its tiles of the inputs. Collective."""
        tiles = bind_inputs(self.module, tiles, named_tiles) if named_tiles else tiles
        check_not_traced(tiles)
        self.programs.set_shapes(self._global_shapes(tiles))
        if self.grid.size == 1:
            program = self.programs.current
            self._check_tiles(tiles, program, {})
            if program.runs_module:
                return self._run_module(tiles, program)
        error, compared_values = None, dict[str, Any]()
        version_changes: tuple[int, ...] = ()
        repartitioned_layouts = self._layouts_of_repartitioned_inputs(tiles)
        try:
            program = self.programs.program_for_autocast([getattr(tile, "dtype", torch.float32) for tile in tiles])
            parameters, buffers = self.programs.watch.named_parameters_and_buffers()
            self._check_tiles(tiles, program, repartitioned_layouts)
            check_parameter_shapes(program.runner.plan, parameters, buffers)
            if self.training:
                self.execution.check_not_recomputed()
            compared_values |= self._values_to_compare(tiles, program, parameters)
            compared_values |= {f"the layout of input {at}": layout for at, layout in repartitioned_layouts.items()}
            version_changes = version_counters([*parameters.values(), *buffers.values()])
            if len(self._version_counters) == len(version_changes):
                counters = zip(version_changes, self._version_counters, strict=True)
                version_changes = tuple(current - before for current, before in counters)
        except UserError as problem:
            error = problem
        if not self.grid.check("forward", compared_values, error, version_changes):
            self._require_same_on_all_ranks({})
        if self.training and self.step > 0 and self.step & (self.step - 1) == 0:  # a power of two
            check_weight_drift(self.grid.world, parameters, self.step)
        self.comm.phase = Phase(self.training, self.step)
        tiles = tuple(map(self.backward_check.alias_for_model, tiles))
        tiles = tuple(
            self.tiling.redistribute_input(tile, repartitioned_layouts[at], at) if at in repartitioned_layouts else tile
            for at, tile in enumerate(tiles)
        )
        outputs = list(map(self.backward_check.alias_of_output, program.runner(tiles, parameters, buffers)))
        self.programs.set_hook_weights(program)
        self.step += self.training
        if torch.is_grad_enabled():
            # torch.utils.checkpoint reruns a forward pass until it has all saved tensors: the last tensor must be saved
            # after all messages; otherwise some ranks could stop before a message that others still send
            torch.zeros((), requires_grad=True).exp()
        return self._record_layouts(pytree.tree_unflatten(outputs, program.output_tree), program.layouts_by_output)

    def _layouts_of_repartitioned_inputs(self, tiles: Sequence[Any]) -> dict[int, Layout]:
        """Return, by index, the layouts of inputs, such as outputs of other models, that must be redistributed."""
        if self.execution.tiles_may_have_margins or self.grid.size == 1:
            return {}
        indices = self.tiling.indices_of_ambiguous_inputs(tiles)
        if indices:
            self.grid.check("forward", {"the model": self._name, "the list of inputs not from a model": indices})
        return self.tiling.layouts_of_repartitioned_inputs(tiles, indices)

    def _run_module(self, tiles: Sequence[torch.Tensor], program: CompiledProgram) -> Any:
        """Run the module itself, on one rank; attributes that a forward pass changes do not cause a new capture."""
        with ContiguousNormGradients() if program.has_single_sample_norm and torch.is_grad_enabled() else nullcontext():
            outputs = self._run_original(*map(with_default_strides, tiles))  # channels-last may crash PyTorch 2.13
        self.programs.ignore_changes_by_forward(program)
        return self._record_layouts(outputs, program.layouts_by_output)

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
            Whether passes on this rank's tiles add their gradients to the returned lists, one per parameter.
        """
        gradients: dict[int, list[torch.Tensor]] = {id(parameter): [] for parameter in parameters}
        self._deferred_gradients.update(gradients if record else dict.fromkeys(gradients))
        return list(gradients.values())

    def set_export_context(self, create_context: Callable[[], AbstractContextManager[Any]]) -> None:
        """Export the module within the contexts that this callable returns."""
        self.programs.export_context = create_context

    def guard(self, seed: int = 0) -> None:
        """Check custom rules and border schemes in subsequent passes, which are slower but return the same results.

        A HaloError names a step that modifies its inputs or returns another shape or dtype than its rule declares, or
        a scheme that leaves cells of other tiles unfilled. Messages are delayed at random.
        """
        self.comm.guard(seed)
        self.programs.clear()
        self._criteria.clear()

    def train(self, mode: bool = True) -> DistributedModule:
        """Set the module to training mode, or to evaluation mode if `mode` is False."""
        self.module.train(mode)
        return self

    @property
    def training(self) -> bool:
        """Whether the module is in training mode, also if its own methods set the mode."""
        return self.module.training

    @training.setter
    def training(self, mode: bool) -> None:
        if hasattr(self, "module"):  # not in the constructor of nn.Module
            self.module.training = mode

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's state dict; arguments are passed to its own method, which may take fewer or more."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state dict, the same on every rank, into the module, as `state_dict`."""
        return self.module.load_state_dict(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise ConfigError: communicators can be neither copied nor pickled."""
        raise ConfigError(
            "a distributed module cannot be copied or pickled; save model.state_dict(), or distribute a copy of the"
            " original module: distribute(copy.deepcopy(model.module), ...)"
        )

    @property
    def plan(self) -> TorchPlan:
        """The compiled plan for the module's current state and input shapes."""
        return self.programs.current.runner.plan

    @property
    def is_compiled(self) -> bool:
        """Whether the computation between messages is compiled."""
        return self.programs.compiler is not None

    @property
    def output_shapes(self) -> list[tuple[int, ...]]:
        """Global shapes of the tensor outputs."""
        return [shape_of(layout) for layout in self.programs.current.output_layouts]

    @_uncompiled
    def scatter(self, image: torch.Tensor, index: int = 0) -> torch.Tensor:
        """Return this rank's tile of a whole input; with scheme `overlap_tile`, the tile includes its margin.

        Parameters
        ----------
        image : torch.Tensor (N, C, *spatial)
            The whole input, the same on every rank, with the number of channels in `example_shape`. The module is
            captured once for each new batch or image size.
        index : int
            Position of the input.
        """
        check_tensor("image", image)
        shapes = self.programs.shapes
        if index not in range(len(shapes)):
            raise ConfigError(f"index: {index!r}; expected the position of an input, 0 to {len(shapes) - 1}")
        self.programs.set_shapes((*shapes[:index], self._check_image(image, index), *shapes[index + 1 :]))
        if self.grid.size > 1:
            image_name = "the image passed to scatter" if len(shapes) == 1 else f"image {index} passed to scatter"
            self.grid.record_replicated_array(image_name, checksum_of(image))
        widened_ranges = self.programs.current.widened_ranges if self.execution.tiles_may_have_margins else ()
        ranges = widened_ranges[index] if widened_ranges else None
        return self.tiling.local_part(image, self.tiling.input_layouts[index], ranges)

    @_uncompiled
    def scatter_target(self, target: Any) -> Any:
        """Return this rank's part of a whole target, or of each target in a dict or list.

        Targets must be the same on every rank. A target with the spatial extents of an output, (N, *spatial) or
        (N, C, *spatial), is tiled like that output; targets (N,) or (N, C) are split only along the batch, over
        replicas.
        """
        # on one rank, targets are whole in every state of the module
        program = (self.programs.last if self.grid.size == 1 else None) or self.programs.current
        target_layouts = program.target_layouts

        def local_part_of_leaf(leaf: Any) -> torch.Tensor:
            shape = tuple(leaf.shape)
            if shape not in target_layouts:
                target_layouts[shape] = self.tiling.training_target_layout(shape, program.output_layouts)
            return self.tiling.local_part(leaf, target_layouts[shape])

        for tensor in pytree.tree_leaves(target):
            check_tensor("target", tensor)
            if self.grid.size > 1:
                self.grid.record_replicated_array("the target passed to scatter_target", checksum_of(tensor))
        return (
            local_part_of_leaf(target)
            if isinstance(target, torch.Tensor)
            else pytree.tree_map(local_part_of_leaf, target)
        )

    @_uncompiled
    def gather(self, tile: Any) -> Any:
        """Return whole tensors, given this rank's tiles of outputs, inputs or gradients, also in a tree. Collective."""
        leaves, tree = pytree.tree_flatten(tile)
        tiles = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        compared_values = {
            "the model": self._name,
            "the list of tensors not from the model": self.tiling.indices_without_layout(tiles),
        }
        dtypes = {f"the dtype of tensor {i}": leaf.dtype for i, leaf in enumerate(tiles)}
        self.grid.check("gather", compared_values | dtypes)
        layouts = iter(self.tiling.layouts_of(tiles, self._output_layouts))
        whole_leaves = [self.tiling.gather(t, next(layouts)) if isinstance(t, torch.Tensor) else t for t in leaves]
        return pytree.tree_unflatten(whole_leaves, tree)

    @_uncompiled
    def loss(self, criterion: Callable[..., torch.Tensor], output: Any, target: Any) -> torch.Tensor:
        """Return the loss of the whole images, the same on every rank. Collective.

        Parameters
        ----------
        criterion : callable
            Function or module of (output, target), such as torch.nn.CrossEntropyLoss(); a mean over cells or samples
            becomes the mean over the whole images. The criterion is captured like the module.
        output, target
            This rank's tiles, as returned by the model and `scatter_target`; or lists or dicts of tiles.
        """
        are_tensors = isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)
        if are_tensors and self.grid.size == 1 and self._criteria.can_call_directly(criterion, output, target):
            return criterion(output, target)
        leaves, spec = pytree.tree_flatten((output, target))
        num_outputs = sum(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(output))
        tensor_indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = [leaves[i] for i in tensor_indices]
        unknown_indices = self.tiling.indices_without_layout(tensors)
        if unknown_indices:  # all ranks must agree on the layouts of these tensors
            self.grid.check(
                "loss", {"the model": self._name, "the list of tensors not from the model": unknown_indices}
            )
        layouts = self.tiling.layouts_of(tensors, self._output_layouts, num_outputs)
        error, digest = None, ""
        try:
            runner, digest, closure_tensors = self._criteria.runner_for(
                criterion, leaves, tensor_indices, spec, layouts
            )
        except UserError as problem:
            error = problem
        if self.grid.size > 1 or error:
            name = getattr(criterion, "__qualname__", type(criterion).__name__)
            compared_values = {"the model": self._name, "the criterion": f"{name} ({digest})"}
            grad_flags = {"torch.is_grad_enabled()": torch.is_grad_enabled(), **requires_grad_flags("tensor", tensors)}
            self.grid.check("loss", compared_values | grad_flags, error)
        if self.grid.size == 1 and runner.plan.seed_id is None:
            loss = criterion(output, target)
            self._criteria.record_directly_callable(criterion, output, target)
            return loss
        # after tracing, which temporarily replaces the tensors of the criterion that virtual ranks share
        criterion_owner = criterion_module(criterion)
        parameters = {f"criterion.{name}": p for name, p in criterion_owner.named_parameters(remove_duplicate=False)}
        buffers = {f"criterion.{name}": b for name, b in criterion_owner.named_buffers(remove_duplicate=False)}
        tensors = [self.backward_check.alias_for_loss(tensor) for tensor in tensors]
        loss = runner(tensors, parameters | closure_tensors, buffers)[0]
        self.backward_check.check_backward_of_loss(loss)
        return loss

    def _check_image(self, image: torch.Tensor, index: int) -> tuple[int, ...]:
        """Return the shape of a whole input; raise ShapeError unless it has the axes and channels of the example."""
        shape = tuple(image.shape)
        if not self._matches_example(shape, index):
            raise ShapeError(
                f"expected a whole tensor of shape {self.programs.shapes[index]}, the same on every rank, or one with"
                f" another batch or image size, got {shape}"
            )
        return shape

    def _matches_example(self, shape: tuple[int, ...], index: int) -> bool:
        """Return whether an input has the axes of the example and, if it is an image, its channels."""
        example = self.programs.shapes[index]
        channels = slice(1, 2 if len(example) == self.comm.mesh.spatial_ndim + 2 else 1)
        return len(shape) == len(example) and shape[channels] == example[channels] and 0 not in shape

    def _global_shapes(self, tiles: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
        """Return the global shapes of inputs, given this rank's tiles; for unknown tiles, the previous shapes."""
        shapes = list(self.programs.shapes)
        for index, tile in enumerate(tiles[: len(shapes)]):
            shape = self.tiling.global_shape(tile)
            if shape is not None and self._matches_example(shape, index):
                shapes[index] = shape
        return tuple(shapes)

    def _output_layouts(self) -> list[Layout]:
        return self.programs.current.output_layouts

    def _check_tiles(
        self, tiles: Sequence[Any], program: CompiledProgram, repartitioned_layouts: Mapping[int, Layout]
    ) -> None:
        num_inputs = len(self.tiling.input_layouts)
        plan = program.runner.plan
        if len(tiles) != num_inputs:
            raise ShapeError(
                f"example_shape gives {counted(num_inputs, 'input')}, but the module got {len(tiles)}; pass a tile per"
                f" input, and {REMEDY_FOR_ARGUMENTS}"
            )
        inputs = zip(tiles, self.tiling.input_layouts, program.input_dtypes, strict=True)
        for at, (tile, layout, dtype) in enumerate(inputs):
            check_tensor(f"input {at}", tile)
            expected = plan.values[plan.inputs[at]].local
            if at not in repartitioned_layouts and tuple(tile.shape) != expected:
                raise ShapeError(
                    f"rank {self.grid.rank}: input {at} has shape {tuple(tile.shape)}, but this rank's tile of"
                    f" {shape_of(layout)} is {expected}; cut the image with model.scatter(image)"
                )
            if tile.dtype != dtype and not any(autocast_dtypes()):
                raise ShapeError(
                    f"rank {self.grid.rank}: input {at} has dtype {tile.dtype}, but the module takes {dtype}; convert"
                    " it with .to, or use distribute(..., dtype=...)"
                )

    def _values_to_compare(
        self, tiles: Sequence[torch.Tensor], program: CompiledProgram, parameters: Mapping[str, torch.Tensor]
    ) -> dict[str, Any]:
        """Return the values that determine the messages of a forward and backward pass."""
        trained_names = [name for name, p in parameters.items() if p.requires_grad]
        return {
            "the model": self._name,
            "the mode": "train()" if self.training else "eval()",
            "the captured program": program.digest,
            "torch.is_grad_enabled()": torch.is_grad_enabled(),
            "autocast": autocast_dtypes(),
            "the dtype of the inputs": [tile.dtype for tile in tiles],
            "the list of parameters that require gradients": trained_names,
        } | requires_grad_flags("input", tiles)

    def _require_same_on_all_ranks(self, compared_values: Mapping[str, Any]) -> None:
        """Raise ConfigError on all ranks unless all ranks have the same values and weights."""
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        buffers = dict(self.module.named_buffers(remove_duplicate=False))
        self._version_counters = version_counters([*parameters.values(), *buffers.values()])
        if self.grid.world.size == 1:
            return
        own_values = {name: str(value) for name, value in compared_values.items()}
        value_names = list(own_values)
        for name, tensor in (*parameters.items(), *buffers.items()):
            checksum = 0
            if tensor.numel() and not tensor.is_meta:  # meta tensors have no values yet
                checksum = zlib.crc32(as_bytes_tensor(tensor).cpu().numpy().data)
            own_values[name] = f"{tuple(tensor.shape)} {checksum}"
        all_values = self.grid.world.allgather(own_values)
        for rank, other in enumerate(all_values):
            differing_names = [name for name in (*all_values[0], *other) if all_values[0].get(name) != other.get(name)]
            if differing_names:
                differing_tensors = [name for name in differing_names if name not in value_names]
                detail = f"{differing_names[0]} differ{'s' * (differing_names[0][-1] != 's')}"
                if differing_tensors:
                    detail = f"its {differing_tensors[0]!r} differs"
                raise ConfigError(
                    f"rank {rank} has a different module from rank 0: {detail}; build the module from the same seed on"
                    " every rank, or load the same state_dict"
                ).mark_raised_on_all_ranks()
