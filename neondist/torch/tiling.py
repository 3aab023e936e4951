"""Between whole tensors and this rank's parts of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..errors import ShapeError
from .building import Builder
from .layout import Layout, axes_of, cut, local_shape, shape_of, whole
from .mesh_comm import MeshComm
from .plan import TorchPlan
from .run import Runner
from .steps import Where
from .transfer import Wanted, at_place


def mark(tensor: torch.Tensor, layout: Layout) -> None:
    """Mark a tensor, which no model has returned, with how the whole is cut."""
    tensor.neondist_layout = layout  # type: ignore[attr-defined]


class Tiling:
    """Tiling of a module's inputs, outputs and targets.

    Parameters
    ----------
    wires : MeshComm
    shapes : sequence of tuple
        The global shapes of the inputs.

    Attributes
    ----------
    inputs : list of Layout
    """

    def __init__(self, wires: MeshComm, shapes: Iterable[Sequence[int]]) -> None:
        self.wires = wires
        self.resize(shapes)
        # how tensors that went out of here are cut, by their id as long as they live
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], Layout]] = {}
        self._gathers: dict[tuple[Layout, torch.dtype], Runner] = {}

    def resize(self, shapes: Iterable[Sequence[int]]) -> None:
        """Cut inputs of other global shapes from now on."""
        self.inputs = [cut(shape, self.wires.mesh) for shape in shapes]

    def whole_shape(self, tile: Any) -> tuple[int, ...] | None:
        """Return the global shape of a tensor, given this rank's part; None: it is not known."""
        if not isinstance(tile, torch.Tensor):
            return None
        layout = self.noted(tile)
        if layout is None:
            return tuple(tile.shape) if self.wires.grid.size == 1 else None
        return shape_of(layout)

    def note(self, tensor: torch.Tensor, layout: Layout) -> None:
        """Remember how a tensor is cut, as long as it lives."""
        key, known = id(tensor), self._known
        known[key] = weakref.ref(tensor, lambda _: known.pop(key, None)), layout

    def unknown(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Return which of these neither the model nor `part` has returned."""
        return [at for at, tensor in enumerate(tensors) if self.noted(tensor) is None]

    def noted(self, tensor: torch.Tensor) -> Layout | None:
        """Return how a tensor is cut, if it went out of here."""
        reference, layout = self._known.get(id(tensor), (None, None))
        return layout if reference is not None and reference() is tensor else getattr(tensor, "neondist_layout", None)

    def part(self, image: torch.Tensor, layout: Layout, around: Wanted | None = None) -> torch.Tensor:
        """Return this rank's part of a whole tensor, which every rank has; or what each part of an axis is given."""
        if tuple(image.shape) != shape_of(layout):
            raise ShapeError(
                f"expected a whole tensor of shape {shape_of(layout)}, the same on every rank, got {tuple(image.shape)}"
            )
        if around:
            for dim, (lo, hi) in at_place(around, self.wires.place).items():
                image = image.narrow(dim, lo, hi - lo)
            return image.clone(memory_format=torch.preserve_format)
        if not axes_of(layout):
            found = image.clone(memory_format=torch.preserve_format)
        else:
            atoms = [atom for dim in layout for atom in dim]
            if len(atoms) != len(layout):
                image = image.reshape([atom.extent for atom in atoms])
            for dim, atom in enumerate(atoms):
                lo, hi = atom.range(self.wires.place)
                image = image.narrow(dim, lo, hi - lo)
            shape = local_shape(layout, self.wires.place)
            found = image.clone(memory_format=torch.preserve_format).reshape(shape)
        self.note(found, layout)
        return found

    def target(self, shape: tuple[int, ...], outputs: Sequence[Layout]) -> Layout:
        """Return how a target is cut: as an output that has its spatial extents, else along the batch alone."""
        mesh, known = self.wires.mesh, self._known_layouts(outputs)
        for layout in known:
            if shape == shape_of(layout):
                return layout
            if len(layout) == mesh.spatial + 2 and shape[-mesh.spatial :] == shape_of(layout[2:]):
                if shape[:1] == shape_of(layout[:1]) and len(shape) == len(layout):
                    return (layout[0], *whole(shape[1:2]), *layout[2:])
                if shape[:1] == shape_of(layout[:1]) and len(shape) == len(layout) - 1:
                    return (layout[0], *layout[2:])
        batches = {shape_of(layout[:1]) for layout in known if layout}
        if shape and (len(shape) > mesh.spatial or shape[:1] not in batches):
            shapes = sorted({shape_of(layout) for layout in known if layout})
            raise ShapeError(
                f"a target of shape {shape} matches none of the outputs {', '.join(map(str, shapes))}; it must have"
                " the batch and spatial extents of one of them, or be (N,) or (N, C)"
            )
        return ((mesh.atom(shape[0], 0),), *whole(shape[1:])) if shape else ()

    def layouts_of(
        self,
        tensors: Sequence[torch.Tensor],
        outputs: Callable[[], Sequence[Layout]],
        targets_from: int | None = None,
    ) -> list[Layout]:
        """Return how tensors are cut of which this rank has its parts; collective.

        What has gone through the user's hands, such as y.squeeze(1), is known by the shapes that all ranks have of it.

        Parameters
        ----------
        tensors : sequence of torch.Tensor
            Parts of outputs; and of targets, from the index `targets_from`.
        outputs : callable
            Returns those of the module.
        """
        found = [self.noted(tensor) for tensor in tensors]
        place, world = self.wires.place, self.wires.grid.world
        asked = [at for at, layout in enumerate(found) if layout is None]
        known = self._known_layouts(outputs()) if asked else []
        candidates = {
            at: self._candidates(tensors[at], known, targets_from is not None and at >= targets_from) for at in asked
        }  # the same on all ranks
        fit = [
            [i for i, layout in enumerate(candidates[at]) if local_shape(layout, place) == tuple(tensors[at].shape)]
            for at in asked
        ]
        every = world.allgather(fit) if asked and world.size > 1 else [fit]
        for k, at in enumerate(asked):
            common = set.intersection(*(set(other[k]) for other in every))
            if not common:
                raise ShapeError(
                    f"rank {self.wires.grid.rank}: no tensor of this model has a part of shape"
                    f" {tuple(tensors[at].shape)} on this rank; pass model.loss and model.gather only tensors"
                    " returned by the model, scatter or scatter_target"
                ).on_all_ranks()
            found[at] = candidates[at][min(common)]
        return [layout for layout in found if layout is not None]

    def _known_layouts(self, outputs: Sequence[Layout]) -> list[Layout]:
        return [*outputs, *self.inputs]  # a criterion may resize an output to the extents of the image

    def _candidates(self, tensor: torch.Tensor, known: Sequence[Layout], target: bool) -> list[Layout]:
        mesh = self.wires.mesh
        images = [layout for layout in known if len(layout) == mesh.spatial + 2]
        cells = [layout[:1] + layout[2:] for layout in images]
        channels = [(lay[0], *whole(tensor.shape[1:2]), *lay[2:]) for lay in images if tensor.dim() == len(lay)]
        batch = [layout[:1] for layout in known]
        vectors = [(lay[0], *whole(tensor.shape[1:])) for lay in known if lay and 1 < tensor.dim() <= mesh.spatial]
        return (
            [*cells, *channels, *batch, *known, *vectors] if target else [*known, *channels, *cells, *batch, *vectors]
        )

    def gathered(self, tile: torch.Tensor, layout: Layout, differentiable: bool = False) -> torch.Tensor:
        """Return the whole of a tensor, given this rank's part; collective.

        With `differentiable` it has the gradient of the part, else none.
        """
        if not axes_of(layout):
            return tile if differentiable else tile.detach().clone()
        key = layout, tile.dtype
        if key not in self._gathers:
            self._gathers[key] = self._planned_gather(*key)
        if differentiable:
            return self._gathers[key]([tile], {}, {})[0]
        with torch.no_grad():
            return self._gathers[key]([tile.detach()], {}, {})[0]

    def _planned_gather(self, layout: Layout, dtype: torch.dtype) -> Runner:
        mesh, rank = self.wires.mesh, self.wires.grid.rank
        builder = Builder(mesh, rank)
        builder.where = Where("gather", "", "")
        value = builder.input(layout, dtype)
        found = builder.gathered(value)
        plan = TorchPlan(mesh, rank, builder.steps, builder.values, {}, {}, [value.id], [found.id], {})
        return Runner(self.wires, plan)
