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

from ..comm import ProcessGrid
from ..comm.agree import all_or_none
from ..errors import ConfigError, ShapeError, UserError
from ..halo import Phase
from .capture import captured, device_of
from .checks import BackwardCheck, check_module, check_parameters, check_tensor, checksum_of, gradients_of
from .consistency import bits_of, check_drift, digest_of, versions
from .criteria import Criteria, owner_of
from .execution import Execution
from .graph import autocast
from .layout import Layout, shape_of
from .mesh_comm import MeshComm
from .norm_gradients import RightNorms, has_norm_of_one
from .plan import TorchPlan
from .run import Runner
from .tiling import Tiling
from .tracing import ordinary_tensors
from .transfer import Wanted
from .watch import Watch

REMEMBERED = 64
"""So many states of a module are remembered."""


@dataclass(eq=False)
class _Prepared:
    """Compiled program for one state of a module.

    Attributes
    ----------
    changes : bool
        Whether a forward of the module may change attributes of its own.
    targets : dict of shape to Layout
        How targets of these shapes are cut.
    overlaps : sequence of Wanted
        What ranks are given of inputs, where that is more than their tiles.
    norm_of_one : bool
        Whether a norm is of one sample, whose gradients need care.
    """

    runner: Runner
    tree: Any
    layouts: list[Layout | None]
    digest: str
    in_parts: bool
    dtypes: list[torch.dtype]
    overlaps: Sequence[Wanted]
    norm_of_one: bool
    changes: bool = True
    targets: dict[tuple[int, ...], Layout] = field(default_factory=dict)


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
    """Whether a change of its attributes is a change of a criterion that uses it."""

    def __init__(
        self,
        module: nn.Module,
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[torch.dtype | None],
        grid: ProcessGrid,
        compiler: Callable[..., Any] | None = None,
        spatial: int | None = None,
        **how: Any,
    ) -> None:
        super().__init__()
        object.__setattr__(self, "module", module)  # no part of this one: its names stay as they are
        # the module's own dictionaries: names, hooks of optimisers and `to` find what they would find there
        self._parameters, self._buffers, self._modules = module._parameters, module._buffers, module._modules
        self.training = module.training
        self.grid, self._compiler = grid, compiler
        self._captured_within: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._shapes, self._dtypes = tuple(shapes), list(dtypes)
        self._runners: dict[Any, _Prepared] = {}
        self._current: tuple[Any, _Prepared] | None = None
        self.step = 0
        self._versions: tuple[int, ...] = ()
        self._deferred: dict[int, list[torch.Tensor] | None] = {}
        grid.check("distribute")
        number = grid.kept[DistributedModule] = grid.kept.get(DistributedModule, 0) + 1
        self._name = f"number {number} of those on this grid"  # all ranks distribute them in one order
        self.backward_check = BackwardCheck(grid, {"the model": self._name})
        with all_or_none(grid.world):
            check_module(module)
            self._watch = Watch(module)
            self.execution = Execution.of(module, **how)
            self.wires = MeshComm(grid, len(shapes[0]) - 2 if spatial is None else spatial)
            self.tiling, self._criteria = Tiling(self.wires, self._shapes), Criteria(self.wires)
            self._runner()
        self.wires.connect(device_of(module))
        self._check_weights({"the module's steps": self._runner().digest, "example_shape": self._shapes})

    # As the user knows it.

    def forward(self, *tiles: torch.Tensor) -> Any:
        """Return this rank's tiles of the outputs, given those of the inputs; collective."""
        self._resize(self._shapes_of(tiles))
        if self.grid.size == 1:
            state, prepared = self._prepared()
            self._check_tiles(tiles, prepared)
            # random numbers are keyed by the plan, the same for every grid
            if prepared.runner.plan.key is None and not prepared.in_parts:
                return self._alone(tiles, state, prepared)
        error, facts = None, dict[str, Any]()
        moved: tuple[int, ...] = ()
        try:
            prepared = self._runner()
            parameters, buffers = self._watch.tensors()
            self._check_tiles(tiles, prepared)
            check_parameters(prepared.runner.plan, parameters, buffers)
            facts |= self._facts(tiles, prepared, parameters)
            moved = versions([*parameters.values(), *buffers.values()])
            if len(self._versions) == len(moved):
                moved = tuple(now - before for now, before in zip(moved, self._versions, strict=True))
        except UserError as problem:
            error = problem
        if not self.grid.check("forward", facts, error, moved):
            self._check_weights({})
        if self.training and self.step > 0 and self.step & (self.step - 1) == 0:  # a power of two
            check_drift(self.grid.world, parameters, self.step)
        self.wires.phase = Phase(self.training, self.step)
        found = prepared.runner(tiles, parameters, buffers)
        self.step += self.training
        if torch.is_grad_enabled():
            # torch.utils.checkpoint runs a forward again until it has found all tensors that were kept: the last of
            # them has to come after all messages, or ranks could stop before different ones
            torch.zeros((), requires_grad=True).exp()
        return self._noted(pytree.tree_unflatten(found, prepared.tree), prepared.layouts)

    def _alone(self, tiles: Sequence[torch.Tensor], state: Any, prepared: _Prepared) -> Any:
        """Return what the module itself gives; what it changes of its own in a forward is no change of its steps."""
        with RightNorms() if prepared.norm_of_one and torch.is_grad_enabled() else nullcontext():
            outputs = self.module(*(tile.contiguous() for tile in tiles))  # channels-last may crash PyTorch 2.13
        if prepared.changes:
            if self._watch.key() != state:
                self._runners[self._shapes, self._watch.settled(state)] = prepared
            prepared.changes = self._watch.key() != state
        return self._noted(outputs, prepared.layouts)

    def _noted(self, outputs: Any, layouts: Sequence[Layout | None]) -> Any:
        """Return the outputs, and take note of how they are cut."""
        leaves = [outputs] if isinstance(outputs, torch.Tensor) else pytree.tree_leaves(outputs)
        for tensor, layout in zip(leaves, layouts, strict=True):
            if layout is not None:
                self.tiling.note(tensor, layout)
                self.backward_check.watch_output(tensor, self.tiling.noted)
        return outputs

    def defer_gradients(self, parameters: Iterable[nn.Parameter], noted: bool = False) -> list[list[torch.Tensor]]:
        """Leave the gradients of these parameters to a synchroniser, which reduces them over the ranks.

        Parameters
        ----------
        noted : bool
            Whether passes on this rank's tiles record their gradient contributions in the returned lists.
        """
        found: dict[int, list[torch.Tensor]] = {id(parameter): [] for parameter in parameters}
        self._deferred.update(found if noted else dict.fromkeys(found))
        return list(found.values())

    def capture_within(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        """Capture the module within the contexts that this callable returns."""
        self._captured_within = context

    def guard(self, seed: int = 0) -> None:
        """Check custom rules and border schemes in subsequent passes; slow, with identical results.

        A step that modifies its inputs or returns another part of its results than its rule declares, or a scheme that
        leaves cells of other tiles unfilled, raises a HaloError that names it. Messages are delayed at random.
        """
        self.wires.guard(seed)
        self._runners.clear()
        self._current = None
        self._criteria.clear()

    def train(self, mode: bool = True) -> DistributedModule:
        """Set the module's mode."""
        self.module.train(mode)
        self.training = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's state dict."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state dict, the same on every rank, into the module."""
        return self.module.load_state_dict(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled: the ranks' communicators are no part of a copy."""
        raise ConfigError(
            "a distributed module cannot be copied or pickled; save model.state_dict(), and copy the module that it"
            " was made from: distribute(copy.deepcopy(model.module), ...)"
        )

    @property
    def plan(self) -> TorchPlan:
        """The compiled plan for the module's current mode."""
        return self._runner().runner.plan

    @property
    def output_shapes(self) -> list[tuple[int, ...]]:
        """Global shapes of the tensor outputs."""
        return [shape_of(layout) for layout in self._outputs()]

    # Between images and tiles.

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
        self._resize((*self._shapes[:index], self._checked(image, index), *self._shapes[index + 1 :]))
        if self.grid.size > 1:
            what = "the image passed to scatter" if len(self._shapes) == 1 else f"image {index} passed to scatter"
            self.grid.note_whole(what, checksum_of(image))
        overlaps = self._runner().overlaps if self.execution.reads_wide else ()
        return self.tiling.part(image, self.tiling.inputs[index], overlaps[index] if overlaps else None)

    def scatter_target(self, target: Any) -> Any:
        """Return this rank's part of a whole target, the same on every rank; of each item of a dict or list.

        A target with the spatial extents of an output, (N, *spatial) or (N, C, *spatial), is tiled like that output;
        others, (N,) or (N, C), are split only along the batch, over replicas.
        """
        # on one rank all of them, in whatever state the module is
        current = self._current if self.grid.size == 1 else None
        targets = (self._runner() if current is None else current[1]).targets

        def part(each: Any) -> torch.Tensor:
            shape = tuple(each.shape)
            if shape not in targets:
                targets[shape] = self.tiling.target(shape, self._outputs())
            return self.tiling.part(each, targets[shape])

        for tensor in pytree.tree_leaves(target):
            check_tensor("target", tensor)
            if self.grid.size > 1:
                self.grid.note_whole("the target passed to scatter_target", checksum_of(tensor))
        return part(target) if isinstance(target, torch.Tensor) else pytree.tree_map(part, target)

    def gather(self, tile: Any) -> Any:
        """Return the whole tensor, given this rank's tile of an output, an input or its gradient; collective."""
        tensors, tree = pytree.tree_flatten(tile)
        tiles = [each for each in tensors if isinstance(each, torch.Tensor)]
        facts = {"the model": self._name, "tensors that the model did not return": self.tiling.unknown(tiles)}
        self.grid.check("gather", facts | {f"the dtype of tensor {at}": each.dtype for at, each in enumerate(tiles)})
        layouts = self.tiling.layouts_of(tiles, self._outputs)
        waiting = iter(layouts)
        found = [self.tiling.gathered(t, next(waiting)) if isinstance(t, torch.Tensor) else t for t in tensors]
        return pytree.tree_unflatten(found, tree)

    def loss(self, criterion: Callable[..., torch.Tensor], output: Any, target: Any) -> torch.Tensor:
        """Return the loss of the whole images, the same on every rank; collective.

        Parameters
        ----------
        criterion : callable
            Function or module of (output, target), such as torch.nn.CrossEntropyLoss(); a mean over cells or samples
            becomes the mean over the whole images. Each criterion is captured once, like the module.
        output, target
            This rank's tiles, as returned by the model and `scatter_target`; or lists or dicts of them.
        """
        two = isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)
        if two and self.grid.size == 1 and self._criteria.is_plain(criterion, output, target):
            return criterion(output, target)
        leaves, spec = pytree.tree_flatten((output, target))
        outputs = sum(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(output))
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = [leaves[i] for i in at]
        unknown = self.tiling.unknown(tensors)
        if unknown:  # of which all ranks say how they are cut
            self.grid.check("loss", {"the model": self._name, "tensors that the model did not return": unknown})
        layouts = self.tiling.layouts_of(tensors, self._outputs, outputs)
        error, digest = None, ""
        try:
            inner, digest, closed = self._criteria.runner(criterion, leaves, at, spec, layouts)
        except UserError as problem:
            error = problem
        if self.grid.size > 1 or error:
            name = getattr(criterion, "__qualname__", type(criterion).__name__)
            facts = {"the model": self._name, "the criterion": f"{name} ({digest})"}
            gradients = {"torch.is_grad_enabled()": torch.is_grad_enabled(), **gradients_of("tensor", tensors)}
            self.grid.check("loss", facts | gradients, error)
        if self.grid.size == 1 and inner.plan.key is None:
            loss = criterion(output, target)
            self._criteria.note_plain(criterion, output, target)
            return loss
        # not before: virtual ranks share the criterion, whose tensors are others while PyTorch traces it
        owner = owner_of(criterion)
        named = {f"criterion.{name}": p for name, p in owner.named_parameters(remove_duplicate=False)}
        buffers = {f"criterion.{name}": b for name, b in owner.named_buffers(remove_duplicate=False)}
        loss = inner([self.backward_check.from_loss(tensor) for tensor in tensors], named | closed, buffers)[0]
        self.backward_check.watch_loss(loss)
        return loss

    # Inner.

    def _checked(self, image: torch.Tensor, index: int) -> tuple[int, ...]:
        """Return the shape of a whole input; ShapeError unless it has the axes and channels of the example."""
        shape = tuple(image.shape)
        if not self._like_example(shape, index):
            raise ShapeError(
                f"expected a whole tensor of shape {self._shapes[index]}, the same on every rank, or one with"
                f" another batch or image size, got {shape}"
            )
        return shape

    def _like_example(self, shape: tuple[int, ...], index: int) -> bool:
        """Return whether an input has the axes and channels of the example."""
        expected, channels = self._shapes[index], slice(1, 2 if self.wires.mesh.spatial else 1)
        return len(shape) == len(expected) and shape[channels] == expected[channels] and 0 not in shape

    def _shapes_of(self, tiles: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
        """Return the global shapes of inputs, given this rank's tiles: the last ones, where a tile's is not known."""
        found = list(self._shapes)
        for at, tile in enumerate(tiles[: len(found)]):
            shape = self.tiling.whole_shape(tile)
            if shape is not None and self._like_example(shape, at):
                found[at] = shape
        return tuple(found)

    def _resize(self, shapes: tuple[tuple[int, ...], ...]) -> None:
        """Go on with inputs of these global shapes."""
        if shapes != self._shapes:
            self._shapes, self._current = shapes, None
            self.tiling.resize(shapes)

    def _runner(self) -> _Prepared:
        return self._prepared()[1]

    def _prepared(self) -> tuple[Any, _Prepared]:
        """Return the state that the module is in, and what runs in it."""
        with self._captured_within(), ordinary_tensors():
            return self._prepared_as_made()

    def _prepared_as_made(self) -> tuple[Any, _Prepared]:
        before = self._watch.key()
        if self._current is not None and before == self._current[0]:  # spares a small step its hash
            return self._current
        if (self._shapes, before) not in self._runners:
            dtypes = self._input_dtypes()
            program = captured(self.module, list(zip(self._shapes, dtypes, strict=True)))
            where = self.wires.mesh, self.grid.rank, self.tiling.inputs
            plan, tree, lowering = self.execution.lowered(program, *where, self.module)
            layouts = [plan.values[out].layout if isinstance(out, int) else None for out in plan.outputs]
            digest = digest_of(plan, program)
            if self._compiler is not None:
                plan.compile(self._compiler)
            in_parts = lowering is not None and lowering.in_parts
            overlaps = lowering.overlaps if lowering is not None else ()
            runner, one = Runner(self.wires, plan, self._deferred), has_norm_of_one(plan)
            prepared = _Prepared(runner, tree, layouts, digest, in_parts, dtypes, overlaps, one)
            before = self._watch.settled(before, program.reads)
            if len(self._runners) >= REMEMBERED:
                del self._runners[next(iter(self._runners))]
            self._runners[self._shapes, before] = prepared
        self._current = before, self._runners[self._shapes, before]
        return self._current

    def _outputs(self) -> list[Layout]:
        return [layout for layout in self._runner().layouts if layout is not None]

    def _input_dtypes(self) -> list[torch.dtype]:
        floating = (p.dtype for p in self.module.parameters() if p.dtype.is_floating_point)
        default = next(floating, torch.get_default_dtype())
        return [default if dtype is None else dtype for dtype in self._dtypes]

    def _check_tiles(self, tiles: Sequence[Any], prepared: _Prepared) -> None:
        number, plan = len(self.tiling.inputs), prepared.runner.plan
        if len(tiles) != number:
            raise ShapeError(
                f"the module takes {number} input{'s'[: number != 1]}, as example_shape says, got {len(tiles)}"
            )
        for at, (tile, layout, dtype) in enumerate(zip(tiles, self.tiling.inputs, prepared.dtypes, strict=True)):
            check_tensor(f"input {at}", tile)
            expected = plan.values[plan.inputs[at]].local
            if tuple(tile.shape) != expected:
                raise ShapeError(
                    f"rank {self.grid.rank}: input {at} has shape {tuple(tile.shape)}, but this rank's tile of"
                    f" {shape_of(layout)} is {expected}; cut the image with model.scatter(image)"
                )
            if tile.dtype != dtype and not any(autocast()):
                raise ShapeError(
                    f"rank {self.grid.rank}: input {at} has dtype {tile.dtype}, but the module takes {dtype}; convert"
                    " it with .to, or use distribute(..., dtype=...)"
                )

    def _facts(
        self, tiles: Sequence[torch.Tensor], prepared: _Prepared, parameters: Mapping[str, torch.Tensor]
    ) -> dict[str, Any]:
        """Return on what it depends which messages there are, forward and backward."""
        trained = [name for name, p in parameters.items() if p.requires_grad]
        return {
            "the model": self._name,
            "the mode": "train()" if self.training else "eval()",
            "what the module computes": prepared.digest,
            "torch.is_grad_enabled()": torch.is_grad_enabled(),
            "autocast": autocast(),
            "the dtype of the inputs": [tile.dtype for tile in tiles],
            "the list of parameters that require gradients": trained,
        } | gradients_of("input", tiles)

    def _check_weights(self, facts: Mapping[str, Any]) -> None:
        """Raise ConfigError on all ranks unless all say the same facts and have the same weights."""
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        buffers = dict(self.module.named_buffers(remove_duplicate=False))
        self._versions = versions([*parameters.values(), *buffers.values()])
        if self.grid.world.size == 1:
            return
        mine = {name: str(value) for name, value in facts.items()}
        names = list(mine)
        for name, tensor in (*parameters.items(), *buffers.items()):
            checksum = 0
            if tensor.numel() and not tensor.is_meta:  # where there are no values yet
                checksum = zlib.crc32(bits_of(tensor).cpu().numpy().data)
            mine[name] = f"{tuple(tensor.shape)} {checksum}"
        every = self.grid.world.allgather(mine)
        for rank, other in enumerate(every):
            differ = [name for name in (*every[0], *other) if every[0].get(name) != other.get(name)]
            if differ:
                others = [name for name in differ if name not in names]
                what = f"its {others[0]!r} differs" if others else f"{differ[0]} differ{'s' * (differ[0][-1] != 's')}"
                raise ConfigError(
                    f"rank {rank} has a different module from rank 0: {what}; build it from the same seed on every"
                    " rank,"
                    " or load the same state_dict"
                ).on_all_ranks()
