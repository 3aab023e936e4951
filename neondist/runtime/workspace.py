"""A pass through a section: its memory, and all that is kept of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ..halo import GlobalArray, Phase
from ..layers import StepContext
from .arena import Arena, ArenaSlot


class Workspace:
    """The memory of one pass at a time: the arena, and the buffers of all views in it.

    Parameters
    ----------
    arena : Arena
    shapes : list of tuple
        Of this rank's tile of every value, without the batch.
    inputs : list of GlobalArray or None
        What makes the view of each step.
    """

    def __init__(self, arena: Arena, shapes: Sequence[tuple[int, ...]], inputs: Sequence[GlobalArray | None]) -> None:
        self.arena, self.plan, self.shapes, self.inputs = arena, arena.plan, shapes, inputs
        self._arrays: dict[tuple[int, int], Any] = {}
        self._views: dict[tuple[int, int], Any] = {}

    def view(self, at: int, samples: int) -> Any:
        """Return the buffers of a step's view for batches of so many samples."""
        key, array = (at, samples), self.inputs[at]
        if key not in self._views and array is not None:
            self._views[key] = array.buffer(samples, self.arena.number, self._slots(at))
        return self._views[key]

    def value_place(self, value: int, samples: int) -> Any:
        """Return the array (samples, *tile, C) where a value is wanted."""
        if (at := self.plan.homes.get(value)) is not None:
            return self.view(at, samples).tile
        return self._array(self.plan.values.get(value), value, samples)

    def gradient_place(self, at: int, value: int, samples: int) -> Any:
        """Return the array where the gradient of a step's view is wanted; what lies there lasts until it is read."""
        if at in self.plan.views:
            return self.view(at, samples).dview_place()
        return self._array(self.plan.gradients.get(at), value, samples)

    def keep_border(self, at: int, samples: int) -> None:
        """Keep what `restored` needs of a view beside the tile, if anything."""
        if at in self.plan.borders:
            self.view(at, samples).keep_border(self._border(at, samples))

    def restored(self, at: int, value: int, samples: int, write: Callable[[Any], None]) -> Any:
        """Rebuild the view of a step for the backward pass; `write` fills in the tile."""
        slot = self.plan.restored[at]
        if at in self.plan.borders:
            return self.view(at, samples).restored(ArenaSlot(self.arena, slot), self._border(at, samples), write)
        tile = self._array(slot, value, samples)
        write(tile)
        return tile

    def _border(self, at: int, samples: int) -> Any:
        slot = self.plan.borders[at]
        return self.arena.array(slot, (samples, self.plan.ranges[slot].numbers))

    def sum_place(self, value: int, samples: int) -> Any:
        """Return the array for the sum of a value's gradients."""
        return self._array(self.plan.sums.get(value), value, samples)

    def _array(self, slot: int | None, value: int, samples: int) -> Any:
        """Return the array of a slot, of a value's shape; a new one, where none is planned."""
        shape = samples, *self.shapes[value]
        if slot is None:
            return self.arena.backend.xp.empty(shape, self.arena.dtype)
        key = slot, samples
        if key not in self._arrays:
            self._arrays[key] = self.arena.array(slot, shape)
        return self._arrays[key]

    def _slots(self, at: int) -> tuple[ArenaSlot | None, ArenaSlot | None]:
        view, gradient = self.plan.views[at], self.plan.gradients.get(at)
        return ArenaSlot(self.arena, view), None if gradient is None else ArenaSlot(self.arena, gradient)


class SectionPass:
    """One pass through a section, and all that is kept of it.

    Attributes
    ----------
    output : array
        This rank's tile of the value that the section gives; memory of the pass.
    phase : Phase
    samples : int
        Of this rank.
    steps, value : int
        How many steps it takes, and the value that they give.
    given, given_back : list or None
        For a pass that is run again: what the reductions of each step came to, forward and backward.
    keeps : bool
        Whether something is kept of it when it is closed, so that another pass need not take all steps again.
    first_new : int
        The steps before this one have been run before, and change no state.
    done_back : int
        The steps from this one on have given the gradients of their weights before.
    """

    given_back: list[Any] | None = None
    keeps = False

    def __init__(
        self, workspace: Workspace, phase: Phase, samples: int, end: tuple[int, int], given: list[Any] | None
    ) -> None:
        self._workspace: Workspace | None = workspace
        self.phase, self.samples, self.given = phase, samples, given
        self.steps, self.value = end
        self.first_new, self.done_back = 0 if given is None else self.steps, self.steps
        self.contexts: list[StepContext | None] = [None] * self.steps
        self.output: Any = None
        #: what steps have left of a pass before, which are not taken again
        self.left: Mapping[int, Any] = {}
        #: what joins gave whose activation is gone back through with it
        self.joined: dict[int, Any] = {}

    @property
    def workspace(self) -> Workspace:
        """The memory of the pass, until it is closed."""
        assert self._workspace is not None
        return self._workspace

    @property
    def closed(self) -> bool:
        """Whether its memory has been given back."""
        return self._workspace is None

    @property
    def reduced(self) -> list[Any]:
        """Results of the reductions of each step."""
        return [None if ctx is None else ctx.reduced for ctx in self.contexts]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Let the pass be as before, after it has been gone back through in the block."""
        with self.workspace.arena.kept(self.samples):
            contexts = self.contexts[:]
            yield
            self.contexts = contexts

    def close(self) -> None:
        """Give the memory back; there is no way back through the pass any more."""
        if self._workspace is not None:
            arena = self._workspace.arena
            arena.blocks.give_back(arena.number)
            self._workspace, self.contexts = None, []

    def __del__(self) -> None:
        self.close()
