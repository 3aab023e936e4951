"""What a rank does in a pass of a distributed module, and what it sends; pure, needs no communicator."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from math import prod

import torch

from ..halo import scheme_text
from .graph import GRADIENTS, SAME, WIDER, Step, TorchGraph, Value
from .layout import Mesh, Shape, local_shape
from .transfer import Piece

Traffic = dict[tuple[str, str, str], int]
"""Bytes by (kind, step, direction): kind 'halo', 'redistribution', 'ring' or 'sum', and 'forward' or 'backward'."""


class TorchPlan(TorchGraph):
    """The steps, and what they cost."""

    def traffic(self, rank: int, trained: Collection[str] | None = None, inputs: bool = False) -> Traffic:
        """Return the bytes that a rank sends, or gives into sums, in a forward and a backward pass.

        By kind, step and direction, as the ledger of `wires` records them.

        Parameters
        ----------
        trained : collection of str
            The parameters that require gradients; default: all.
        inputs : bool
            Whether the inputs do.
        """
        trained = self.parameters if trained is None else trained
        place, found = self.mesh.place(rank), Counter[tuple[str, str, str]]()
        needed, reached = _needed(self, trained, inputs), {out for out in self.outputs if isinstance(out, int)}
        for step in self.steps:
            for kind, count in _forward(self, step, rank, place):
                found[kind, step.name, "forward"] += count
        for step in reversed(self.steps):
            if not any(out in reached and out in needed for out in step.outputs):
                continue
            reached.update(step.inputs)
            given = step.inputs[:1] if step.kind == "norm" else step.inputs  # its weights' gradients need no sums
            if any(value in needed for value in given):
                for kind, count in _backward(self, step, rank, place):
                    found[kind, step.name, "backward"] += count
        for segment in self.segments()[:-1] if self.recompute else ():
            if any(out in reached and out in needed for step in segment.steps for out in step.outputs):
                for step in segment.steps:
                    for kind, count in _forward(self, step, rank, place):
                        found[kind, step.name, "forward"] += count
        weights = [self.values[self.parameters[name]] for name in trained if self.parameters.get(name) in reached]
        found["sum", GRADIENTS, "backward"] = _summed(self.mesh, self.mesh.axes, weights, place)
        return {account: count for account, count in found.items() if count}

    def bytes(self, rank: int) -> int:
        """Return the bytes of messages that a rank sends in a training step, sums not counted."""
        return sum(count for (kind, _, _), count in self.traffic(rank).items() if kind != "sum")

    def reduced(self, rank: int) -> dict[str, int]:
        """Return the bytes that a rank gives into sums over ranks in a training step, by step, and of 'gradients'."""
        found: Counter[str] = Counter()
        for (kind, name, _), count in self.traffic(rank).items():
            if kind == "sum":
                found[name] += count
        return dict(found)

    def memory(self, rank: int) -> int:
        """Return the bytes of all values that a rank makes in a forward pass, parameters and inputs not counted."""
        place = self.mesh.place(rank)
        made = [self.values[out] for step in self.steps if step.kind not in SAME for out in step.outputs]
        return sum(prod(part_of(value, place)) * value.dtype.itemsize for value in made)

    def peak(self) -> tuple[int, str]:
        """Return the bytes that live at once in a pass of this rank without a way back, and the step where they do.

        Parameters and buffers are not counted; what convolutions, interpolations and rings take for a moment is: as
        much as their arrays have.
        """
        size = [value.nbytes for value in self.values]
        kept = {*self.parameters.values(), *self.buffers.values(), *self.inputs}
        live = sum(size[value] for value in self.inputs)
        found = [(live, "")]
        for step in self.steps:
            made, freed = (sum(size[v] for v in values if v not in kept) for values in (step.outputs, step.free))
            live += made
            takes = "conv" in step.op or "upsample" in step.op or step.kind == "ring"
            work = sum(size[v] for v in (*step.inputs, *step.outputs)) if takes else 0
            found.append((live + work, step.name))
            live -= freed
        return max(found)

    def describe(self) -> str:
        """Return a table of what this rank sends in a training step."""
        table: dict[tuple[str, str], list[int]] = {}
        for (kind, name, direction), count in self.traffic(self.rank).items():
            table.setdefault((name, kind), [0, 0])[direction == "backward"] += count
        lines = [f"{'step':58s} {'kind':14s} {'forward':>14s} {'backward':>14s}  (bytes)"]
        lines += [
            f"{name[-58:]:58s} {kind:14s} {there:14,d} {back:14,d}" for (name, kind), (there, back) in table.items()
        ]
        summed = sum(self.reduced(self.rank).values())
        lines.append(
            f"{len(self.steps)} steps; in a training step rank {self.rank} sends {self.bytes(self.rank):,d} bytes, and"
            f" gives {summed:,d} into sums"
        )
        return "\n".join(lines)

    @property
    def digest(self) -> str:
        """A hash that is equal on ranks that will run the same steps."""
        text = [str(self.mesh.parts), str(self.recompute)]
        for step in self.steps:
            layouts = [self.values[out].layout_or_none for out in step.outputs]
            dtypes = [str(self.values[out].dtype) for out in step.outputs]
            wants = step.transfer.wants if step.transfer else ()
            scheme = "" if step.scheme is None else scheme_text(step.scheme)
            axes = sorted(step.axes)
            text.append(repr((step.kind, step.name, step.inputs, step.outputs, axes, wants, layouts, dtypes, scheme)))
        return hashlib.sha256("\n".join(text).encode()).hexdigest()


def _needed(plan: TorchGraph, trained: Collection[str], inputs: bool) -> set[int]:
    """Return the values that depend on what has a gradient."""
    needed = {value for name, value in plan.parameters.items() if name in trained}
    if inputs:
        needed.update(value for value in plan.inputs if plan.values[value].kind == "value")
    for step in plan.steps:
        if any(value in needed for value in step.inputs):
            needed.update(out for out in step.outputs if plan.values[out].kind != "constant")
    return needed


def _forward(plan: TorchGraph, step: Step, rank: int, place: Sequence[int]) -> Iterable[tuple[str, int]]:
    values = plan.values
    if step.transfer is not None:
        yield kind_of(step), _sent(step, step.transfer.sends(rank), values[step.inputs[0]], place, "forward")
    elif step.kind == "norm":
        yield "sum", 2 * _summed(plan.mesh, step.key[0].axes, [values[step.outputs[1]]], place)
    elif step.kind == "ring":
        yield "ring", _passed_on(step, values, rank, place, "forward")
    elif step.kind in ("sum", "max"):
        yield "sum", _summed(plan.mesh, step.axes, [values[step.inputs[0]]], place)


def _backward(plan: TorchGraph, step: Step, rank: int, place: Sequence[int]) -> Iterable[tuple[str, int]]:
    values = plan.values
    if step.kind == "view" and step.transfer is not None:
        pieces = [piece for piece in step.transfer.receives(rank) if piece.peer != rank]
        yield kind_of(step), _sent(step, pieces, values[step.inputs[0]], place, "backward")
    elif step.kind == "norm":
        yield "sum", 2 * _summed(plan.mesh, step.key[0].axes, [values[step.outputs[1]]], place)
    elif step.kind == "ring":
        yield "ring", _passed_on(step, values, rank, place, "backward")
    elif step.kind == "spread":
        yield "sum", _summed(plan.mesh, step.axes, [values[step.inputs[0]]], place)


def kind_of(step: Step) -> str:
    """Return under which kind the ledger has a step's messages."""
    return "halo" if step.kind == "view" else "redistribution"


