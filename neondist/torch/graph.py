"""The values of a plan, and its steps: local work, or one of the dependences on other ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import isqrt, prod
from typing import Any, NamedTuple

import torch

from ..halo import ExchangePolicy
from .layout import Layout, Mesh, Shape, shape_of
from .transfer import Transfer

GRADIENTS = "gradients"
"""Name under which the reduction of all parameters' gradients is listed, instead of a step's."""
WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
"""In which dtype numbers of few digits are added up over ranks."""
FRESH = {
    "aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default", "aten.add.Tensor", "aten.sub.Tensor",
    "aten.linear.default", "aten._native_batch_norm_legit_functional.default", "aten.group_norm.default",
    "aten._native_batch_norm_legit_no_training.default", "aten.instance_norm.default", "aten.cat.default",
    "aten.conv_transpose2d.input", "aten.conv_transpose3d.input", "aten.batch_norm.default",
}  # fmt: skip
"""Operators that need not their results to go back, and give them in memory of their own."""
IN_PLACE: dict[str, Callable[..., Any]] = {"aten.relu.default": lambda tensor: (torch.relu_(tensor),)}
"""Operators that may overwrite their inputs with their results, if these are not needed elsewhere."""
OWN_GRADIENT = {
    "aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default", "aten.conv1d.padding", "aten.conv2d.padding",
    "aten.conv3d.padding",
}  # fmt: skip
"""Operators whose input gradient is in memory that is not shared."""
SAME = ("spread", "counted")
"""Kinds of steps that give their input as it is, and do something to its gradient."""
Pads = tuple[tuple[int, int, int], ...]
DEVICES = ("cpu", "cuda")


def autocast() -> list[bool]:
    """Tell for each kind of device whether autocast is on."""
    return [torch.is_autocast_enabled(device) for device in DEVICES]


def is_eager_float(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether kernels other than PyTorch's own choice apply: floats on the CPU, no autocast, no compiler."""
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype
        and x.dtype in (torch.float32, torch.float64)
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


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
        """Layout of the whole."""
        assert self.layout_or_none is not None
        return self.layout_or_none

    @property
    def shape(self) -> Shape:
        """The global shape."""
        return shape_of(self.layout)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's part."""
        return prod(self.local) * self.dtype.itemsize


