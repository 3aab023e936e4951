"""Conversion between whole tensors and this rank's parts of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ...errors import ShapeError
from ..exchange.mesh_comm import MeshComm
from ..ir.layout import (
    Layout,
    NeededRanges,
    axes_of,
    default_layout,
    local_shape,
    ranges_at_place,
    replicated,
    shape_of,
)
from ..lowering.builder import PlanBuilder
from ..lowering.plan import TorchPlan
from ..lowering.steps import OperatorPosition
from .runner import Runner


def mark_with_layout(tensor: torch.Tensor, layout: Layout) -> None:
    """Attach the whole tensor's layout to a tile that no model has returned."""
    tensor.neondist_layout = layout  # type: ignore[attr-defined]


class Tiling:
    """Tiling of a module's inputs, outputs and targets.

    Parameters
    ----------
    comm : MeshComm
    shapes : sequence of tuple
        The global shapes of the inputs.

    Attributes
    ----------
    input_layouts : list of Layout
    """

    def __init__(self, comm: MeshComm, shapes: Iterable[Sequence[int]]) -> None:
        self.comm = comm
        self.set_input_shapes(shapes)
        # layouts of the tensors returned to the user, by id, while these tensors exist
        self._layouts_by_id: dict[int, tuple[weakref.ref[torch.Tensor], Layout]] = {}
        self._gather_runners: dict[tuple[Layout, torch.dtype], Runner] = {}

    def set_input_shapes(self, shapes: Iterable[Sequence[int]]) -> None:
        """Set the global shapes of the inputs of subsequent passes."""
        self.input_layouts = [default_layout(shape, self.comm.mesh) for shape in shapes]

    def global_shape(self, tile: Any) -> tuple[int, ...] | None:
        """Return the global shape of a tensor, given this rank's part, or None if it is unknown."""
        if not isinstance(tile, torch.Tensor):
            return None
        layout = self.layout_of(tile)
        if layout is None:
            return tuple(tile.shape) if self.comm.grid.size == 1 else None
        return shape_of(layout)

    def remember_layout(self, tensor: torch.Tensor, layout: Layout) -> None:
        """Remember the layout of a tensor while it exists."""
        key, layouts = id(tensor), self._layouts_by_id
        layouts[key] = weakref.ref(tensor, lambda _: layouts.pop(key, None)), layout

    def indices_without_layout(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Return the indices of tensors that neither the model nor `local_part` has returned."""
        return [at for at, tensor in enumerate(tensors) if self.layout_of(tensor) is None]

    def layout_of(self, tensor: torch.Tensor) -> Layout | None:
        """Return the layout of a tensor that the model or `scatter` has returned; None for other tensors."""
        reference, layout = self._layouts_by_id.get(id(tensor), (None, None))
        return layout if reference is not None and reference() is tensor else getattr(tensor, "neondist_layout", None)

    def local_part(self, whole: torch.Tensor, layout: Layout, ranges: NeededRanges | None = None) -> torch.Tensor:
        """Return this rank's part of a replicated tensor or, if `ranges` is given, the larger range along each axis."""
        if tuple(whole.shape) != shape_of(layout):
            raise ShapeError(
                f"expected a whole tensor of shape {shape_of(layout)}, the same on every rank, got {tuple(whole.shape)}"
            )
        if ranges:
            for dim, (lo, hi) in ranges_at_place(ranges, self.comm.place).items():
                whole = whole.narrow(dim, lo, hi - lo)
            return whole.clone(memory_format=torch.preserve_format)
        if not axes_of(layout):
            part = whole.clone(memory_format=torch.preserve_format)
        else:
            atoms = [atom for dim in layout for atom in dim]
            if len(atoms) != len(layout):
                whole = whole.reshape([atom.extent for atom in atoms])
            for dim, atom in enumerate(atoms):
                lo, hi = atom.range(self.comm.place)
                whole = whole.narrow(dim, lo, hi - lo)
            shape = local_shape(layout, self.comm.place)
            part = whole.clone(memory_format=torch.preserve_format).reshape(shape)
        self.remember_layout(part, layout)
        return part

    def training_target_layout(self, shape: tuple[int, ...], outputs: Sequence[Layout]) -> Layout:
        """Return the layout of an output with the target's spatial extents; if there is none, partition the batch."""
        mesh, layouts = self.comm.mesh, self._known_layouts(outputs)
        for layout in layouts:
            if shape == shape_of(layout):
                return layout
            if len(layout) == mesh.spatial + 2 and shape[-mesh.spatial :] == shape_of(layout[2:]):
                if shape[:1] == shape_of(layout[:1]) and len(shape) == len(layout):
                    return (layout[0], *replicated(shape[1:2]), *layout[2:])
                if shape[:1] == shape_of(layout[:1]) and len(shape) == len(layout) - 1:
                    return (layout[0], *layout[2:])
        batches = {shape_of(layout[:1]) for layout in layouts if layout}
        if shape and (len(shape) > mesh.spatial or shape[:1] not in batches):
            shapes = sorted({shape_of(layout) for layout in layouts if layout})
            raise ShapeError(
                f"a target of shape {shape} matches none of the outputs {', '.join(map(str, shapes))}; it must have"
                " the batch and spatial extents of one of them, or be (N,) or (N, C)"
            )
        return ((mesh.even_atom(shape[0], 0),), *replicated(shape[1:])) if shape else ()

    def layouts_of(
        self,
        tensors: Sequence[torch.Tensor],
        outputs: Callable[[], Sequence[Layout]],
        first_target: int | None = None,
    ) -> list[Layout]:
        """Return the layouts of tensors, given this rank's parts. Collective.

        Tensors derived by the user, such as y.squeeze(1), are recognised by their local shapes on all ranks.

        Parameters
        ----------
        tensors : sequence of torch.Tensor
            Parts of outputs, followed by parts of targets from the index `first_target` if given.
        outputs : callable
            Returns the layouts of the module's outputs.
        """
        layouts = [self.layout_of(tensor) for tensor in tensors]
        place, world = self.comm.place, self.comm.grid.world
        unknown = [at for at, layout in enumerate(layouts) if layout is None]
        known = self._known_layouts(outputs()) if unknown else []
        candidates = {
            at: self._candidates(tensors[at], known, first_target is not None and at >= first_target) for at in unknown
        }  # the same on all ranks
        fit = [
            [i for i, layout in enumerate(candidates[at]) if local_shape(layout, place) == tuple(tensors[at].shape)]
            for at in unknown
        ]
        every = world.allgather(fit) if unknown and world.size > 1 else [fit]
        for k, at in enumerate(unknown):
            common = set.intersection(*(set(other[k]) for other in every))
            if not common:
                raise ShapeError(
                    f"rank {self.comm.grid.rank}: no tensor of this model has a part of shape"
                    f" {tuple(tensors[at].shape)} on this rank; pass model.loss and model.gather only tensors"
                    " returned by the model, scatter or scatter_target"
                ).on_all_ranks()
            layouts[at] = candidates[at][min(common)]
        return [layout for layout in layouts if layout is not None]

    def _known_layouts(self, outputs: Sequence[Layout]) -> list[Layout]:
        return [*outputs, *self.input_layouts]  # a criterion may resize an output to the extents of the image

    def _candidates(self, tensor: torch.Tensor, layouts: Sequence[Layout], is_target: bool) -> list[Layout]:
        mesh = self.comm.mesh
        images = [layout for layout in layouts if len(layout) == mesh.spatial + 2]
        cells = [layout[:1] + layout[2:] for layout in images]
        channels = [(lay[0], *replicated(tensor.shape[1:2]), *lay[2:]) for lay in images if tensor.dim() == len(lay)]
        batch = [layout[:1] for layout in layouts]
        own = replicated(tensor.shape[1:])
        vectors = [(layout[0], *own) for layout in layouts if layout and 1 < tensor.dim() <= mesh.spatial]
        if is_target:
            return [*cells, *channels, *batch, *layouts, *vectors]
        return [*layouts, *channels, *cells, *batch, *vectors]

    def gather(self, tile: torch.Tensor, layout: Layout, differentiable: bool = False) -> torch.Tensor:
        """Gather a whole tensor from the ranks' parts. Collective.

        Gradients flow through the result only if `differentiable`.
        """
        if not axes_of(layout):
            return tile if differentiable else tile.detach().clone()
        key = layout, tile.dtype
        if key not in self._gather_runners:
            self._gather_runners[key] = self._plan_gather(*key)
        if differentiable:
            return self._gather_runners[key]([tile], {}, {})[0]
        with torch.no_grad():
            return self._gather_runners[key]([tile.detach()], {}, {})[0]

    def _plan_gather(self, layout: Layout, dtype: torch.dtype) -> Runner:
        mesh, rank = self.comm.mesh, self.comm.grid.rank
        builder = PlanBuilder(mesh, rank)
        builder.where = OperatorPosition("gather", "", "")
        value = builder.new_input(layout, dtype)
        whole_value = builder.gather(value)
        plan = TorchPlan(mesh, rank, builder.steps, builder.values, {}, {}, [value.id], [whole_value.id], {})
        return Runner(self.comm, plan)
