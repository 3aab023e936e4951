"""A pass through a section: its memory and state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

from ..halo import GlobalArray, Phase
from ..layers import StepContext
from .arena import Arena

InitialStates: TypeAlias = list[dict[str, Any]]


class Workspace:
    """Memory of one pass at a time: the arena, and the buffers of all views in it.

    Parameters
    ----------
    shapes : list of tuple
        Shapes of this rank's tile of every value, without the batch.
    inputs : list of GlobalArray or None
        Array that produces each step's view; None if a step has no view.
    """

    def __init__(self, arena: Arena, shapes: Sequence[tuple[int, ...]], inputs: Sequence[GlobalArray | None]) -> None:
        self.arena, self.plan, self.shapes, self.inputs = arena, arena.plan, shapes, inputs
        self._arrays: dict[tuple[int, int], Any] = {}
        self._views: dict[tuple[int, int], Any] = {}

    def view(self, step: int, samples: int) -> Any:
        """Return the buffer of a step's view for batches of this size."""
        key, array = (step, samples), self.inputs[step]
        if key not in self._views and array is not None:
            gradient_range = self.plan.gradient_ranges.get(step)
            gradient_slot = None if gradient_range is None else partial(self.arena.array, gradient_range)
            slots = partial(self.arena.array, self.plan.view_ranges[step]), gradient_slot
            self._views[key] = array.buffer(samples, self.arena.block_number, slots)
        return self._views[key]

    def value_array(self, value: int, samples: int) -> Any:
        """Return the array (samples, *tile, C) of a value."""
        if (at := self.plan.view_of_value.get(value)) is not None:
            return self.view(at, samples).tile
        return self._array(self.plan.value_ranges.get(value), value, samples)

    def gradient_array(self, step: int, value: int, samples: int) -> Any:
        """Return the array for the gradient of a step's view, valid until the gradient is read."""
        if step in self.plan.view_ranges:
            return self.view(step, samples).zero_and_return_dview()
        return self._array(self.plan.gradient_ranges.get(step), value, samples)

    def save_border(self, step: int, samples: int) -> None:
        """Save the cells around the tile that `recompute_view` needs, if any."""
        if step in self.plan.border_ranges:
            self.view(step, samples).save_border(self._border(step, samples))

    def recompute_view(self, step: int, value: int, samples: int, write_tile: Callable[[Any], None]) -> Any:
        """Rebuild the view of a step for the backward pass; `write_tile` fills in the tile."""
        slot = self.plan.rebuilt_view_ranges[step]
        if step in self.plan.border_ranges:
            buffer, saved_border = self.view(step, samples), self._border(step, samples)
            return buffer.recompute_view(partial(self.arena.array, slot), saved_border, write_tile)
        tile = self._array(slot, value, samples)
        write_tile(tile)
        return tile

    def _border(self, step: int, samples: int) -> Any:
        slot = self.plan.border_ranges[step]
        return self.arena.array(slot, (samples, self.plan.ranges[slot].elements_per_sample))

    def gradient_sum_array(self, value: int, samples: int) -> Any:
        """Return the array for the sum of a value's gradients."""
        return self._array(self.plan.gradient_sum_ranges.get(value), value, samples)

    def _array(self, slot: int | None, value: int, samples: int) -> Any:
        """Return the array of a slot with a value's shape; a new array if none is planned."""
        shape = samples, *self.shapes[value]
        if slot is None:
            return self.arena.backend.xp.empty(shape, self.arena.dtype)
        key = slot, samples
        if key not in self._arrays:
            self._arrays[key] = self.arena.array(slot, shape)
        return self._arrays[key]


class SectionPass:
    """One pass through a section, and its state.

    Attributes
    ----------
    output : array
        This rank's tile of the section's output, in the memory of the pass.
    num_steps, output_value : int
        Number of steps, and the index of the value that the last step computes.
    known_forward_reductions, known_backward_reductions : list or None
        For a repeated pass: the results of the reductions of each step.
    keeps_states : bool
        Whether saved states are kept when the pass is closed, so that another pass can skip steps.
    first_accumulated_step : int
        Steps from this index on have already accumulated their weight gradients, except that the step at this index
        has run only `reduce_backward`, and still has to compute gradients in `backward`.
    """

    known_backward_reductions: list[Any] | None = None
    keeps_states = False

    def __init__(
        self, workspace: Workspace, phase: Phase, samples: int, end: tuple[int, int], reduced: list[Any] | None
    ) -> None:
        self._workspace: Workspace | None = workspace
        self.phase, self.samples, self.known_forward_reductions = phase, samples, reduced
        self.num_steps, self.output_value = end
        self.first_accumulated_step = self.num_steps
        self.contexts: list[StepContext | None] = [None] * self.num_steps
        self.output: Any = None
        #: saved states of an earlier pass, by step; these steps are skipped
        self.saved_states_by_step: Mapping[int, Any] = {}
        #: layers' state before the pass (or before the pass that it repeats), by step; empty for steps not run yet
        self.initial_states: InitialStates = [{} for _ in range(self.num_steps)]
        #: outputs of joins, by step, that fused activations need in the backward pass
        self.join_outputs: dict[int, Any] = {}

    @property
    def workspace(self) -> Workspace:
        """The memory of the pass, until it is closed."""
        assert self._workspace is not None
        return self._workspace

    @property
    def is_closed(self) -> bool:
        """Whether the memory has been released."""
        return self._workspace is None

    @property
    def reduced(self) -> list[Any]:
        """Results of the forward reductions of each step."""
        return [None if ctx is None else ctx.forward_reduction for ctx in self.contexts]

    @contextmanager
    def preserve_saved_arrays(self) -> Iterator[None]:
        """Restore the pass after a backward pass inside the block."""
        with self.workspace.arena.preserve_saved_arrays(self.samples):
            contexts = self.contexts[:]
            yield
            self.contexts = contexts

    def close(self) -> None:
        """Release the memory; no backward pass is possible afterwards."""
        if self._workspace is not None:
            arena = self._workspace.arena
            arena.blocks.release(arena.block_number)
            self._workspace, self.contexts = None, []

    def __del__(self) -> None:
        self.close()


Passes: TypeAlias = Sequence[SectionPass]
