"""A stream at work: to an executor it is a section, whose passes have one strip of the image in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from ..errors import PassError
from ..geometry import Box
from ..halo import Phase
from ..layers import Context, Layer
from ..plan import Graph, Stream
from .arena import Blocks
from .layer_task import LayerTask
from .reduce import joined
from .section import Section
from .strips import on_strip
from .workspace import SectionPass

Cells = tuple[slice, ...]


class StreamPass:
    """One pass through a stream: what goes in, what the reductions came to, and the last strip, where one is kept.

    Attributes
    ----------
    output : array
        This rank's tile of the value that the stream gives, or the vector.
    reduced : dict of direction to list
        What the reductions of each step came to.
    """

    output: Any = None

    def __init__(self, x: Any, phase: Phase, steps: int) -> None:
        #: by the strip's number, what its steps have left that are not taken again
        self.left: dict[int, dict[int, Any]] = {}
        self.x, self.phase, self.samples = x, phase, len(x)
        self.reduced: dict[str, list[Any]] = {"forward": [None] * steps, "backward": [None] * steps}
        self.last: SectionPass | None = None
        self.closed = False

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Let the pass be as before, after it has been gone back through in the block: nothing of it is used up."""
        yield

    def close(self) -> None:
        """Give the memory back; there is no way back through the pass any more."""
        self.closed, self.left = True, {}
        if self.last is not None:
            self.last.close()
            self.last = None


class _BackwardGroup(NamedTuple):
    """Strips that go back together: of which part of a stream, and the gradients of its output for each pass."""

    part: Streamed
    numbers: Sequence[int]
    dys: Sequence[Any]