def _sent(step: Step, pieces: Iterable[Piece], value: Value, place: Sequence[int], direction: str) -> int:
    """Return the bytes of messages; of border schemes in the mean of many steps."""
    assert step.transfer is not None
    moved = {want.dim for want in step.transfer.wants}
    others = prod(n for dim, n in enumerate(part_of(value, place)) if dim not in moved)
    numbers, size = [piece.cells * others for piece in pieces], value.dtype.itemsize
    if step.scheme is not None:
        size = 4 if value.dtype == torch.bfloat16 else size  # which NumPy has not
        return round(step.scheme.mean_bytes(numbers, size, direction))
    return sum(numbers) * size


def _passed_on(step: Step, values: Sequence[Value], rank: int, place: Sequence[int], direction: str) -> int:
    """Return the bytes of keys and values, and of their gradients, that go around a ring."""
    _, *passed = (values[value] for value in step.inputs[:3])
    parts = [(value.dtype.itemsize, part_of(value, place)) for value in passed]
    return step.key.sent(rank, direction) * sum(size * prod((*part[:-2], part[-1])) for size, part in parts)


def _summed(mesh: Mesh, axes: frozenset[int], values: Iterable[Value], place: Sequence[int]) -> int:
    """Return the bytes that a rank gives into sums of values over axes."""
    sizes = (prod(part_of(value, place)) * WIDER.get(value.dtype, value.dtype).itemsize for value in values)
    return len(mesh.sums(axes)) * sum(sizes)


def part_of(value: Value, place: Sequence[int]) -> Shape:
    """Return the shape of a value on the rank at a place; of a view, on the rank that the plan is of."""
    return value.local if value.layout_or_none is None else local_shape(value.layout, place)
