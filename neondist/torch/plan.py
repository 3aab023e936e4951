"""What a rank does in a pass of a distributed module, step by step; pure, needs no communicator."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch

from .layout import Layout, Mesh, Shape, axes_of, local_shape, shape_of
from .transfer import Transfer

FRESH = {
    "aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default", "aten.add.Tensor", "aten.sub.Tensor",
    "aten.linear.default", "aten._native_batch_norm_legit_functional.default", "aten.group_norm.default",
    "aten._native_batch_norm_legit_no_training.default", "aten.instance_norm.default", "aten.cat.default",
    "aten.conv_transpose2d.input", "aten.conv_transpose3d.input",
}  # fmt: skip
"""Operators that need not their results to go back, and give them in memory of their own."""
IN_PLACE: dict[str, Callable[..., Any]] = {"aten.relu.default": lambda tensor: (torch.relu_(tensor),)}
"""Operators that may write their results over what they were given, if nobody else needs that."""

Pads = tuple[tuple[int, int, int], ...]


@dataclass(eq=False)
class Value:
    """A tensor of the plan.

    Attributes
    ----------
    id : int
    local : tuple of int
        Shape of this rank's part.
    axes : frozenset of int
        The axes of the mesh along which ranks have parts of their own; along others they have the same.
    dtype : torch.dtype
    kind : 'value', 'parameter' (whose gradient is added up at the end), or 'constant' (has none)
    layout : Layout or None
        How the whole is cut; None: a view, which is used by one operation only.
    """

    id: int
    local: Shape
    axes: frozenset[int]
    dtype: torch.dtype
    kind: str
    layout_or_none: Layout | None = None

    @property
    def layout(self) -> Layout:
        """How the whole is cut."""
        assert self.layout_or_none is not None
        return self.layout_or_none

    @property
    def shape(self) -> Shape:
        """The global shape."""
        return shape_of(self.layout)


@dataclass(eq=False)
class Step:
    """One operation: local, or one of the dependences on other ranks.

    Attributes
    ----------
    kind : 'local', 'view', 'gather', 'sum', 'max', 'spread', 'counted'
    name : str
        The module's path and the operator.
    inputs, outputs : values, by id
    run : callable
        For 'local': from the inputs' tensors to the outputs'.
    op : str
        The operator whose result the first output is, if there is one.
    """

    kind: str
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    run: Callable[..., Any] | None = None
    transfer: Transfer | None = None
    pads: Pads = ()
    fill: float = 0.0
    axes: frozenset[int] = frozenset()
    counts: bool = True
    key: Any = None
    free: tuple[int, ...] = field(default=())
    op: str = ""


@dataclass(eq=False)
class TorchPlan:
    """The steps of a captured module on a mesh of ranks, as one rank runs them.

    Attributes
    ----------
    mesh : Mesh
    rank : int
    steps : list of Step
    values : list of Value
    parameters, buffers, constants, inputs : dict or list of ids
    outputs : list of id, or of a Python value
    mutated : dict of buffer to id
    key : int or None
        The value of the number that random ones are keyed by.
    """

    mesh: Mesh
    rank: int
    steps: list[Step]
    values: list[Value]
    parameters: dict[str, int]
    buffers: dict[str, int]
    constants: dict[str, tuple[int, torch.Tensor]]
    inputs: list[int]
    outputs: list[Any]
    mutated: dict[str, int]
    key: int | None = None

    def finish(self) -> TorchPlan:
        """Drop steps whose values nobody reads, and find when each value can be freed."""
        wanted = {out for out in self.outputs if isinstance(out, int)} | set(self.mutated.values())
        kept: list[Step] = []
        for step in reversed(self.steps):
            if any(out in wanted for out in step.outputs):
                wanted.update(step.inputs)
                kept.append(step)
        self.steps = kept[::-1]
        seen = {out for out in self.outputs if isinstance(out, int)} | set(self.mutated.values())
        for step in reversed(self.steps):
            last = [value for value in (*step.inputs, *step.outputs) if value not in seen]
            step.free = tuple(dict.fromkeys(last))
            seen.update(last)
        self._save_memory()
        return self

    def _save_memory(self) -> None:
        """Let steps write over what nobody else reads."""
        readers = Counter(value for step in self.steps for value in step.inputs)
        fresh = {step.outputs[0] for step in self.steps if step.op in FRESH and step.kind in ("local", "norm")}
        for at, step in enumerate(self.steps):
            if step.op in IN_PLACE and step.kind == "local" and step.key is None:
                (value,) = step.inputs
                if value in fresh and readers[value] == 1 and value in step.free:
                    self.steps[at] = replace(step, run=IN_PLACE[step.op])

    def sent(self, rank: int) -> dict[str, int]:
        """Return the bytes that a rank sends in each step forward, or gives into a sum; steps of one name together."""
        place, found = self.mesh.place(rank), dict[str, int]()
        for step in self.steps:
            count = self._sent(step, rank, place)
            if count:
                found[step.name] = found.get(step.name, 0) + count
        return found

    def _sent(self, step: Step, rank: int, place: Sequence[int]) -> int:
        value = self.values[step.inputs[0]] if step.inputs else None
        if value is None or step.kind in ("local", "spread", "counted"):
            return 0
        if step.kind == "norm":
            return 2 * prod(self.values[step.outputs[1]].local) * value.dtype.itemsize
        if step.transfer is None:
            return prod(value.local) * value.dtype.itemsize
        moved = {want.dim for want in step.transfer.wants}
        local = value.local if value.layout_or_none is None else local_shape(value.layout, place)
        others = prod(n for dim, n in enumerate(local) if dim not in moved)
        return sum(piece.cells() for piece in step.transfer.sends(rank)) * others * value.dtype.itemsize

    def bytes(self, rank: int) -> int:
        """Return the bytes that a rank sends in a forward pass, or gives into sums."""
        return sum(self.sent(rank).values())

    def memory(self, rank: int) -> int:
        """Return the bytes of all values that a rank makes in a forward pass, parameters and inputs not counted."""
        place = self.mesh.place(rank)
        made = [
            self.values[out] for step in self.steps if step.kind not in ("spread", "counted") for out in step.outputs
        ]
        shapes = (v.local if v.layout_or_none is None else local_shape(v.layout, place) for v in made)
        return sum(prod(shape) * value.dtype.itemsize for shape, value in zip(shapes, made, strict=True))

    def describe(self) -> str:
        """Return a table of the steps that communicate, with what this rank sends."""
        lines = [f"{'step':60s} {'kind':8s} {'bytes':>12s}"]
        for step in self.steps:
            if step.kind not in ("local", "spread", "counted"):
                sent = self._sent(step, self.rank, self.mesh.place(self.rank))
                lines.append(f"{step.name[-60:]:60s} {step.kind:8s} {sent:12,d}")
        lines.append(f"{len(self.steps)} steps; {self.bytes(self.rank):,d} bytes sent forward by rank {self.rank}")
        return "\n".join(lines)

    @property
    def digest(self) -> str:
        """A hash that is equal on ranks that will run the same steps."""
        text = [str(self.mesh.parts)]
        for step in self.steps:
            layouts = [self.values[out].layout_or_none for out in step.outputs]
            dtypes = [str(self.values[out].dtype) for out in step.outputs]
            wants = step.transfer.wants if step.transfer else ()
            text.append(
                repr((step.kind, step.name, step.inputs, step.outputs, sorted(step.axes), wants, layouts, dtypes))
            )
        return hashlib.sha256("\n".join(text).encode()).hexdigest()


def axes_of_values(values: Iterable[Value]) -> frozenset[int]:
    """Return the axes along which any of the values differs."""
    found: frozenset[int] = frozenset()
    for value in values:
        found |= value.axes
    return found


__all__ = ["Pads", "Step", "TorchPlan", "Value", "axes_of", "axes_of_values"]
