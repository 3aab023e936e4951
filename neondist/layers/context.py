"""`ctx`: the state of one call of a layer, as in torch.autograd.Function; and the state shared by all layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..arrays import rng
from ..backends import Backend, Kernels
from ..comm import ProcessGrid
from ..errors import ConfigError
from ..geometry import Box, Partition
from ..halo import GlobalArray, Phase
from .functions import Activation
from .layout import Shape


@dataclass(frozen=True)
class ModelContext:
    """State shared by all layers of a built model."""

    grid: ProcessGrid
    backend: Backend
    dtype: np.dtype
    seed: int
    batch_size: int


class BuiltLayer(Protocol):
    """Attributes of a built layer that its contexts use."""

    name: str | None
    context: ModelContext
    input: GlobalArray
    input_shape: Shape
    output_shape: Shape
    regions: tuple[Partition | None, Partition | None]
    activation: Activation | None
    params: dict[str, Any]
    grads: Any
    state: dict[str, Any]

    @property
    def output_tile(self) -> Box:
        """The cells of the output that this rank computes."""

    def recompute_output(self, ctx: Any, y: Any) -> None:
        """Write the output of `forward` into y."""


class StepContext:
    """Context of one call of a layer's `forward` and `backward`.

    Attributes
    ----------
    training : bool
    step : int
        The training step's number.
    samples : (int, int)
        Half-open range of the samples in the arrays, as indices into the batch of all replicas.
    needs_input_gradient : bool
        False: `backward` may return None.
    reduced : array or None
        Combined results of all ranks' `reduce` (in `backward`: of `reduce_backward`).
    out : array
        Preferred output array, a new one on each access. Writing into it saves a copy; returning any other array is
        also valid.
    activation : Activation or None
        The layer's own activation, or the activation of the following layer, if this layer fuses it.
    """

    reduced: Any = None
    #: the result of the reduction before `forward`, which other calls use too
    forward_reduction: Any = None
    needs_input_gradient = True
    #: False: an earlier call has computed the layer's gradients, and assignments to `grads` are ignored
    needs_weight_gradients = True
    #: whether another call has already updated the state: in recomputation, or if micro-batches share statistics
    state_already_updated = False
    #: shapes of the output of `forward` and of the gradient of its view; None: not checked
    output_shape: Shape | None = None
    view_shape: Shape | None = None
    #: whether `forward` has applied the layer's activation itself
    activated = False
    #: whether the following layer applies the activation's gradient, so that `backward` needs no output
    relu_gradient_left_to_next_layer = False
    #: whether this layer's `backward` also applies the gradient of the preceding activation
    applies_input_relu_gradient = False
    #: the view, if it must be rebuilt for the backward pass
    view_to_rebuild: Any = None
    #: output of the activation, if the layer did not apply it
    activation_output: Any = None
    #: the array that the last access of `out` returned
    accessed_out: Any = None

    def __init__(self, layer: BuiltLayer, phase: Phase, samples: int, allocate_out: Callable[[], Any]) -> None:
        self._layer, self.phase, self.activation = layer, phase, layer.activation
        self.training, self.step = phase.training, phase.step
        self._sample_count, self._saved = samples, {}  # type: int, dict[str, Any]
        #: copies of the state before the first `forward` of the pass, shared by all calls in it; empty before that
        self.initial_state: dict[str, Any] = {}
        self.set_out_allocator(allocate_out)

    def set_reduced(self, result: Any, direction: str = "forward") -> None:
        """Set `reduced` to a copy of the result of a reduction, which the layer may modify."""
        self.reduced = None if result is None else result.copy()
        if direction == "forward":
            self.forward_reduction = result

    def set_out_allocator(self, allocate: Callable[[], Any]) -> None:
        """Set the function that returns `out`."""
        self._allocate_out, self.accessed_out = allocate, None

    def __getattr__(self, name: str) -> Any:
        if name in self._saved:
            return self._saved[name]
        raise AttributeError(f"ctx has no '{name}': forward must save it with ctx.save({name}=...)")

    # Saved arrays.

    def save(self, **arrays: Any) -> None:
        """Save arrays for `backward` as attributes: `ctx.save(view=view)` sets `ctx.view`.

        The view and the result of `forward` may be saved.
        """
        for name in arrays.keys() & _RESERVED_CTX_NAMES:
            raise ConfigError(f"ctx.save({name}=...): '{name}' is an attribute of ctx; choose another name")
        self._saved.update(arrays)

    def copy_saved_arrays_sharing_memory(self, memory: Any, unless: Any = None) -> None:
        """Replace saved arrays, except `unless`, with copies if they share `memory`, which will be reused."""
        for name, kept in self._saved.items():
            if kept is not unless and self._layer.context.backend.owns(kept) and self.xp.may_share_memory(kept, memory):
                self.save(**{name: kept.copy()})

    def saved_arrays_without_view(self, is_reused: Callable[[Any], bool]) -> dict[str, Any]:
        """Return the saved arrays without the view; arrays for which `is_reused` is true are copied."""
        return {name: self._copy_or_view_placeholder(kept, is_reused) for name, kept in self._saved.items()}

    def _copy_or_view_placeholder(self, array: Any, is_reused: Callable[[Any], bool]) -> Any:
        if array is self.view_to_rebuild and array is not None:
            return _VIEW_PLACEHOLDER
        return array.copy() if self._layer.context.backend.owns(array) and is_reused(array) else array

    def replace_saved_view(self, view: Any) -> None:
        """Replace the saved view with this one."""
        self._saved = {name: view if kept is self.view_to_rebuild else kept for name, kept in self._saved.items()}
        self.view_to_rebuild = view

    def recompute_output(self, y: Any) -> None:
        """Write the output of `forward` into y."""
        self._layer.recompute_output(self, y)

    def restore_saved_arrays(self, view: Any, saved: dict[str, Any]) -> None:
        """Restore the result of `saved_arrays_without_view` of an earlier call, with `view` as the view."""
        self._saved = {name: view if kept is _VIEW_PLACEHOLDER else kept for name, kept in saved.items()}

    # The layer's arrays, and the cells of this call.

    @property
    def params(self) -> dict[str, Any]:
        """This rank's parts of the trainable arrays, by name."""
        return self._layer.params

    @property
    def state(self) -> dict[str, Any]:
        """The arrays that are saved but not trained."""
        state = self._layer.state
        return {name: array.copy() for name, array in state.items()} if self.state_already_updated else state

    @property
    def grads(self) -> dict[str, Any]:
        """This rank's contributions to the gradients; assignments of several calls are summed."""
        return self._layer.grads if self.needs_weight_gradients else defaultdict(float)

    @property
    def xp(self) -> Any:
        """The array namespace: NumPy's functions for the backend's arrays."""
        return self._layer.context.backend.xp

    @property
    def kernels(self) -> Kernels:
        """The backend's kernels."""
        return self._layer.context.backend.kernels

    @property
    def samples(self) -> tuple[int, int]:
        """Half-open range of this call's samples in the whole batch."""
        first = self.phase.first_sample
        return first, first + self._sample_count

    @property
    def input_box(self) -> Box:
        """The cells of the view in image coordinates, which extend outside the image by the padding."""
        return self._layer.input.need

    @property
    def output_box(self) -> Box:
        """The cells of the output."""
        return self._layer.output_tile

    @property
    def input_tile(self) -> Box:
        """The cells of the input tile, without halo and padding."""
        input_array = self._layer.input
        return input_array.own.intersect(input_array.need)  # in a strip, `own` may be larger: other strips read it too

    def owned(self, array: Any, cells: Box | None = None) -> Any:
        """Return the part of an array over the view, or over `cells`, that this rank's tile or strip owns."""
        layer, extent = self._layer, self._layer.input_shape[:-1]
        own_box, view_box = layer.context.grid.tile_box(extent), cells or layer.input.need
        if not extent or own_box == view_box:
            return array
        if own_box.size and own_box.intersect(view_box) != own_box:
            raise ConfigError(
                f"layer '{layer.name}': its view lacks cells of this rank's tile, which ctx.owned should return;"
                " compute the reduction in a layer without a window, before this one"
            )
        return array[(slice(None), *own_box.relative_to(view_box).slices)]

    def contribution_to_sum(self, array: Any) -> Any:
        """Return this rank's contribution to a sum over all ranks of values computed from the output.

        Outputs without spatial axes are replicated over tiles, and must be counted once.
        """
        layer = self._layer
        is_counted = layer.output_shape[:-1] or layer.context.grid.tile == 0
        return array if is_counted else 0 * array

    def random(self, purpose: str) -> CellRandom:
        """Return random numbers for the input tile's cells, keyed by seed, purpose, layer, step and global index."""
        layer = self._layer
        stream_key = rng.key(layer.context.seed, purpose, str(layer.name), self.step)
        return CellRandom(stream_key, self.samples, self.input_tile, layer.input_shape, self.xp)

    # Memory and activations.

    @property
    def out(self) -> Any:
        """Preferred output array; a new one on each access."""
        if self.accessed_out is not None:  # for example a subclass that calls its parent's forward twice
            return self.xp.empty_like(self.accessed_out)
        self.accessed_out = self._allocate_out()
        return self.accessed_out

    def activate(self, z: Any, y: Any) -> None:
        """Write the layer's activation of z into y; z is a part of the outputs, and may be overwritten."""
        self.activated = True
        if self.activation is None:
            if z is not y:
                self.kernels.copy(z, y)
        else:
            self.activation.fprop_into(z, y, self.kernels)

    def activation_gradient(self, y: Any, dy: Any) -> Any:
        """Return a contiguous gradient of the argument z of `activate`, given (a part of) y and its gradient."""
        if self.activation is None or self.relu_gradient_left_to_next_layer or not self.activated:
            return self.kernels.contiguous(dy)
        return self.activation.bprop_contiguous(y, dy, self.kernels)

    # Additional halos, which the layer has declared in `halos_for`.

    def gather(self, array: GlobalArray, tile: Any) -> Any:
        """Return the view of a tile through a declared array's window; valid until the next call. Collective."""
        return self._exchange_halo("forward", array, tile)

    def scatter_add(self, array: GlobalArray, dview: Any) -> Any:
        """Return the gradient of the tile, as the adjoint of `gather`; valid until the next call. Collective."""
        return self._exchange_halo("backward", array, dview)

    def _exchange_halo(self, direction: str, array: GlobalArray, values: Any) -> Any:
        exchange = array.get_fprop_view if direction == "forward" else array.get_bprop_view
        with self._layer.context.grid.observers.observe("halo", str(self._layer.name), direction):
            return exchange(values, self.phase)


class CellRandom:
    """Random numbers for the cells of a tile, the same on every grid."""

    def __init__(self, key: int, samples: tuple[int, int], tile: Box, image_shape: tuple[int, ...], xp: Any) -> None:
        self.stream_key = key
        cells = (slice(*samples), *tile.slices, slice(None))
        self.global_indices = rng.row_major_indices((samples[1], *image_shape), cells, xp)

    def mask_at_least(self, rate: float) -> Any:
        """Return the mask of uniform numbers that are at least `rate`: (n, *tile, C)."""
        return rng.uniform_at_least(rate, self.stream_key, self.global_indices)

    def uniform(self) -> Any:
        """Return float64 numbers in [0, 1)."""
        return rng.uniform(self.stream_key, self.global_indices)

    def normal(self) -> Any:
        """Return standard normal float64 numbers."""
        return rng.normal(self.stream_key, self.global_indices)


_VIEW_PLACEHOLDER = object()
_CTX_INSTANCE_NAMES = {"activation", "phase", "step", "training"}
_RESERVED_CTX_NAMES = frozenset(name for name in dir(StepContext) if not name.startswith("__")) | _CTX_INSTANCE_NAMES