@dataclass(eq=False)
class Step:
    """One operation: local, or one of the dependences on other ranks.

    Attributes
    ----------
    kind : 'local', 'norm', 'view', 'gather', 'ring', 'sum', 'max', or one of SAME
    name : str
        The module's path and the operator.
    inputs, outputs : values, by id
    run : callable
        For 'local': from the inputs' tensors to the outputs'.
    op : str
        The operator whose result the first output is, if there is one.
    window : bool
        Whether it is what windows of this rank see, a range along each axis: that may have a border scheme.
    scheme : ExchangePolicy or None
        How cells of other tiles come; None: exactly.
    owns_gradient : bool
        Of a view: whether the gradient of its output is in memory that is not shared.
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
    window: bool = False
    scheme: ExchangePolicy | None = None
    owns_gradient: bool = False


@dataclass(eq=False)
class TorchGraph:
    """The steps of a captured module on a mesh of ranks, as one rank runs them.

    Attributes
    ----------
    mesh : Mesh
    rank : int
    steps : list of Step
    values : list of Value
    parameters, buffers, inputs : dict or list of ids
    outputs : list of id, or of a Python value
    mutated : dict of buffer to id
    key : int or None
        The value of the number that random ones are keyed by.
    recompute : bool
        Whether the way back runs segments again instead of keeping what is in them.
    """

    mesh: Mesh
    rank: int
    steps: list[Step]
    values: list[Value]
    parameters: dict[str, int]
    buffers: dict[str, int]
    inputs: list[int]
    outputs: list[Any]
    mutated: dict[str, int]
    key: int | None = None
    recompute: bool = False

    def __post_init__(self) -> None:
        """Drop steps whose values are never read, and find when each value can be freed."""
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

    def segments(self) -> list[Segment]:
        """Return what is run again as a whole: about as many segments as each has steps, cut where few values live.

        The same on all ranks.
        """
        total = len(self.steps)
        made = {out: at for at, step in enumerate(self.steps) for out in step.outputs}
        last = {value: at for at, step in enumerate(self.steps) for value in step.inputs}
        live = [0] * (total + 1)  # values of steps before that are read from this one on
        for value, first in made.items():
            for at in range(first + 1, last.get(value, first) + 1):
                live[at] += total if self._written_over(value, last) else 1
        size = max(1, isqrt(total))
        cuts = [0]
        while total - cuts[-1] > 3 * size // 2:
            middle = cuts[-1] + size
            near = range(middle - size // 2, middle + size // 2 + 1)
            cuts.append(min((live[at], abs(at - middle), at) for at in near)[2])
        return self._cut_at([*cuts, total])

    def compile(self, compiler: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Let local steps that follow one another be one, which the compiler has made faster."""
        alone = [step.kind != "local" or step.key is not None for step in self.steps]
        edges = (at for at in range(1, len(alone)) if alone[at] or alone[at - 1])
        found = []
        for segment in self._cut_at([0, *edges, len(alone)]):
            steps, inputs, outputs = segment
            if len(steps) > 1:
                freed = {value for step in steps for value in step.free}
                free = tuple(value for value in (*inputs, *outputs) if value in freed)
                steps = [replace(steps[-1], inputs=inputs, outputs=outputs, run=compiler(segment.run), free=free)]
            found += steps
        self.steps = found

    def _cut_at(self, cuts: Sequence[int]) -> list[Segment]:
        last = {value: at for at, step in enumerate(self.steps) for value in step.inputs}
        for value in (*self.outputs, *self.mutated.values()):
            last[value] = len(self.steps)
        found = []
        for begin, end in pairwise(cuts):
            steps = self.steps[begin:end]
            inside = {out for step in steps for out in step.outputs}
            read = dict.fromkeys(value for step in steps for value in step.inputs if value not in inside)
            given = [out for step in steps for out in step.outputs if last.get(out, -1) >= end]
            found.append(Segment(steps, tuple(read), tuple(given)))
        return found

    def _written_over(self, value: int, last: Mapping[int, int]) -> bool:
        """Return whether a step may write its results over a value: it would not be there to run that again."""
        at = last.get(value, len(self.steps))
        return at < len(self.steps) and self.steps[at].op in IN_PLACE

    def _save_memory(self) -> None:
        """Let steps, and gradients of views, overwrite values without other readers."""
        readers = Counter(value for step in self.steps for value in step.inputs)
        owned = {step.inputs[0] for step in self.steps if step.op in OWN_GRADIENT and step.inputs}
        fresh = {step.outputs[0] for step in self.steps if step.op in FRESH and step.kind in ("local", "norm")}
        for at, step in enumerate(self.steps):
            if step.op in IN_PLACE and step.kind == "local" and step.key is None:
                (value,) = step.inputs
                if value in fresh and readers[value] == 1 and value in step.free:
                    self.steps[at] = replace(step, run=IN_PLACE[step.op])
            elif step.kind == "view":
                (value,) = step.outputs
                step.owns_gradient = value in owned and readers[value] == 1 and value not in self.outputs


class Segment(NamedTuple):
    """Steps one after the other, the values that they read, and those of theirs that others read."""

    steps: list[Step]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def run(self, *tensors: Any) -> tuple[Any, ...]:
        """Run local steps."""
        env = dict(zip(self.inputs, tensors, strict=True))
        for step in self.steps:
            assert step.run is not None
            env.update(zip(step.outputs, step.run(*[env[value] for value in step.inputs]), strict=True))
        return tuple(env[value] for value in self.outputs)


def has_gradients(dtype: torch.dtype) -> bool:
    """Return whether numbers of a dtype are real or complex: others have no gradient."""
    return dtype.is_floating_point or dtype.is_complex


def axes_of_values(values: Iterable[Value]) -> frozenset[int]:
    """Return the axes along which any of the values differs."""
    found: frozenset[int] = frozenset()
    for value in values:
        found |= value.axes
    return found