class Streamed:
    """The nodes of a stream on this rank.

    Parameters
    ----------
    planned : Stream
    context : Context
    blocks : Blocks
        The memory of a strip.
    layer_task : type
        What runs a layer's step.
    image : Box, optional
        This rank's cells of the image; default: those that it needs.
    """

    def __init__(
        self,
        planned: Stream,
        context: Context,
        blocks: Blocks,
        layer_task: Callable[[int, Graph, Layer], LayerTask],
        image: Box | None = None,
    ) -> None:
        self.planned, self.context, self.blocks, self.layer_task = planned, context, blocks, layer_task
        self.first, self.last, graph, tile = 0, planned.nodes, planned.graph, context.grid.tile
        #: of whole tiles: they know how partial results of ranks become one
        self.tasks: dict[int, LayerTask] = {
            at: layer_task(at, graph, step.layer) for at, step in enumerate(graph.steps) if step.layer is not None
        }
        self.numbers, self.steps = planned.strips(tile), len(graph.steps)
        self._cut = planned.cut_strips(tile)
        self._keeps = self.numbers[max(0, len(self.numbers) - planned.checkpointed_strips) :]
        blocks.provide(planned.length(tile))
        self._sections: dict[int, Section] = {}
        self._now = -1
        self._own, self._image = planned.output(tile), image or planned.tiles[0].box(tile)
        self._wanted_shape = (*self._image.shape, graph.shapes[0][-1])
        self._output_shape = (*(self._own.shape if self._own is not None else ()), graph.shapes[graph.output][-1])
        below = planned.below
        #: what goes back from the last value whose gradient is kept
        self.below = None if below is None else Streamed(below, context, blocks, layer_task, self._image)
        layers = [task.name for task in self.tasks.values()]
        self.name = f"{layers[0]} to {layers[-1]}"

    @property
    def over_batch(self) -> bool:
        """Whether a step needs all samples of a batch at once."""
        return any(task.over_batch for task in self.tasks.values())

    def leave(self, x: Any, run: StreamPass) -> StreamPass:
        """Return what is kept of a pass whose output is known."""
        return run

    def recompute(self, kept: Sequence[StreamPass], phases: Sequence[Phase]) -> Sequence[StreamPass]:
        """Return the passes of which that was kept, for the way back."""
        return kept

    def forward(self, xs: Sequence[Any], phases: Sequence[Phase], nodes: int | None = None) -> list[StreamPass]:
        """Return passes that take each step together."""
        if nodes not in (None, self.last):
            raise PassError(
                "a pass cannot end between layers that are executed in strips; leave out strips, and give enough"
                " memory for whole images"
            )
        runs = [StreamPass(x, phase, self.steps) for x, phase in zip(xs, phases, strict=True)]
        with self.context.grid.observers.during("layer", self.name, "forward"):
            known = 0
            for at in self.planned.reducing("forward"):
                self._reduce_forward(runs, at, known)
                known = at
            if self._own is not None:
                self._write(runs, known)
        return runs

    def backward(
        self,
        runs: Sequence[StreamPass],
        dys: Sequence[Any],
        first: int = 0,
        wanted: bool = True,
        done: Callable[[Layer], None] | None = None,
    ) -> list[Any]:
        """Return the gradient of the input of each pass, given that of its output; fill in the layers' grads.

        All strips are taken forward again, and back to the next layer that reduces; and again from the image for the
        next one. Of strips whose gradients are kept on the way, what is above them is done.
        """
        with self.context.grid.observers.during("layer", self.name, "backward"):
            ways, before = [_BackwardGroup(self, self.numbers, dys)], self.steps
            for at in reversed(self.planned.reducing("backward")):
                parts: list[list[Any]] = [[] for _ in runs]
                found = [way.part._reduce_backward(runs, way, at, before, wanted, parts) for way in ways]
                self._combine("backward", at, runs, parts)
                ways, before = [way for after in found for way in after], at
            dxs = [self._image_zeros(run.samples) if wanted else None for run in runs]
            for way in ways:
                way.part._to_image(runs, way, before, dxs)
        if done is not None:
            for task in reversed(self.tasks.values()):
                for layer in task.layers:
                    done(layer)
        return dxs

    def _reduce_forward(self, runs: Sequence[StreamPass], at: int, known: int) -> None:
        """Take all strips up to a step's `reduce`, and let it add up; the steps before `known` have been taken before.

        Where the step ends the stream it is taken as well.
        """
        ends = at == self.steps - 1 and self._own is None
        parts: list[list[Any]] = [[] for _ in runs]
        for number in self.numbers:
            section = self._section(number)
            for place, (run, found) in enumerate(zip(runs, parts, strict=True)):
                new = known if number == self.numbers[0] and not place else self.steps
                inner = self._open(section, run, new)
                inner.keeps = ends and run.phase.training and number in self._keeps
                ctx, view, part = section.partial_result(inner, self._seen(run.x, number), at)
                found.append(part)
                if inner.keeps:
                    run.left[number] = section.left(inner, self.planned.recomputed)
                if ends and number == self.numbers[-1]:
                    run.last, run.output = inner, (ctx, view)
                else:
                    inner.close()
            if not ends and all(found[0] is None for found in parts):
                break  # in this pass it reduces nothing
        self._combine("forward", at, runs, parts)
        for run in runs if ends else ():
            ctx, view = run.output
            ctx.reduced = run.reduced["forward"][at]
            run.output = self._section(self.numbers[-1]).tasks[at].computed(ctx, view)  # type: ignore[attr-defined]

    def _reduce_backward(
        self,
        runs: Sequence[StreamPass],
        going: _BackwardGroup,
        at: int,
        before: int,
        wanted: bool,
        parts: list[list[Any]],
    ) -> list[_BackwardGroup]:
        """Take strips back to a step's `reduce_backward`, and append their partial results; return what goes on.

        Where this comes to a cut, strips' gradients of a value are kept, added.
        """
        below = self.below if at == self.planned.sweeps[-1] else None
        if below is None:
            kept, rest, after = [None] * len(runs), going.numbers, []
        else:
            kept = [below.zeros(run.samples) for run in runs]
            rest = [number for number in going.numbers if number not in self._cut]
            after = [_BackwardGroup(below, below.numbers, kept)]
        for number, run, found, dy, total in self._backward_order(going.numbers, runs, parts, going.dys, kept):
            section, inner = self._again(number, run, before)
            keep = None if below is None or number in rest else (below.last, partial(self._add, number, below, total))
            found.append(section.partial_result_back(inner, self._part(dy, number), at, wanted, keep))
            inner.close()
        self._leave()
        return [*([going._replace(numbers=rest)] if rest else []), *after]

    def zeros(self, samples: int) -> Any:
        """Return an array for the gradient of this rank's output."""
        return self.context.backend.xp.zeros((samples, *self._output_shape), self.context.dtype)

    def _image_zeros(self, samples: int) -> Any:
        return self.context.backend.xp.zeros((samples, *self._wanted_shape), self.context.dtype)

    def _add(self, number: int, below: Streamed, total: Any, dy: Any) -> None:
        """Add a strip's gradient of the value with which `below` ends."""
        cells = self.planned.cells[below.planned.graph.output].box(number)
        total[(slice(None), *cells.relative_to(below._own).slices)] += dy  # type: ignore[arg-type]

    def _to_image(self, runs: Sequence[StreamPass], going: _BackwardGroup, before: int, dxs: Sequence[Any]) -> None:
        """Take strips back to the image; what they share of it is added."""
        for number, run, dx, dy in self._backward_order(going.numbers, runs, dxs, going.dys):
            section, inner = self._again(number, run, before)
            (found,) = section.backward([inner], [self._part(dy, number)], wanted=dx is not None)
            if dx is not None:
                dx[self._cells(number)] += found
            inner.close()
        self._leave()

    def _backward_order(
        self, numbers: Sequence[int], runs: Sequence[StreamPass], *beside: Sequence[Any]
    ) -> Iterator[tuple[Any, ...]]:
        """Yield each strip's number and each run with what is beside it: the last strip first, which may be there."""
        for number in reversed(numbers):
            for each in zip(runs, *beside, strict=True):
                yield number, *each

    def _combine(self, direction: str, at: int, runs: Sequence[StreamPass], parts: Sequence[Sequence[Any]]) -> None:
        task = self.tasks[at]
        mine = [joined(task.reductions[direction], part) for part in parts]
        found = task.combined(direction, mine, [run.samples for run in runs])
        for run, reduced in zip(runs, found, strict=True):
            run.reduced[direction][at] = reduced

    def _write(self, runs: Sequence[StreamPass], known: int) -> None:
        """Write the output, strip after strip."""
        for run in runs:
            shape = run.samples, *self._output_shape
            run.output = self.context.backend.xp.empty(shape, self.context.dtype)
        for number in self.numbers:
            section = self._section(number)
            for place, run in enumerate(runs):
                new = known if number == self.numbers[0] and not place else self.steps
                inner = self._open(section, run, new)
                inner.keeps = run.phase.training and number in self._keeps
                section.run(inner, self._seen(run.x, number))
                if inner.keeps:
                    run.left[number] = section.left(inner, self.planned.recomputed)
                self.context.backend.kernels.copy(inner.output, run.output[self._written(number)])
                if number == self.numbers[-1]:
                    run.last = inner
                else:
                    inner.close()

    def _again(self, number: int, run: StreamPass, before: int) -> tuple[Section, SectionPass]:
        """Return a strip's section, and a pass that has gone forward; steps from `before` on gave their gradients."""
        section, inner = self._section(number), run.last
        if number != self.numbers[-1] or inner is None:
            inner = self._open(section, run, self.steps)
            left = (
                run.left.get(number) if self.planned.checkpointed_strips else None
            )  # below a cut strips have other cells
            section.run(inner, self._seen(run.x, number), left)
        run.last = None
        inner.done_back = before
        return section, inner

    def _open(self, section: Section, run: StreamPass, first_new: int) -> SectionPass:
        end = section.graph.ends[-1]
        inner = SectionPass(section.workspace(), run.phase, run.samples, end, run.reduced["forward"])
        inner.given_back, inner.first_new = run.reduced["backward"], first_new
        return inner

    # Where strips lie.

    def _section(self, number: int) -> Section:
        if number != self._now:
            self._leave()
        self._now = number
        if number not in self._sections:
            planned, layers = self.planned.section, [task.layer for task in self.tasks.values()]
            inside = replace(self.context, grid=self.context.grid.of_strip(self.planned.grid, number))
            made = {id(layer): on_strip(layer, planned.placed[id(layer)], number, inside) for layer in layers}
            self._sections[number] = Section(planned, inside, number, self.blocks, made, self.layer_task)
        return self._sections[number]

    def _leave(self) -> None:
        """Give back what is for the last strip alone: what layers have added to."""
        section = self._sections.get(self._now)
        for layer in () if section is None else (layer for task in section.tasks for layer in task.layers):
            if layer.scatters is not None:
                layer.scatters.take(layer.scatters.plan)

    def _cells(self, number: int) -> Cells:
        """Return where a strip's part of the image lies in this rank's."""
        return slice(None), *self.planned.cells[0].box(number).relative_to(self._image).slices

    def _written(self, number: int) -> Cells:
        """Return where a strip's part of the output lies in this rank's."""
        return slice(None), *self.planned.outputs.box(number).relative_to(self._own).slices  # type: ignore[arg-type]

    def _seen(self, x: Any, number: int) -> Any:
        return x[self._cells(number)]

    def _part(self, dy: Any, number: int) -> Any:
        return dy if self._own is None else dy[self._written(number)].copy()
