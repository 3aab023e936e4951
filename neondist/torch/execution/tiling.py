"""Conversion between whole tensors and this rank's parts of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ...errors import ConfigError, ShapeError
from ..exchange.mesh_comm import MeshComm
from ..ir.functionalize import storage_id
from ..ir.layout import (
    Layout,
    NeededRanges,
    axes_of,
    default_layout,
    local_indices,
    local_shape,
    ranges_at_place,
    replicated,
    shape_of,
)
from ..lowering.builder import PlanBuilder
from ..lowering.plan import TorchPlan
from ..lowering.steps import OperatorPosition
from .runner import PlanRunner


def mark_with_layout(tensor: torch.Tensor, layout: Layout) -> None:
    """Attach the whole tensor's layout to a tile that no model has returned."""
    tensor.neondist_layout = layout  # type: ignore[attr-defined]


def _is_alias(tensor: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Return whether a tensor has the same elements as another in the same memory, as the result of `detach` does."""
    return other is not None and _memory_of(tensor) == _memory_of(other)


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return storage_id(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


class Tiling:
    """Tiling of a module's inputs, outputs and targets."""

    def __init__(self, comm: MeshComm, shapes: Iterable[Sequence[int]]) -> None:
        self.comm = comm
        self.set_input_shapes(shapes)
        # layouts of the tensors that models of this grid have returned to the user: by id, while the tensor exists, and
        # by global shape
        self._layouts_by_id: dict[int, tuple[weakref.ref[torch.Tensor], Layout]]
        self._returned_layouts_by_shape: dict[tuple[int, ...], dict[Layout, None]]
        self._layouts_by_id, self._returned_layouts_by_shape = comm.grid.cached_objects.setdefault(
            (Tiling, comm.mesh), ({}, {})
        )
        self._runners: dict[tuple[Layout, Layout, torch.dtype], PlanRunner] = {}

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
        key = id(tensor)
        layouts = self._layouts_by_id
        layouts[key] = weakref.ref(tensor, lambda _: layouts.pop(key, None)), layout
        self._returned_layouts_by_shape.setdefault(shape_of(layout), {})[layout] = None

    def indices_without_layout(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Return the indices of tensors that neither the model nor `local_part` has returned."""
        return [at for at, tensor in enumerate(tensors) if self.layout_of(tensor) is None]

    def layout_of(self, tensor: torch.Tensor) -> Layout | None:
        """Return the layout of a tensor returned by a model, `scatter` or a loader, or of its detach(); else None."""
        reference, layout = self._layouts_by_id.get(id(tensor), (None, None))
        if reference is not None and reference() is tensor:
            return layout
        alias_layouts = (known for ref, known in tuple(self._layouts_by_id.values()) if _is_alias(tensor, ref()))
        attached_layout: Layout | None = getattr(tensor, "neondist_layout", None)
        parts = self.comm.mesh.parts
        if any(a.axis is not None and len(a.ranges) != parts[a.axis] for atoms in attached_layout or () for a in atoms):
            raise ConfigError(
                "a tile was read for a grid other than the model's; pass grid=model.grid to the loader, and the model's"
                " `spatial`"
            )
        return attached_layout or next(alias_layouts, None)

    def indices_of_ambiguous_inputs(self, tiles: Sequence[Any]) -> list[int]:
        """Return the indices of inputs whose layout is unknown and might not be the one that the module expects."""
        return [
            at
            for at, (tile, layout) in enumerate(zip(tiles, self.input_layouts, strict=False))
            if isinstance(tile, torch.Tensor)
            and self._returned_layouts_by_shape.get(shape_of(layout), {}).keys() - {layout}
            and self.layout_of(tile) is None
        ]

    def layouts_of_repartitioned_inputs(
        self, tiles: Sequence[Any], ambiguous_indices: Sequence[int]
    ) -> dict[int, Layout]:
        """Return, by index, the layouts of tiles that are not partitioned as the module's inputs.

        Collective if there are ambiguous inputs, which are recognised by their local shapes on all ranks.
        """
        expected_layouts = dict(enumerate(self.input_layouts[: len(tiles)]))
        candidates = {
            at: [expected_layouts[at], *self._returned_layouts_by_shape[shape_of(expected_layouts[at])]]
            for at in ambiguous_indices
        }
        layouts = {at: self.layout_of(tiles[at]) for at in expected_layouts if isinstance(tiles[at], torch.Tensor)}
        layouts |= {at: matching[0] for at, matching in self._layouts_by_shape(tiles, candidates).items() if matching}
        return {
            at: layout
            for at, layout in layouts.items()
            if layout not in (None, expected_layouts[at]) and shape_of(layout) == shape_of(expected_layouts[at])
        }

    def redistribute_input(self, tile: torch.Tensor, layout: Layout, index: int) -> torch.Tensor:
        """Return this rank's part of an input, given its part in another layout. Differentiable and collective."""
        return self._redistribution_runner(layout, self.input_layouts[index], tile.dtype)([tile], {}, {})[0]

    def local_part(self, whole: torch.Tensor, layout: Layout, ranges: NeededRanges | None = None) -> torch.Tensor:
        """Return this rank's part of a replicated tensor; if `ranges` is not empty, the part in these ranges."""
        if tuple(whole.shape) != shape_of(layout):
            raise ShapeError(
                f"expected a whole tensor of shape {shape_of(layout)}, the same on every rank, got {tuple(whole.shape)}"
            )
        if ranges:
            for dim, (lo, hi) in ranges_at_place(ranges, self.comm.place).items():
                whole = whole.narrow(dim, lo, hi - lo)
            return whole.clone(memory_format=torch.preserve_format)
        atoms = [atom for dim in layout for atom in dim]
        if len(atoms) != len(layout):
            whole = whole.reshape([atom.extent for atom in atoms])
        for dim, atom in enumerate(atoms):
            lo, hi = atom.range(self.comm.place)
            whole = whole.narrow(dim, lo, hi - lo)
        part = whole.clone(memory_format=torch.preserve_format).reshape(local_shape(layout, self.comm.place))
        self.remember_layout(part, layout)
        return part

    def training_target_layout(self, shape: tuple[int, ...], outputs: Sequence[Layout]) -> Layout:
        """Return a target's layout: that of an output with the same spatial extents, or one that splits the batch."""
        mesh = self.comm.mesh
        layouts = self._output_and_input_layouts(outputs)
        for layout in layouts:
            if shape == shape_of(layout):
                return layout
            if len(layout) == mesh.spatial_ndim + 2 and shape[-mesh.spatial_ndim :] == shape_of(layout[2:]):
                if shape[:1] == shape_of(layout[:1]) and len(shape) == len(layout):
                    return (layout[0], *replicated(shape[1:2]), *layout[2:])
                if shape[:1] == shape_of(layout[:1]) and len(shape) == len(layout) - 1:
                    return (layout[0], *layout[2:])
        batch_shapes = {shape_of(layout[:1]) for layout in layouts if layout}
        if shape and (len(shape) > max(2, mesh.spatial_ndim) or shape[:1] not in batch_shapes):
            shapes = sorted({shape_of(layout) for layout in layouts if layout})
            raise ShapeError(
                f"a target of shape {shape} matches none of the outputs {', '.join(map(str, shapes))}; it must have"
                " the batch and spatial extents of one of them, or be (N,) or (N, C); for a batch or image of another"
                " size, call model.scatter(image) first"
            )
        return ((mesh.even_atom(shape[0], 0),), *replicated(shape[1:])) if shape else ()

    def layouts_of(
        self, tensors: Sequence[torch.Tensor], outputs: Callable[[], Sequence[Layout]], num_outputs: int | None = None
    ) -> list[Layout]:
        """Return the layouts of tensors, given this rank's parts. Collective.

        Tensors derived by the user, such as y.squeeze(1), are recognised by their local shapes on all ranks.

        Parameters
        ----------
        tensors : sequence of torch.Tensor
            Parts of outputs, followed by parts of targets.
        outputs : callable
            Returns the layouts of the module's outputs.
        num_outputs : int, optional
            Number of parts of outputs; default: all tensors.
        """
        layouts = [self.layout_of(tensor) for tensor in tensors]
        unknown_indices = [at for at, layout in enumerate(layouts) if layout is None]
        known_layouts = self._output_and_input_layouts(outputs()) if unknown_indices else []
        num_outputs = len(tensors) if num_outputs is None else num_outputs
        candidates = {
            at: self._candidate_layouts(tensors[at], known_layouts, at >= num_outputs) for at in unknown_indices
        }  # the same on all ranks
        for at, matching in self._layouts_by_shape(tensors, candidates).items():
            if not matching:
                raise ShapeError(
                    f"rank {self.comm.grid.rank}: no tensor of this model has a part of shape"
                    f" {tuple(tensors[at].shape)} on this rank; pass model.loss and model.gather only tensors"
                    " returned by the model, scatter or scatter_target"
                ).mark_raised_on_all_ranks()
            layouts[at] = matching[0]
        return [layout for layout in layouts if layout is not None]

    def _layouts_by_shape(
        self, tensors: Sequence[torch.Tensor], candidates: Mapping[int, Sequence[Layout]]
    ) -> dict[int, list[Layout]]:
        """Return, for some of the tensors, the candidates that have the tensor's shape on all ranks. Collective."""
        place = self.comm.place
        world = self.comm.grid.world
        own_matches = {
            at: [i for i, layout in enumerate(layouts) if local_shape(layout, place) == tuple(tensors[at].shape)]
            for at, layouts in candidates.items()
        }
        all_matches = world.allgather(own_matches) if own_matches and world.size > 1 else [own_matches]
        matching_layouts = {
            at: [c[i] for i in own_matches[at] if all(i in other[at] for other in all_matches)]
            for at, c in candidates.items()
        }
        for at, layouts in matching_layouts.items():
            if not all(self._has_same_parts(layout, layouts[0]) for layout in layouts):
                raise ShapeError(
                    f"rank {self.comm.grid.rank}: a tensor of shape {tuple(tensors[at].shape)} was computed from"
                    " tensors partitioned in different ways; compute it in the module or in the criterion"
                ).mark_raised_on_all_ranks()
        return matching_layouts

    def _has_same_parts(self, layout: Layout, other: Layout) -> bool:
        """Return whether two layouts have different global shapes, or give every rank the same indices."""
        places = map(self.comm.mesh.place, range(self.comm.mesh.size))
        return (
            layout == other
            or shape_of(layout) != shape_of(other)
            or all(
                local_indices(dim, place) == local_indices(dim_of_other, place)
                for place in places
                for dim, dim_of_other in zip(layout, other, strict=True)
            )
        )

    def _output_and_input_layouts(self, outputs: Sequence[Layout]) -> list[Layout]:
        return [*outputs, *self.input_layouts]  # a criterion may resize an output to the extents of the image

    def _candidate_layouts(self, tensor: torch.Tensor, layouts: Sequence[Layout], is_target: bool) -> list[Layout]:
        mesh = self.comm.mesh
        image_layouts = [layout for layout in layouts if len(layout) == mesh.spatial_ndim + 2]
        per_cell_layouts = [layout[:1] + layout[2:] for layout in image_layouts]
        channel_dim = replicated(tensor.shape[1:2])
        channel_layouts = [(lay[0], *channel_dim, *lay[2:]) for lay in image_layouts if tensor.dim() == len(lay)]
        batch_layouts = [layout[:1] for layout in layouts]
        feature_dims = replicated(tensor.shape[1:])
        vector_layouts = [(lay[0], *feature_dims) for lay in layouts if lay and 1 < tensor.dim() <= mesh.spatial_ndim]
        if is_target:
            return [*per_cell_layouts, *channel_layouts, *batch_layouts, *layouts, *vector_layouts]
        return [*layouts, *channel_layouts, *per_cell_layouts, *batch_layouts, *vector_layouts]

    def gather(self, tile: torch.Tensor, layout: Layout, differentiable: bool = False) -> torch.Tensor:
        """Gather a whole tensor from the ranks' parts. Collective.

        Gradients flow through the result only if `differentiable`.
        """
        if not axes_of(layout):
            return tile if differentiable else tile.detach().clone()
        runner = self._redistribution_runner(layout, replicated(shape_of(layout)), tile.dtype)
        if differentiable:
            return runner([tile], {}, {})[0]
        with torch.no_grad():
            return runner([tile.detach()], {}, {})[0]

    def _redistribution_runner(self, layout: Layout, target_layout: Layout, dtype: torch.dtype) -> PlanRunner:
        """Return the runner that converts tensors from a layout to another."""
        key = layout, target_layout, dtype
        if key not in self._runners:
            mesh, rank = self.comm.mesh, self.comm.grid.rank
            builder = PlanBuilder(mesh, rank)
            builder.where = OperatorPosition("redistribute" if axes_of(target_layout) else "gather", "", "")
            value = builder.new_input(layout, dtype)
            result = builder.partition_as(value, target_layout) if axes_of(target_layout) else builder.gather(value)
            plan = TorchPlan(mesh, rank, builder.steps, builder.values, {}, {}, [value.id], [result.id], {})
            self._runners[key] = PlanRunner(self.comm, plan)
        return self._runners[key]
