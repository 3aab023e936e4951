"""A PyTorch module whose images are cut into tiles, one per rank."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..comm import ProcessGrid
from ..errors import ConfigError, ShapeError
from .capture import captured, lowered
from .layout import Layout, axes_of, local_shape, shape_of, whole
from .plan import TorchPlan, Value
from .run import Runner
from .transport import world
from .wires import Wires


class DistributedModule(nn.Module):
    """What `distribute` returns: the module, on this rank's tile.

    Parameters, buffers and their names are the module's own, `train()` and `eval()` are passed on; see `distribute`.
    """

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        shapes: Sequence[tuple[tuple[int, ...], torch.dtype]],
        grid: ProcessGrid,
        gather_at: Sequence[str],
    ) -> None:
        super().__init__()
        object.__setattr__(self, "module", module)  # no part of this one: its names stay as they are
        # the module's own dictionaries: names, hooks of optimisers and `to` find what they would find there
        self._parameters, self._buffers, self._modules = module._parameters, module._buffers, module._modules
        self.training = module.training
        self.grid, self.shapes, self.gather_at = grid, list(shapes), tuple(gather_at)
        self.wires = Wires(grid, len(shapes[0][0]) - 2)
        self.layouts = [self._layout(shape) for shape, _ in shapes]
        self._runners: dict[Any, tuple[Runner, Any, list[Layout | None]]] = {}
        self._losses: dict[Any, tuple[Any, Runner]] = {}
        unknown = [path for path in gather_at if path not in dict(module.named_modules())]
        if unknown:
            raise ConfigError(f"gather_at: the module has no {unknown[0]!r}; its modules are those of named_modules()")
        self._runner()
        self._check_alike()

    # As the user knows it.

    def forward(self, *tiles: torch.Tensor) -> Any:
        """Return this rank's tiles of the outputs, given those of the inputs."""
        runner, tree, _ = self._runner()
        self._check_tiles(tiles)
        found = runner(tiles, dict(self.module.named_parameters(remove_duplicate=False)), self._named_buffers())
        return pytree.tree_unflatten(found, tree)

    def train(self, mode: bool = True) -> DistributedModule:
        """Set the module's mode."""
        self.module.train(mode)
        self.training = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's own."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load it into the module."""
        return self.module.load_state_dict(*args, **kwargs)

    @property
    def plan(self) -> TorchPlan:
        """What runs, in the mode that the module is in."""
        return self._runner()[0].plan

    @property
    def output_shapes(self) -> list[tuple[int, ...]]:
        """The global shapes of the outputs that are tensors."""
        return [shape_of(layout) for layout in self._runner()[2] if layout is not None]

    # Between images and tiles.

    def scatter(self, image: torch.Tensor, index: int = 0) -> torch.Tensor:
        """Return this rank's tile of a whole input, the same on every rank.

        Parameters
        ----------
        image : torch.Tensor (N, C, *spatial)
            As `example_shape` says.
        index : int
            Which of the inputs it is.
        """
        return self._part(image, self.layouts[index])

    def scatter_target(self, target: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole target, the same on every rank.

        A target that has the spatial extents of an output, (N, *spatial) or (N, C, *spatial), is cut as that is; of
        others only the batch is cut, over replicas.
        """
        return self._part(target, self._target_layout(tuple(target.shape)))

    def gather(self, tile: Any) -> Any:
        """Return the whole of this rank's tile of an output, or of an input or its gradient; collective."""
        return pytree.tree_map_only(torch.Tensor, self._gathered, tile)

    def loss(self, criterion: Callable[..., torch.Tensor], output: Any, target: Any) -> torch.Tensor:
        """Return the loss of the whole images, the same on every rank; collective.

        Parameters
        ----------
        criterion : callable
            Of (output, target): a module such as torch.nn.CrossEntropyLoss(), or a function; a mean over cells or
            samples becomes that of the whole images.
        output, target
            This rank's tiles, as the model and `scatter_target` give them.
        """
        tensors, layouts, spec = [], [], pytree.tree_structure((output, target))
        for at, tree in enumerate((output, target)):
            for tensor in pytree.tree_leaves(tree):
                tensors.append(tensor)
                layouts.append(self._layout_of(tensor, target=bool(at)))
        key = id(criterion), spec, tuple((layout, t.dtype) for layout, t in zip(layouts, tensors, strict=True))
        if key not in self._losses:
            self._losses[key] = criterion, self._loss_runner(criterion, spec, layouts, tensors)
        inner = self._losses[key][1]
        owner = criterion if isinstance(criterion, nn.Module) else nn.Module()
        named = {f"criterion.{name}": p for name, p in owner.named_parameters(remove_duplicate=False)}
        buffers = {f"criterion.{name}": b for name, b in owner.named_buffers(remove_duplicate=False)}
        return inner(tensors, named, buffers)[0]

    # Inner.

    def _loss_runner(self, criterion: Any, spec: Any, layouts: Sequence[Layout], tensors: Sequence[Any]) -> Runner:
        shapes = [(shape_of(layout), tensor.dtype) for layout, tensor in zip(layouts, tensors, strict=True)]
        program = captured(_Criterion(criterion, spec), shapes)
        plan, _ = lowered(program, self.wires.mesh, self.grid.rank, layouts)
        if any(axes_of(plan.values[out].layout) for out in plan.outputs if isinstance(out, int)):
            raise ConfigError("criterion: gives a number for each cell or sample; it has to return one number")
        return Runner(self.wires, plan)

    def _runner(self) -> tuple[Runner, Any, list[Layout | None]]:
        key = tuple(module.training for module in self.module.modules())
        if key not in self._runners:
            program = captured(self.module, self.shapes)
            plan, tree = lowered(
                program, self.wires.mesh, self.grid.rank, self.layouts, self.gather_at, self._image_layout
            )
            layouts = [plan.values[out].layout if isinstance(out, int) else None for out in plan.outputs]
            self._runners[key] = Runner(self.wires, plan), tree, layouts
        return self._runners[key]

    def _layout(self, shape: Sequence[int]) -> Layout:
        mesh = self.wires.mesh
        if len(shape) == mesh.spatial + 2:
            return mesh.image(shape)
        return ((mesh.atom(shape[0], 0),), *whole(shape[1:])) if shape else ()

    def _image_layout(self, value: Value) -> Layout | None:
        """Return how a value that was computed whole is cut again: as an image, where it is one."""
        return self._layout(value.shape) if len(value.shape) == self.wires.mesh.spatial + 2 else None

    def _check_tiles(self, tiles: Sequence[torch.Tensor]) -> None:
        if len(tiles) != len(self.layouts):
            raise ShapeError(f"the module takes {len(self.layouts)} inputs, got {len(tiles)}")
        for tile, layout in zip(tiles, self.layouts, strict=True):
            expected = local_shape(layout, self.wires.place)
            if tuple(tile.shape) != expected:
                raise ShapeError(
                    f"rank {self.grid.rank}: the tile has shape {tuple(tile.shape)}, but this rank's tile of"
                    f" {shape_of(layout)} is {expected}; cut the image with model.scatter(image)"
                )

    def _part(self, image: torch.Tensor, layout: Layout) -> torch.Tensor:
        if tuple(image.shape) != shape_of(layout):
            raise ShapeError(f"expected a whole tensor of shape {shape_of(layout)}, got {tuple(image.shape)}")
        atoms = [atom for dim in layout for atom in dim]
        if len(atoms) != len(layout):
            image = image.reshape([atom.extent for atom in atoms])
        for dim, atom in enumerate(atoms):
            lo, hi = atom.range(self.wires.place)
            image = image.narrow(dim, lo, hi - lo)
        return image.clone(memory_format=torch.preserve_format).reshape(local_shape(layout, self.wires.place))

    def _target_layout(self, shape: Sequence[int]) -> Layout:
        mesh = self.wires.mesh
        for layout in self._output_layouts():
            spatial, extents = layout[2:], shape_of(layout[2:])
            if len(layout) == mesh.spatial + 2 and tuple(shape[-mesh.spatial :]) == extents:
                if len(shape) == len(layout):
                    return (layout[0], *whole(shape[1:2]), *spatial)
                if len(shape) == len(layout) - 1:
                    return (layout[0], *spatial)
            if tuple(shape) == shape_of(layout):
                return layout
        return ((mesh.atom(shape[0], 0),), *whole(shape[1:])) if len(shape) else ()

    def _output_layouts(self) -> Iterator[Layout]:
        yield from (layout for layout in self._runner()[2] if layout is not None)
        yield from self.layouts

    def _layout_of(self, tensor: torch.Tensor, target: bool = False) -> Layout:
        """Return the layout of a tensor that has the shape of this rank's part."""
        place, mesh = self.wires.place, self.wires.mesh
        candidates = list(self._output_layouts())
        if target:
            images = [lay for lay in candidates if len(lay) == mesh.spatial + 2]
            candidates = (
                [lay[:1] + lay[2:] for lay in images]
                + [(lay[0], *whole(tensor.shape[1:2]), *lay[2:]) for lay in images if tensor.dim() == len(lay)]
                + [lay[:1] for lay in candidates]
                + candidates
            )
        for layout in candidates:
            if local_shape(layout, place) == tuple(tensor.shape):
                return layout
        raise ShapeError(
            f"rank {self.grid.rank}: no tensor of this model has a part of shape {tuple(tensor.shape)} on this rank;"
            " give model.loss and model.gather what the model, scatter or scatter_target returned"
        )

    def _gathered(self, tile: torch.Tensor, layout: Layout | None = None) -> torch.Tensor:
        layout = self._layout_of(tile) if layout is None else layout
        if not axes_of(layout):
            return tile.detach().clone()
        from .building import Builder, Where

        lowering = Builder(self.wires.mesh, self.grid.rank)
        lowering.where = Where("gather", "", "")
        value = lowering.input(layout, tile.dtype)
        found = lowering.gathered(value)
        plan = TorchPlan(
            self.wires.mesh, self.grid.rank, lowering.steps, lowering.values, {}, {}, {}, [value.id], [found.id], {}
        ).finish()
        with torch.no_grad():
            return Runner(self.wires, plan)([tile.detach()], {}, {})[0]

    def _named_buffers(self) -> dict[str, torch.Tensor]:
        return dict(self.module.named_buffers(remove_duplicate=False))

    def _check_alike(self) -> None:
        """Raise ConfigError on all ranks unless all have the same plan and the same weights."""
        world = self.grid.world
        if world.size == 1:
            return
        mine = {"": self.plan.digest}
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            data = tensor.detach().cpu().contiguous().view(-1)
            mine[name] = str(zlib.crc32(data.view(torch.uint8).numpy().tobytes() if data.numel() else b""))
        every = world.allgather(mine)
        for rank, other in enumerate(every):
            if other == every[0]:
                continue
            names = [name for name in (*every[0], *other) if every[0].get(name) != other.get(name)]
            what = f"its {names[-1]!r} differs" if names[-1] else "it would run other steps"
            raise ConfigError(
                f"rank {rank} has another module than rank 0: {what}; build it from the same seed on every rank, or"
                " load the same state_dict"
            )


class _Criterion(nn.Module):
    def __init__(self, criterion: Any, spec: Any) -> None:
        super().__init__()
        self.criterion, self.spec = criterion, spec

    def forward(self, *tensors: Any) -> Any:
        return self.criterion(*pytree.tree_unflatten(tensors, self.spec))


def distribute(
    module: nn.Module,
    example_shape: Sequence[int] | Sequence[Sequence[int]],
    grid: ProcessGrid | None = None,
    *,
    gather_at: Sequence[str] = (),
    dtype: torch.dtype | None = None,
    transport: str = "mpi",
) -> DistributedModule:
    """Return a PyTorch module whose images are cut into tiles, one per rank, with the numbers of one process.

    The module is captured with torch.export at the global shape, without memory for it; each operator becomes local
    work, a view of neighbours' cells, or a sum over ranks. Gradients of parameters arrive summed over all ranks, when
    `backward` has returned. Collective.

    Parameters
    ----------
    module : torch.nn.Module
        The same on every rank; it is neither copied nor changed.
    example_shape : sequence of int
        (N, C, *spatial), of the whole batch and the whole image. For a module of several inputs, a sequence of shapes;
        those of other rank than the first are cut along the batch alone.
    grid : ProcessGrid, optional
        Default: all ranks.
    gather_at : sequence of str
        Paths of modules that every rank computes whole, since an operator in them cannot be distributed.
    dtype : torch.dtype, optional
        Of the input; default: that of the module's first floating-point parameter.
    transport : 'mpi' or 'torch'
        Without a grid: what carries messages, mpi4py or torch.distributed (for `torchrun`).

    Returns
    -------
    DistributedModule
        Call it with `model.scatter(image)`.

    Raises
    ------
    UnsupportedOperator
        If an operator has no rule; names the operator, the module's path and the user's file and line.
    ConfigError
        If the module cannot be captured, or ranks have different ones.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"module: expected a torch.nn.Module, got {type(module).__name__}")
    if transport not in ("mpi", "torch"):
        raise ConfigError(f"transport: {transport!r}; choose 'mpi' or 'torch'")
    shapes = _shapes(example_shape)
    if grid is None:
        grid = ProcessGrid() if transport == "mpi" else ProcessGrid(world())
    if dtype is None:
        floating = (p.dtype for p in module.parameters() if p.dtype.is_floating_point)
        dtype = next(floating, torch.get_default_dtype())
    return DistributedModule(module, [(shape, dtype) for shape in shapes], grid, gather_at)


def _shapes(example_shape: Any) -> list[tuple[int, ...]]:
    """Return the shape of each input."""
    try:
        shapes = [example_shape] if all(isinstance(n, int) for n in example_shape) else list(example_shape)
        found = [tuple(int(n) for n in shape) for shape in shapes]
    except (TypeError, ValueError):
        found = []
    if not found or len(found[0]) not in (3, 4, 5) or any(n < 1 for n in found[0]):
        raise ConfigError(
            f"example_shape: {example_shape!r}; expected (N, C, *spatial), of one to three spatial axes and all > 0"
        )
    return found
